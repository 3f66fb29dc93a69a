// The statistics of a tensor over steps, and its quantiles as bands.
import { useMemo } from "preact/hooks";

import { LineChart, type Range, type Series as Line } from "../../../charts/line";
import { useIncremental } from "../../../charts/turns";
import { withQuery } from "../../../api/http";
import { useLive } from "../../../api/live";
import { ended, type Job, type Layer, num, type Page } from "../../../api/types";
import { useQuery } from "../../../query";
import { Loading, ProblemBox } from "../../../ui/state";
import type { Series } from "../layers/history";
import type { Kind } from "../kinds";
import { useRank } from "../ranks";
import { WatchThis } from "../probes/watch";

const STATS = ["mean", "std", "min", "max", "l2", "absmax", "zeros", "nan", "inf", "p01", "p05", "p25", "p50", "p75", "p95", "p99"];
const POINTS = 500;

export interface TensorProps { job: Job; layer: Layer; tensor: string; kind: Kind }

export function Figures({ job, tensor, kind }: TensorProps) {
  const [query, change] = useQuery();
  const range = rangeOf(query.get("range"));
  const zoomed = range && { from_step: Math.max(0, Math.floor(range[0])), to_step: Math.max(0, Math.ceil(range[1])) };
  const rank = useRank(job);
  const path = withQuery(`jobs/${job.id}/stats`, { layer: tensor, kind, rank, stat: STATS.join(","), max_points: POINTS, ...zoomed });
  const { value, problem } = useLive<Page<Series>>(path, ended(job) ? Infinity : 2);
  const phases = value?.data.map((one) => one.phase) ?? [];
  const phase = phases.includes(query.get("phase") ?? "train") ? query.get("phase") ?? "train" : phases[0];
  const series = value?.data.find((one) => one.phase === phase);
  const charts = useMemo(() => (series ? chartsOf(series) : []), [series]);
  const few = useIncremental(charts.length);
  const zoom = (to: Range | null) => change({ range: to && `${to[0]}~${to[1]}` });
  if (!value) return problem ? <ProblemBox problem={problem} /> : <Loading what="Loading the statistics" />;
  if (!series) return zoomed ? <p>No statistics in this range. <button onClick={() => zoom(null)}>Show all steps</button></p> : <WatchThis job={job} tensor={tensor} kind={kind} want="stats" every={1} rank={rank} what="No statistics" />;
  return (
    <div class="stack">
      {phases.length > 1 && (
        <label class="row"><span class="muted">Phase</span>
          <select value={phase ?? ""} onChange={(event) => change({ phase: event.currentTarget.value })}>{phases.map((one) => <option key={one} value={one}>{one === "train" ? "training" : "evaluation"}</option>)}</select>
        </label>
      )}
      <div class="charts">
        {charts.slice(0, few).map(({ title, lines, log }) => (
          <section key={title} class="card" data-chart={title}>
            <h3>{title}</h3>
            <LineChart title={`${title} of ${tensor}`} series={lines} log={log} range={range} onZoom={zoom} height={190} />
          </section>
        ))}
      </div>
    </div>
  );
}

function rangeOf(text: string | null): Range | null {
  const [from, to] = (text ?? "").split("~").map(Number);
  return from !== undefined && to !== undefined && Number.isFinite(from) && Number.isFinite(to) && to > from ? [from, to] : null;
}

interface Chart { title: string; lines: Line[]; log: boolean }

function chartsOf(series: Series): Chart[] {
  const columns = new Map(STATS.map((name) => [name, columnOf(series, name)]));
  const line = (name: string, label: string, low?: string, high?: string): Line[] => {
    const middle = columns.get(name)!;
    if (!middle.xs.length) return [];
    const band = low && high ? { low: matched(columns.get(low)!, middle.xs), high: matched(columns.get(high)!, middle.xs) } : {};
    return [{ label, ...middle, ...band }];
  };
  const [mean, std] = [columns.get("mean")!, columns.get("std")!];
  const around = mean.xs.length ? [{ label: "mean ± std", ...mean, low: mean.ys.map((y, n) => y - (std.ys[n] ?? 0)), high: mean.ys.map((y, n) => y + (std.ys[n] ?? 0)) }] : [];
  const odd = ["nan", "inf"].filter((name) => columns.get(name)!.ys.some((y) => y > 0));
  return [
    { title: "Mean and standard deviation", lines: around, log: false },
    { title: "Quantiles", lines: [...line("p50", "median, 5 to 95 %", "p05", "p95"), ...line("p50", "median, 25 to 75 %", "p25", "p75")], log: false },
    { title: "Min and max", lines: [...line("max", "max"), ...line("min", "min"), ...line("p99", "p99"), ...line("p01", "p01")], log: false },
    { title: "Norms", lines: [...line("l2", "L2 norm"), ...line("absmax", "max magnitude")], log: true },
    { title: "Fraction of zeros", lines: line("zeros", "zeros"), log: false },
    { title: "NaN and Inf", lines: odd.flatMap((name) => line(name, name === "nan" ? "NaN" : "Inf")), log: false },
  ].filter((chart) => chart.lines.length);
}

function columnOf(series: Series, name: string): { xs: number[]; ys: number[] } {
  const xs: number[] = [];
  const ys: number[] = [];
  series.values[name]?.forEach((value, place) => {
    if (value === null) return; // another probe sampled this step, for another statistic
    xs.push(series.step[place]!);
    ys.push(num(value)!);
  });
  return { xs, ys };
}

function matched(column: { xs: number[]; ys: number[] }, xs: readonly number[]): number[] {
  const at = new Map(column.xs.map((x, place) => [x, column.ys[place]!]));
  return xs.map((x) => at.get(x) ?? NaN);
}
