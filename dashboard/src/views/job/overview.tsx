// The charts of a job, its best values, and why it failed.
import { useMemo, useState } from "preact/hooks";

import { useLive } from "../../api/live";
import { type Checkpoint, type Job, num, type Page } from "../../api/types";
import { count, figure } from "../../format";
import { useQuery } from "../../query";
import { Empty, Loading, ProblemBox } from "../../ui/state";
import { bestOf, directionOf, lostAt } from "../jobs/finite";
import { type ChartLook, Labelled, MetricChart } from "./chart";
import { type Axis, type Metric, pace, type Steps, summarised, useAxis, useEventsAs, useMetrics } from "./data";
import { Failure } from "./failure";
import { type Group, grouped, inOrder, isUpkeep } from "./groups";
import { fewer, MARKED, markersOf, markOf, marksOf } from "./marks";

type Asked = ReturnType<typeof useQuery>;
const FEW = 12; // so many charts need no search

export function Overview({ job }: { job: Job }) {
  const list = useMetrics(job);
  const metrics = list.value?.data ?? summarised(job);
  return (
    <div class="stack">
      <Failure job={job} />
      <Best job={job} />
      {metrics?.length ? <Charts job={job} metrics={metrics} /> : <Waiting job={job} known={!!list.value} />}
      {list.problem && !list.value && <ProblemBox problem={list.problem} />}
    </div>
  );
}

function Waiting({ job, known }: { job: Job; known: boolean }) {
  if (!known) return <Loading what="Reading the metrics" />;
  return <Empty><p>{job.kind === "infer" ? "An inference reports no metrics: its results are under predictions." : "Nothing was measured yet."}</p></Empty>;
}

function Charts({ job, metrics }: { job: Job; metrics: readonly Metric[] }) {
  const [query, change] = useQuery();
  const range = rangeOf(query);
  const axis = useAxis(job, query.get("x"));
  const { items: told } = useEventsAs(job, MARKED, 0, markOf, fewer);
  const saved = useLive<Page<Checkpoint>>(`jobs/${job.id}/checkpoints`, pace(job, 3)).value?.data;
  const markers = useMemo(() => markersOf([...told, ...fewer(marksOf(saved ?? []))], axis), [told, saved, axis]);
  const logs = (query.get("log") ?? "").split(",").filter(Boolean);
  const groups = useMemo(() => grouped(metrics.map((one) => one.name)), [metrics.map((one) => one.name).join("\n")]);
  const [typed, setTyped] = useState(query.get("q") ?? "");
  const shown = groups.filter((one) => matches(one, typed));
  const lookOf = (group: Group): ChartLook => ({
    axis,
    markers,
    range,
    smoothing: group.key === "lr" ? 0 : +(query.get("smooth") ?? 0), // a rate is not noisy: what it was is what is asked
    log: logs.includes(group.key),
    onLog: () => change({ log: toggled(logs, group.key).join(",") }),
    onRange: (steps) => change({ from: steps && String(steps[0]), to: steps && String(steps[1]) }),
  });
  return (
    <>
      <Toolbar query={query} change={change} axis={axis} range={range} />
      {groups.length > FEW && (
        <label class="field" style={{ maxWidth: "30rem" }}><span>Metrics whose name contains</span>
          <input type="search" value={typed} onInput={(event) => setTyped(event.currentTarget.value)} onChange={() => change({ q: typed })} />
        </label>
      )}
      {shown.length === 0 && <Empty><p>No metric of this name.</p></Empty>}
      <div class="charts">
        {shown.map((one) => (
          <MetricChart key={one.key} job={job} group={one} metrics={metrics.filter((metric) => one.names.includes(metric.name))} look={lookOf(one)} />
        ))}
      </div>
    </>
  );
}

function matches(group: Group, text: string): boolean {
  const wanted = text.trim().toLowerCase();
  return !wanted || [group.title, ...group.names].some((name) => name.toLowerCase().includes(wanted));
}

function toggled(list: readonly string[], one: string): string[] {
  return list.includes(one) ? list.filter((other) => other !== one) : [...list, one];
}

function rangeOf(query: URLSearchParams): Steps | null {
  const [from, to] = [query.get("from"), query.get("to")];
  return from && to && /^\d+$/.test(from) && /^\d+$/.test(to) && +from < +to ? [+from, +to] : null;
}

/** What holds for all charts: x, smoothing, zoom. */
function Toolbar({ query, change, axis, range }: { query: URLSearchParams; change: Asked[1]; axis: Axis; range: Steps | null }) {
  const kept = query.get("smooth") ?? "0";
  const [dragged, setDragged] = useState<string | null>(null);
  return (
    <div class="row" role="group" aria-label="How the charts are drawn">
      <Labelled name="x">
        <select value={query.get("x") ?? "step"} onChange={(event) => change({ x: event.currentTarget.value === "step" ? null : event.currentTarget.value })}>
          <option value="step">step</option>
          <option value="epoch">epoch</option>
          <option value="time">time</option>
        </select>
      </Labelled>
      <Labelled name="smoothing">
        <input type="range" min="0" max="0.99" step="0.01" value={dragged ?? kept} onInput={(event) => setDragged(event.currentTarget.value)}
          onChange={(event) => (setDragged(null), change({ smooth: +event.currentTarget.value ? event.currentTarget.value : null }))} />
        <span class="number mono">{+(dragged ?? kept) ? dragged ?? kept : "off"}</span>
      </Labelled>
      {range && (
        <span class="row">
          <span>steps {count(range[0])} to {count(range[1])}</span>
          <button onClick={() => change({ from: null, to: null })}>Show all steps</button>
        </span>
      )}
      {!axis.ready && axis.name !== "step" && <span class="muted">Too few steps to place them on this axis.</span>}
      {axis.note && axis.ready && <span class="muted">{axis.note}</span>}
      {!range && <span class="muted wide-only">Drag over a chart to zoom; double-click or Escape shows all.</span>}
    </div>
  );
}

const NO_BEST = /^(lr|grad_norm|clipped_steps|skipped_steps)(\/|$)|^output_grad_clip\//;

/** The best value of each metric with its step, as the job's summary has it. */
function Best({ job }: { job: Job }) {
  const names = inOrder(Object.keys(job.summary)).filter((name) => !isUpkeep(name) && !NO_BEST.test(name));
  if (!names.length) return null;
  return (
    <div class="tiles" role="list" aria-label="Best values">
      {names.slice(0, FEW).map((name) => <Tile key={name} name={name} job={job} />)}
    </div>
  );
}

function Tile({ name, job }: { name: string; job: Job }) {
  const { summary } = job;
  const { value, step, counts } = bestOf(job, name);
  const odd = num(summary[name]?.["first_nonfinite_step"]);
  const at = step === null ? "" : counts ? `at step ${count(step)} · ` : `${figure(value)} at step ${count(step)} does not count · `;
  return (
    <div class="tile" role="listitem">
      <small>{name}, {directionOf(job, name) === "min" ? "lowest" : "highest"}</small>
      <b>{counts ? figure(value) : "none"}</b>
      <small>{at}now {figure(num(summary[name]?.["last"]))}</small>
      {odd !== null ? <div><span class="badge bad">✕ not finite from step {count(odd)}</span></div>
        : !counts && lostAt(summary) !== null && <div><span class="badge bad">✕ loss not finite from step {count(lostAt(summary))}</span></div>}
    </div>
  );
}
