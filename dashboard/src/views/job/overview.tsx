// The charts of a job, its best values, and why it failed.
import { useMemo, useState } from "preact/hooks";

import { useLive } from "../../api/live";
import { type Checkpoint, type Job, num, type Page } from "../../api/types";
import { count, figure } from "../../format";
import { useQuery } from "../../query";
import { Empty, Loading, ProblemBox } from "../../ui/state";
import { bestOf, directionOf, lostAt } from "../jobs/finite";
import { type ChartLook, Labelled, MetricChart } from "./charts/chart";
import { type Axis, type Metric, pollEvery, type Steps, summaryMetrics, useAxis, useEventsAs, useMetrics } from "./data";
import { Failure } from "./logs/failure";
import { RankTimes } from "./rank-times";
import { type Group, grouped, inOrder, isSystem } from "./charts/groups";
import { fewer, MARKED, markersOf, markOf, marksOf } from "./charts/marks";

type Asked = ReturnType<typeof useQuery>;
const FEW = 12; // more charts than this get a search field

export function Overview({ job }: { job: Job }) {
  const list = useMetrics(job);
  const metrics = list.value?.data ?? summaryMetrics(job);
  return (
    <div class="stack">
      <Failure job={job} />
      <Best job={job} />
      {metrics && <RankTimes metrics={metrics} />}
      {metrics?.length ? <Charts job={job} metrics={metrics} /> : <Waiting job={job} known={!!list.value} />}
      {list.problem && !list.value && <ProblemBox problem={list.problem} />}
    </div>
  );
}

function Waiting({ job, known }: { job: Job; known: boolean }) {
  if (!known) return <Loading what="Loading the metrics" />;
  return <Empty><p>{job.kind === "infer" ? "An inference job has no metrics. Its results are under Predictions." : "No metrics yet."}</p></Empty>;
}

function Charts({ job, metrics }: { job: Job; metrics: readonly Metric[] }) {
  const [query, change] = useQuery();
  const range = rangeOf(query);
  const axis = useAxis(job, query.get("x"));
  const { items: marks } = useEventsAs(job, MARKED, 0, markOf, fewer);
  const saved = useLive<Page<Checkpoint>>(`jobs/${job.id}/checkpoints`, pollEvery(job, 3)).value?.data;
  const markers = useMemo(() => markersOf([...marks, ...fewer(marksOf(saved ?? []))], axis), [marks, saved, axis]);
  const logs = (query.get("log") ?? "").split(",").filter(Boolean);
  const groups = useMemo(() => grouped(metrics.map((one) => one.name)), [metrics.map((one) => one.name).join("\n")]);
  const [typed, setTyped] = useState(query.get("q") ?? "");
  const shown = groups.filter((one) => matches(one, typed));
  const lookOf = (group: Group): ChartLook => ({
    axis,
    markers,
    range,
    smoothing: group.key === "lr" ? 0 : +(query.get("smooth") ?? 0), // learning rates are not noisy: show exact values
    log: logs.includes(group.key),
    onLog: () => change({ log: toggled(logs, group.key).join(",") }),
    onRange: (steps) => change({ from: steps && String(steps[0]), to: steps && String(steps[1]) }),
  });
  return (
    <>
      <Toolbar query={query} change={change} axis={axis} range={range} />
      {groups.length > FEW && (
        <label class="field" style={{ maxWidth: "30rem" }}><span>Filter metrics by name</span>
          <input type="search" value={typed} onInput={(event) => setTyped(event.currentTarget.value)} onChange={() => change({ q: typed })} />
        </label>
      )}
      {shown.length === 0 && <Empty><p>No metric matches this name.</p></Empty>}
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

/** The options of all charts: x, smoothing, zoom. */
function Toolbar({ query, change, axis, range }: { query: URLSearchParams; change: Asked[1]; axis: Axis; range: Steps | null }) {
  const kept = query.get("smooth") ?? "0";
  const [dragged, setDragged] = useState<string | null>(null);
  return (
    <div class="row" role="group" aria-label="Chart options">
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
      {!axis.ready && axis.name !== "step" && <span class="muted">Too few steps for this axis.</span>}
      {axis.note && axis.ready && <span class="muted">{axis.note}</span>}
      {!range && <span class="muted wide-only">Drag over a chart to zoom. Double-click or press Escape to reset.</span>}
    </div>
  );
}

const NO_BEST = /^(lr|grad_norm|clipped_steps|skipped_steps)(\/|$)|^output_grad_clip\//;

/** The best value of each metric with its step, from the job's summary. */
function Best({ job }: { job: Job }) {
  const names = inOrder(Object.keys(job.summary)).filter((name) => !isSystem(name) && !NO_BEST.test(name));
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
      <small>{name}, {directionOf(job, name)}</small>
      <b>{counts ? figure(value) : "none"}</b>
      <small>{at}last {figure(num(summary[name]?.["last"]))}</small>
      {odd !== null ? <div><span class="badge bad">✕ NaN or Inf from step {count(odd)}</span></div>
        : !counts && lostAt(summary) !== null && <div><span class="badge bad">✕ loss is NaN or Inf from step {count(lostAt(summary))}</span></div>}
    </div>
  );
}
