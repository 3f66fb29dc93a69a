// Random rows of a dataset, predicted and shown beside their inputs and true values.
import { useState } from "preact/hooks";

import { get, Problem, withQuery } from "../../api/http";
import { useLive } from "../../api/live";
import type { Dataset, DatasetStats, Rows } from "../../api/types";
import { count, figure, percent } from "../../format";
import type { Json, JsonObject } from "../../spec/pointer";
import type { Column, TableStats } from "../../spec/suggest";
import { Scroll } from "../../ui/scroll";
import { isPicture, RowValues } from "../datasets/rows";
import { type Answer, isRight, predict, scoresOf, truthText, valuesOf } from "./answers";
import { columnsOf, randomRows, rowOf, type Target } from "./inputs";
import { answeredBy } from "./results";
import { Failed } from "./serve";
import { type DataSpec, type SourceSpec, validationSources } from "./sources";
import type { Known } from "./try";

const ROWS = 8;
const MOST_VALUES = 1_000_000; // of a row: what the service returns at most
const COLUMNS = 8;

interface Drawn {
  split: string;
  places: number[];
  rows: JsonObject[];
  answer: Answer;
  cut: boolean;
}

export function RandomRows({ known, data }: { known: Known; data: DataSpec }) {
  const train = data.train as SourceSpec;
  const dataset = useLive<Dataset>(`datasets/${train.dataset}`, Infinity);
  const stats = useLive<DatasetStats>(dataset.value ? `datasets/${train.dataset}/stats` : null, Infinity);
  const [split, setSplit] = useState<string | null>(null);
  const [drawn, setDrawn] = useState<Drawn | null>(null);
  const [problem, setProblem] = useState<Problem | null>(null);
  const [busy, setBusy] = useState(false);
  if (!dataset.value) return dataset.problem ? <p class="muted">The training dataset is no longer there: no random rows.</p> : null;
  const { splits } = dataset.value;
  const columns = dataset.value.columns as Column[];
  const usual = validationSources(data).find((one) => one.dataset === train.dataset)?.split ?? ("test" in splits ? "test" : train.split);
  const chosen = split ?? (usual in splits ? usual : Object.keys(splits)[0]!);
  const draw = async () => {
    setBusy(true);
    try {
      setDrawn(await drawnRows(known, train.dataset, chosen, splits[chosen] ?? 0, columns));
      setProblem(null);
    } catch (error) {
      setDrawn(null);
      setProblem(error instanceof Problem ? error : new Problem(0, "unreadable", String(error)));
    }
    setBusy(false);
  };
  return (
    <div class="stack" role="group" aria-label="Random rows">
      <h3>Random rows of <a href={`/datasets/${train.dataset}?split=${encodeURIComponent(chosen)}`}>{dataset.value.name}</a></h3>
      <div class="row">
        <label class="field"><span>Split</span>
          <select value={chosen} onChange={(event) => setSplit(event.currentTarget.value)}>{Object.keys(splits).map((name) => <option key={name} value={name}>{name} ({count(splits[name])})</option>)}</select>
        </label>
        <button type="button" disabled={busy} onClick={draw}>Random rows</button>
      </div>
      {chosen === train.split && <p class="muted">The model was trained on rows of this split.</p>}
      {problem && <Failed problem={problem} />}
      {drawn && <Predicted known={known} drawn={drawn} columns={columns} figures={(stats.value?.splits as unknown as TableStats | undefined)?.[drawn.split] ?? null} />}
    </div>
  );
}

async function drawnRows(known: Known, dataset: string, split: string, total: number, columns: Column[]): Promise<Drawn> {
  const places = randomRows(total, ROWS);
  const read = (offset: number) => get<Rows>(withQuery(`datasets/${dataset}/rows`, { split, offset, limit: 1, values: MOST_VALUES }));
  const rows = (await Promise.all(places.map(read))).map((one) => one.data[0] as JsonObject);
  const made = rows.map((row) => rowOf(row, columns, known.needed, known.fields));
  const answer = await predict(known.reference, made.map((one) => one.row), known.topK);
  return { split, places, rows, answer, cut: made.some((one) => one.cut) };
}

