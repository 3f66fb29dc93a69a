// The result of an evaluation job: metrics, confusion matrix, worst samples, and metrics by value of a column.
import { ended, type Job, num, type Number } from "../../api/types";
import { count, figure, percent } from "../../format";
import { Scroll } from "../../ui/scroll";
import { Empty } from "../../ui/state";
import { Failure } from "./logs/failure";
import { ResultFiles } from "./predictions/predictions";

type Numbers = Record<string, Number>;
type Sample = Record<string, unknown> & { row: number; loss: Number };
interface Bin { from: number; to: number; count: number; confidence: number; accuracy: number }
interface Calibration { bins: Bin[]; expected_calibration_error: Number; maximum_calibration_error: Number; brier_score: Number }
export interface Result {
  rows: number;
  step: number;
  metrics: Numbers;
  classes?: (string | number)[];
  confusion?: number[][];
  pr_curve?: { average_precision: Number[] };
  roc_curve?: { auroc: Number[] };
  calibration?: Calibration;
  worst_samples?: Sample[];
  by?: Record<string, Record<string, Numbers>>;
  left_out?: string[];
}

const MOST_CLASSES = 40;

export function Evaluation({ job }: { job: Job }) {
  const result = job.result as Result | null | undefined;
  return (
    <div class="stack">
      <Failure job={job} />
      {result ? <Found result={result} /> : <Empty><p>{ended(job) ? "No result." : "The result is shown when the job has ended."}</p></Empty>}
      <ResultFiles job={job} />
    </div>
  );
}

function Found({ result }: { result: Result }) {
  const called = (id: number) => String(result.classes?.[id] ?? id);
  return (
    <>
      <section class="card stack" aria-label="Metrics">
        <h2>Metrics</h2>
        <p class="muted">{count(result.rows)} rows, weights of step {count(result.step)}</p>
        <Scroll label="Metrics">
          <table>
            <caption class="only-readers">Metrics over all rows</caption>
            <thead><tr><th scope="col">Metric</th><th scope="col" class="number">Value</th></tr></thead>
            <tbody>{Object.entries(result.metrics).map(([name, value]) => <tr key={name}><th scope="row">{name}</th><td class="number">{figure(num(value))}</td></tr>)}</tbody>
          </table>
        </Scroll>
        {result.left_out && <p class="muted">Too large to show here, see evaluation.json: {result.left_out.join(", ")}.</p>}
      </section>
      {result.confusion && <Confusion counts={result.confusion} called={called} areas={areasOf(result)} />}
      {result.calibration && <Calibrated calibration={result.calibration} />}
      {Object.entries(result.by ?? {}).map(([column, values]) => <ByValue key={column} column={column} values={values} />)}
      {result.worst_samples && <Worst samples={result.worst_samples} />}
    </>
  );
}

interface Area { name: string; values: Number[] }

function areasOf({ pr_curve, roc_curve }: Result): Area[] {
  return [{ name: "average precision", values: pr_curve?.average_precision ?? [] }, { name: "AUROC", values: roc_curve?.auroc ?? [] }]
    .filter((one) => one.values.length > 1);
}

/** Rows are true classes; a cell has the number of targets and the share of its true class. */
export function Confusion({ counts, called, areas }: { counts: number[][]; called(id: number): string; areas: Area[] }) {
  if (counts.length > MOST_CLASSES) return <p class="muted">The confusion matrix of {count(counts.length)} classes is in confusion.csv.</p>;
  return (
    <section class="card" aria-label="Confusion matrix">
      <h2>Confusion matrix</h2>
      <Scroll label="Confusion matrix">
        <table class="confusion">
          <caption>Rows: true class. Columns: predicted class. Each cell: the number of targets, and their share of the true class.</caption>
          <thead><tr><td />{counts.map((_, id) => <th key={id} scope="col">{called(id)}</th>)}{areas.map((one) => <th key={one.name} scope="col">{one.name}</th>)}</tr></thead>
          <tbody>
            {counts.map((row, truth) => {
              const total = row.reduce((sum, one) => sum + one, 0);
              return (
                <tr key={truth}>
                  <th scope="row">{called(truth)}</th>
                  {row.map((cell, id) => <Cell key={id} cell={cell} total={total} right={truth === id} />)}
                  {areas.map((one) => <td key={one.name}>{figure(num(one.values[truth]))}</td>)}
                </tr>
              );
            })}
          </tbody>
        </table>
      </Scroll>
    </section>
  );
}

