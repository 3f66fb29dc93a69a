// One metric of several jobs in one chart: a line per job, or mean and standard deviation per group.
import { withQuery } from "../../api/http";
import { useLiveAll } from "../../api/live";
import { ended, type Job, num } from "../../api/types";
import { LineChart, type Range, type Series } from "../../charts/line";
import type { Columns } from "../../charts/spark";
import { useQuery } from "../../query";
import { spread } from "./spread";

const MOST_POINTS = 1000;

interface Props {
  metric: string;
  jobs: Job[];
  /** Indices of jobs by group name; null if they are not grouped. */
  groups: Map<string, number[]> | null;
}

export function Overlay({ metric, jobs, groups }: Props) {
  const [query, change] = useQuery();
  const range = rangeOf(query.get("steps"));
  const log = query.get("log") === "1";
  const smoothing = Number(query.get("smooth") ?? 0.6);
  const asked = jobs.map((job) => (job.summary[metric] ? pathOf(job, metric, range) : null));
  const answers = useLiveAll<Columns>(asked.filter((path) => path !== null), jobs.every(ended) ? Infinity : 3);
  const columns = asked.map((path) => (path === null ? null : (answers.shift()?.value ?? null)));
  const lines = columns.map((one) => lineOf(one, metric));
  const single = (place: number): Series => ({ label: nameOf(jobs, place), style: place, ...lines[place]!, thinned: lines[place]!.xs.length > 0.9 * MOST_POINTS });
  const series = groups ? [...groups].map(([name, places], style) => grouped(name, places.map((place) => lines[place]!), style)) : jobs.map((_, place) => single(place));
  return (
    <>
      <div class="row">
        <label class="row">Smoothing
          <input type="range" min="0" max="0.99" step="0.01" value={smoothing} disabled={groups !== null} onChange={(event) => change({ smooth: event.currentTarget.value })} />
        </label>
        <label class="row"><input type="checkbox" checked={log} onChange={() => change({ log: log ? null : "1" })} /> Log scale</label>
        {groups && <span class="muted">The line is the mean, the band ± one standard deviation.</span>}
      </div>
      <LineChart title={`${metric} of ${jobs.length} jobs`} series={series.filter((one) => one.xs.length)} log={log} smoothing={groups ? 0 : smoothing} height={320}
        range={range} onZoom={(wanted) => change({ steps: wanted && `${Math.floor(wanted[0])}-${Math.ceil(wanted[1])}` })} />
    </>
  );
}

function pathOf(job: Job, metric: string, range: Range | null): string {
  const steps = range && { from_step: range[0], to_step: range[1] + 1 };
  return withQuery(`jobs/${job.id}/metrics/query`, { name: metric, max_points: MOST_POINTS, ...steps });
}

/** "120-400", from the URL. */
function rangeOf(text: string | null): Range | null {
  const found = /^(\d{1,12})-(\d{1,12})$/.exec(text ?? "");
  return found && Number(found[1]) < Number(found[2]) ? [Number(found[1]), Number(found[2])] : null;
}

function lineOf(columns: Columns | null, metric: string): { xs: number[]; ys: number[] } {
  const values = columns?.values[metric] ?? [];
  const there = values.flatMap((value, place) => (value === null ? [] : [[columns!.step[place]!, num(value)!] as const]));
  return { xs: there.map(([x]) => x), ys: there.map(([, y]) => y) };
}

function grouped(name: string, lines: { xs: number[]; ys: number[] }[], style: number): Series {
  const { xs, mean, std } = spread(lines);
  const ys = mean.map((one) => one ?? NaN);
  const side = (sign: number) => ys.map((one, place) => one + sign * (std[place] ?? 0));
  return { label: `${name} (${lines.length})`, style, xs, ys, low: side(-1), high: side(1) };
}

/** Jobs with the same name are distinguished by the end of their ids. */
function nameOf(jobs: Job[], place: number): string {
  const { name, id } = jobs[place]!;
  if (name === null) return id;
  return jobs.filter((job) => job.name === name).length > 1 ? `${name} …${id.slice(-4)}` : name;
}
