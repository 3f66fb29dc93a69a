// Gradient flow: the gradient of every layer in forward order, at the selected step.
import { useLocation } from "preact-iso";
import { useMemo, useState } from "preact/hooks";

import { Bars } from "../../../charts/bars";
import { ended, type Job, type Layer } from "../../../api/types";
import { count, figure } from "../../../format";
import { useQuery } from "../../../query";
import { Empty } from "../../../ui/state";
import { DEPTH, flowOf, type FlowPoint, type Measure, gradientTrend, type Source } from "./flow";
import { LIMITS } from "./health";

const MEASURES: Record<Measure, string> = { l2: "L2 norm", rms: "root mean square", absmax: "max magnitude" };
const SOURCES: Record<Source, string> = { param_grad: "Weight gradient", output_grad: "Activation gradient" };
const WORDS = { vanishing: "▼ vanishing", exploding: "▲ exploding", nonfinite: "✕ NaN or Inf" } as const;

export function Depth({ job, layers }: { job: Job; layers: readonly Layer[] }) {
  const [query, change] = useQuery();
  const { route } = useLocation();
  const [pointed, setPointed] = useState<number | null>(null);
  const [table, setTable] = useState(false);
  const source: Source = query.get("of") === "output_grad" ? "output_grad" : "param_grad";
  const measure = measureOf(query.get("measure"), source);
  const points = useMemo(() => flowOf(layers, measure, source), [layers, measure, source]);
  const whole = useMemo(() => gradientTrend(flowOf(layers, "l2", source)), [layers, source]);
  const seen = points.filter((point) => point.value !== null);
  const open = (place: number) => route(`/jobs/${job.id}/layers/${encodeURIComponent(points[place]!.name)}?kind=${source}`);
  const at = pointed === null ? null : points[pointed];
  return (
    <div class="stack">
      <div class="row">
        <Choice label="Gradient" options={SOURCES} value={source} onChoose={(of) => change({ of, line: `${of}/l2` })} />
        <Choice label="Statistic" options={source === "output_grad" ? { l2: MEASURES.l2, absmax: MEASURES.absmax } : MEASURES} value={measure} onChoose={(one) => change({ measure: one })} />
        <button aria-pressed={table} onClick={() => setTable(!table)}>Table</button>
      </div>
      {!seen.length ? <Unwatched job={job} source={source} /> : (
        <div class="card">
          {table ? <FlowTable job={job.id} points={points} source={source} />
            : <Bars bars={points} chosen={pointed} label={sentence(points, MEASURES[measure])} onPoint={setPointed} onPick={open} />}
          <p class="muted reading">{at ? `${at.name}: ${figure(at.value)}${at.mark ? `, ${WORDS[at.mark]}` : ""}` : "Layers in forward order, the first at the left. Click a bar to open its layer."}</p>
          <Marked job={job.id} points={points} source={source} whole={whole} />
        </div>
      )}
    </div>
  );
}

function measureOf(asked: string | null, source: Source): Measure {
  const measure = asked === "rms" || asked === "absmax" ? asked : "l2";
  return source === "output_grad" && measure === "rms" ? "l2" : measure; // the number of values depends on the batch
}

function Choice({ label, options, value, onChoose }: { label: string; options: Record<string, string>; value: string; onChoose: (value: string) => void }) {
  return (
    <label class="field"><span>{label}</span>
      <select value={value} onChange={(event) => onChoose(event.currentTarget.value)}>
        {Object.entries(options).map(([key, name]) => <option key={key} value={key}>{name}</option>)}
      </select>
    </label>
  );
}

function Unwatched({ job, source }: { job: Job; source: Source }) {
  return (
    <Empty>
      <p>No statistics of the {SOURCES[source].toLowerCase()} at this step.</p>
      {!ended(job) && <a class="button" href={`?view=probes&watch=*&kinds=${source}`}>Attach a probe</a>}
    </Empty>
  );
}

function sentence(points: readonly FlowPoint[], measure: string): string {
  const values = points.flatMap((point) => (point.value !== null && Number.isFinite(point.value) ? [point.value] : []));
  const marks = points.filter((point) => point.mark).length;
  if (!values.length) return `Gradients of ${points.length} layers, all NaN or Inf`;
  return `Gradient flow, ${measure}: ${values.length} layers from ${figure(Math.min(...values))} to ${figure(Math.max(...values))}, first ${figure(values[0])}, last ${figure(values.at(-1))}, ${marks} marked`;
}

function Marked({ job, points, source, whole }: { job: string; points: readonly FlowPoint[]; source: Source; whole: ReturnType<typeof gradientTrend> }) {
  const marked = points.filter((point) => point.mark);
  const rules = `The gradient of a layer is vanishing if its ${source === "param_grad" ? "root mean square" : "max magnitude"} is under ${LIMITS.vanishing}, and exploding if its norm is over ${LIMITS.large}. `
    + `Over all layers, it is vanishing if the ratio of the first layer's norm to the last layer's is under ${DEPTH.vanishing} and the first norm is under ${DEPTH.first}, and exploding if the ratio is over ${DEPTH.exploding}.`;
  return (
    <>
      {whole && <p class={whole.mark ? "bad-value" : ""}>Ratio of the first layer's norm to the last layer's: {figure(whole.ratio)}{whole.mark ? ` — ${WORDS[whole.mark]}` : ""}</p>}
      {marked.length > 0 && (
        <ul aria-label="Marked layers">
          {marked.slice(0, 20).map((point) => <li key={point.name}>{WORDS[point.mark!]}: <a href={`/jobs/${job}/layers/${encodeURIComponent(point.name)}?kind=${source}`}>{point.name}</a> {figure(point.value)}</li>)}
          {marked.length > 20 && <li>and {count(marked.length - 20)} more</li>}
        </ul>
      )}
      <p class="muted">{rules}</p>
    </>
  );
}

const ROWS = 200;

function FlowTable({ job, points, source }: { job: string; points: readonly FlowPoint[]; source: Source }) {
  return (
    <div class="values" tabIndex={0} role="region" aria-label="Gradients">
      <table>
        <thead><tr><th scope="col">Layer</th><th scope="col" class="number">Gradient</th><th scope="col">Finding</th></tr></thead>
        <tbody>
          {points.slice(0, ROWS).map((point) => (
            <tr key={point.name}>
              <th scope="row"><a href={`/jobs/${job}/layers/${encodeURIComponent(point.name)}?kind=${source}`}>{point.name}</a></th>
              <td class="number" data-value={point.value ?? ""}>{figure(point.value)}</td>
              <td>{point.mark ? WORDS[point.mark] : ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {points.length > ROWS && <p class="muted">The first {ROWS} of {count(points.length)} layers; the Layers view shows all.</p>}
    </div>
  );
}