function Cell({ cell, total, right }: { cell: number; total: number; right: boolean }) {
  if (!cell) return <td><span class="muted">0</span></td>;
  const part = cell / total;
  return (
    <td style={{ background: `color-mix(in srgb, var(${right ? "--good" : "--bad"}) ${Math.round(part * 45)}%, transparent)` }}>
      {count(cell)}<br /><small>{percent(part, 1)}</small>
    </td>
  );
}

function Calibrated({ calibration }: { calibration: Calibration }) {
  const facts: [string, Number][] = [
    ["Expected calibration error", calibration.expected_calibration_error],
    ["Maximum calibration error", calibration.maximum_calibration_error],
    ["Brier score", calibration.brier_score],
  ];
  return (
    <section class="card stack" aria-label="Calibration">
      <h2>Calibration</h2>
      <dl class="facts">{facts.flatMap(([name, value]) => [<dt key={name}>{name}</dt>, <dd key={`${name} is`}>{figure(num(value))}</dd>])}</dl>
      <Scroll label="Calibration">
        <table>
          <caption class="only-readers">Predicted probability and accuracy by bin</caption>
          <thead><tr><th scope="col">Probability</th><th scope="col" class="number">Count</th><th scope="col" class="number">Mean probability</th><th scope="col" class="number">Accuracy</th></tr></thead>
          <tbody>
            {calibration.bins.map((one) => (
              <tr key={one.from}>
                <th scope="row">{percent(one.from, 0)} to {percent(one.to, 0)}</th>
                <td class="number">{count(one.count)}</td>
                <td class="number">{percent(one.confidence, 1)}</td>
                <td class="number">{percent(one.accuracy, 1)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </section>
  );
}

function ByValue({ column, values }: { column: string; values: Record<string, Numbers> }) {
  const names = [...new Set(Object.values(values).flatMap((one) => Object.keys(one)))];
  return (
    <section class="card" aria-label={`By ${column}`}>
      <h2>By {column}</h2>
      <Scroll label={`By ${column}`}>
        <table>
          <caption class="only-readers">Metrics of the rows of each value of {column}</caption>
          <thead><tr><th scope="col">{column}</th>{names.map((name) => <th key={name} scope="col" class="number">{name}</th>)}</tr></thead>
          <tbody>
            {Object.entries(values).map(([value, own]) => (
              <tr key={value}><th scope="row">{value}</th>{names.map((name) => <td key={name} class="number">{name === "rows" ? count(num(own[name])!) : figure(num(own[name]))}</td>)}</tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </section>
  );
}

const CLASS_OF: Record<string, string> = { target: "target_class", prediction: "prediction_class" };

function Worst({ samples }: { samples: readonly Sample[] }) {
  const names = [...new Set(samples.flatMap((one) => Object.keys(one)))].filter((name) => !Object.values(CLASS_OF).includes(name));
  return (
    <section class="card" aria-label="Worst samples">
      <h2>Worst samples</h2>
      <Scroll label="Worst samples">
        <table>
          <caption class="only-readers">The rows with the largest loss, the worst first</caption>
          <thead><tr>{names.map((name) => <th key={name} scope="col" class="number">{name}</th>)}</tr></thead>
          <tbody>
            {samples.map((one) => (
              <tr key={one.row}>{names.map((name) => <td key={name} class="number">{shown(one[CLASS_OF[name] ?? name] ?? one[name])}</td>)}</tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </section>
  );
}

function shown(value: unknown): string {
  if (value === undefined || value === null) return "";
  if (Array.isArray(value)) return value.flat(Infinity).map((one) => figure(num(one as Number))).join(", ");
  return typeof value === "number" && !globalThis.Number.isInteger(value) ? figure(value) : String(value);
}
