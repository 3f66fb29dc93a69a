// The Inside view of a job: the health of its layers, its graph, its gradient flow, and its probes.
import { useMemo } from "preact/hooks";

import { ended, type Job } from "../../api/types";
import { count } from "../../format";
import { useQuery } from "../../query";
import { part } from "../../ui/part";
import { Empty, Loading, ProblemBox } from "../../ui/state";
import { type Lines, type Network, useLines, useNetwork } from "./layers/data";
import { type Level, levelCount, SIGNS } from "./layers/health";
import { MEASURES, type MeasureName, defaultMeasure } from "./layers/history";
import { LightTip } from "./layers/health-sign";
import { Scrubber } from "./statistics/scrubber";
import { stepOf } from "./statistics/steps";
import { LayerTable } from "./layers/table";
import { tensorsOf } from "./layers/combined";

const Graph = part(() => import("./graph/graph").then((it) => it.Graph));
const Depth = part(() => import("./layers/depth").then((it) => it.Depth));
const Probes = part(() => import("./probes/probes").then((it) => it.Probes));

const VIEWS = { layers: "Layers", graph: "Graph", gradients: "Gradient flow", probes: "Probes" } as const;
type View = keyof typeof VIEWS;

export function Inside({ job }: { job: Job }) {
  const [query, change] = useQuery();
  const asked = query.get("view") ?? "layers";
  const view = asked in VIEWS ? (asked as View) : "layers";
  const step = stepOf(query.get("step"));
  const { network, problem } = useNetwork(job, step);
  const measure = measureOf(query.get("line"), view, network);
  const lines = useLines(job, network?.newest.length ?? 0, measure);
  if (job.kind !== "train") return <Empty><p>Only a training job has layers to watch.</p></Empty>;
  if (!network) return problem ? <ProblemBox problem={problem} /> : <Loading what="Loading the layers" />;
  return (
    <div class="stack inside">
      <div class="spread">
        <nav class="row" aria-label="Inside views">
          {Object.entries(VIEWS).map(([key, name]) => <a key={key} class="button" href={`?${kept(query, key)}`} aria-current={key === view ? "page" : undefined}>{name}</a>)}
        </nav>
        <Summary network={network} />
      </div>
      {problem && <ProblemBox problem={problem} />}
      <Unwatched job={job} network={network} />
      {view !== "probes" && <Scrubber steps={lines?.steps ?? []} step={step} onStep={(one) => change({ step: one === null ? null : String(one) })} />}
      <Shown view={view} job={job} network={network} lines={lines} measure={measure} />
      <LightTip />
    </div>
  );
}

/** A job may fail at a step that no probe sampled: the newest statistics are then from before the failure. */
function Unwatched({ job, network }: { job: Job; network: Network }) {
  const failed = job.error?.["step"];
  if (typeof failed !== "number") return null;
  const newest = Math.max(-1, ...network.newest.flatMap(tensorsOf).map(({ figures }) => figures.step));
  if (newest >= failed) return null;
  return (
    <p class="note" role="note">
      The job failed at step {count(failed)}, which no probe sampled{newest < 0 ? "" : `: the newest statistics are of step ${count(newest)}`}.
      {" "}To see the last steps before NaN or Inf, retry with a probe that has <code>"on": "nonfinite"</code>.
    </p>
  );
}

/** Keep the step when another view is selected; drop the parameters of one view. */
function kept(query: URLSearchParams, view: string): string {
  const next = new URLSearchParams({ view });
  const step = query.get("step");
  if (step) next.set("step", step);
  return next.toString();
}

function measureOf(asked: string | null, view: View, network: Network | null): MeasureName | null {
  if (!network || view === "probes") return null;
  if (asked && asked in MEASURES) return asked as MeasureName;
  return defaultMeasure(network.newest);
}

function Shown({ view, job, network, lines, measure }: { view: View; job: Job; network: Network; lines: Lines | null; measure: MeasureName | null }) {
  const [, change] = useQuery();
  if (view === "graph") return <Graph job={job} rows={network.rows} />;
  if (view === "gradients") return <Depth job={job} layers={network.layers} />;
  if (view === "probes") return <Probes job={job} layers={network.newest} />;
  const tools = (
    <label class="field"><span>Trend</span>
      <select value={measure ?? ""} onChange={(event) => change({ line: event.currentTarget.value })}>
        {Object.entries(MEASURES).map(([key, name]) => <option key={key} value={key}>{name}</option>)}
      </select>
    </label>
  );
  return <LayerTable job={job.id} rows={network.rows} lines={lines} measure={measure ?? "output/std"} canWatch={!ended(job)} tools={tools} />;
}

function Summary({ network }: { network: Network }) {
  const [query, change] = useQuery();
  const numbers = useMemo(() => {
    const found: Record<Level, number> = { bad: 0, warn: 0, ok: 0, unknown: 0 };
    for (const row of network.rows) found[row.verdict.level]++;
    return found;
  }, [network]);
  const levels: Level[] = ["bad", "warn", "ok", "unknown"];
  return (
    <span class="row" role="status">
      {levels.filter((level) => numbers[level]).map((level) => (
        <span key={level} class={`light ${level}`} data-count={numbers[level]}><span aria-hidden="true">{SIGNS[level][0]}</span> {levelCount(level, numbers[level])}</span>
      ))}
      {numbers.bad + numbers.warn > 0 && query.get("sort") !== "-health" && <button class="small" onClick={() => change({ view: "layers", sort: "-health" })}>Worst first</button>}
    </span>
  );
}