function Predicted({ known, drawn, columns, figures }: { known: Known; drawn: Drawn; columns: Column[]; figures: TableStats[string] | null }) {
  const needed = new Set(known.needed.flatMap((name) => columnsOf(name, known.fields[name]!)));
  const inputs = columns.filter((one) => needed.has(one.name));
  const pictures = inputs.filter((one) => isPicture(one.shape));
  const shown = pictures.length ? pictures : inputs.slice(0, COLUMNS);
  const { targets } = known;
  const isMiss = (target: Target, row: number) => missed(drawn, target, row, columns);
  const right = targets.filter((one) => one.classes !== null).map((one) => [one.output, drawn.rows.filter((_, row) => isMiss(one, row) === false).length] as const);
  return (
    <>
      {right.map(([output, hits]) => <p key={output} role="status"><strong>{hits} of {drawn.rows.length}</strong> correct{targets.length > 1 && ` (${output})`}. <span class="muted">{answeredBy(drawn.answer)}</span></p>)}
      {!right.length && <p class="muted" role="status">{answeredBy(drawn.answer)}</p>}
      {drawn.cut && <p class="muted">Texts of over 1,000 characters were predicted from their beginning.</p>}
      <Scroll label="Predicted rows">
        <table class="predictions">
          <caption class="only-readers">Random rows with their predictions</caption>
          <thead><tr><th scope="col" class="number">Row</th><th scope="col">Input</th>{targets.map((one) => <Heads key={one.output} output={targets.length > 1 ? `${one.output}: ` : ""} />)}{!targets.length && <th scope="col">Prediction</th>}</tr></thead>
          <tbody>
            {drawn.rows.map((stored, row) => (
              <tr key={drawn.places[row]}>
                <th scope="row" class="number">{count(drawn.places[row])}</th>
                <td><RowValues stored={stored} shown={shown} figures={figures} row={drawn.places[row]!} /></td>
                {targets.map((one) => <Cells key={one.output} drawn={drawn} target={one} row={row} columns={columns} missed={isMiss(one, row)} />)}
                {!targets.length && <td>{Object.keys(drawn.answer.outputs).filter((key) => key.endsWith("/value")).map((key) => listed(valuesOf(drawn.answer, key.slice(0, -6), row))).join("; ")}</td>}
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </>
  );
}

function Heads({ output }: { output: string }) {
  return <><th scope="col">{output}Predicted</th><th scope="col" class="number">Probability</th><th scope="col">True</th></>;
}

/** Whether a predicted class is wrong; null: unknown. */
function missed(drawn: Drawn, target: Target, row: number, columns: Column[]): boolean | null {
  const truth = drawn.rows[row]![target.column];
  const best = scoresOf(drawn.answer, target.output, row)?.[0];
  if (target.classes === null || truth === undefined || !best) return null;
  return !isRight(best.name, truth, columns.find((one) => one.name === target.column)?.classes);
}

function Cells({ drawn, target, row, columns, missed }: { drawn: Drawn; target: Target; row: number; columns: Column[]; missed: boolean | null }) {
  const truth = drawn.rows[row]![target.column];
  const shown = truth === undefined ? "–" : textOf(truth, columns.find((one) => one.name === target.column)?.classes);
  const best = target.classes === null ? undefined : scoresOf(drawn.answer, target.output, row)?.[0];
  return (
    <>
      <td>{best ? <strong>{best.name}</strong> : listed(valuesOf(drawn.answer, target.output, row))}</td>
      <td class="number">{best ? percent(best.prob, 1) : "–"}</td>
      <td>{missed ? <span class="badge bad"><span aria-hidden="true">✕</span> {shown}<span class="only-readers">, predicted wrong</span></span> : missed === false ? <span class="badge good"><span aria-hidden="true">✓</span> {shown}</span> : shown}</td>
    </>
  );
}

const textOf = (value: Json, classes: unknown) => (Array.isArray(value) ? listed((value as unknown[]).flat(Infinity) as number[]) : typeof value === "number" && !Array.isArray(classes) ? figure(value, 5) : truthText(value, classes));
const listed = (values: readonly number[]) => values.slice(0, 5).map((one) => figure(one, 4)).join(", ") + (values.length > 5 ? " …" : "");
