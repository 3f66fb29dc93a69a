// A chart of some metrics of a job. It requests their values while it is visible.
import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import type { Job } from "../../../api/types";
import { LineChart, type Marker, type Range } from "../../../charts/line";
import type { Series } from "../../../charts/series";
import { ProblemBox } from "../../../ui/state";
import { type Axis, type Metric, seriesOf, type Steps, useColumns } from "../data";
import type { Group } from "./groups";

export interface ChartLook {
  axis: Axis;
  smoothing: number;
  range: Steps | null;
  log: boolean;
  onLog(): void;
  onRange(range: Steps | null): void;
  markers: readonly Marker[];
}

export function MetricChart({ job, group, metrics, look }: { job: Job; group: Group; metrics: readonly Metric[]; look: ChartLook }) {
  const [place, visible] = useVisible();
  const { axis, range } = look;
  const { columns, problem } = useColumns(job, metrics, range, visible);
  const over = useMemo(() => (columns ? metrics.map((one) => seriesOf(columns, one, range)) : []), [columns]);
  const series = useMemo(() => (axis.ready ? over.map((one) => placed(one, axis)) : []), [over, axis]);
  const shown = useMemo((): Range | null => range && [axis.of(range[0]), axis.of(range[1])], [range?.[0], range?.[1], axis]);
  const bad = firstBad(job, metrics);
  return (
    <section class="card" ref={place} aria-label={group.title} data-group={group.key}>
      <div class="spread">
        <h3>{group.title}</h3>
        <button class="small" aria-pressed={look.log} onClick={look.onLog}>Log</button>
      </div>
      {problem && !columns && problem.code !== "unreachable" && <ProblemBox problem={problem} />}
      {visible && <LineChart title={group.title} series={series} markers={look.markers} xName={axis.name} log={look.log} smoothing={look.smoothing} range={shown}
        onZoom={(asked) => look.onRange(asked && stepsOf(asked, axis))} oddHref={bad?.href} oddName={bad?.name} table={{ series: over, xName: "step" }} />}
    </section>
  );
}

function placed(series: Series, axis: Axis): Series {
  return axis.name === "step" ? series : { ...series, xs: series.xs.map(axis.of) };
}

function stepsOf([from, to]: Range, axis: Axis): Steps {
  const low = Math.max(0, Math.floor(axis.steps(from)));
  return [low, Math.max(low + 1, Math.ceil(axis.steps(to)))];
}

/** The link of NaN and Inf values: the layer that the failure names, else the Inside view at the first such step. */
function firstBad(job: Job, metrics: readonly Metric[]): { href: string; name: string } | null {
  const steps = metrics.flatMap((one) => (one.first_nonfinite_step === null ? [] : [one.first_nonfinite_step]));
  if (!steps.length) return null;
  const step = Math.min(...steps);
  const layer = job.error?.["layer"];
  if (typeof layer === "string" && layer !== "loss") return { href: layerHref(job.id, layer, job.error?.["step"]), name: `inspect ${layer}` };
  return { href: `/jobs/${job.id}/inside?step=${step}`, name: `inspect step ${step}` };
}

export function layerHref(job: string, layer: string, step: unknown): string {
  return `/jobs/${job}/layers/${encodeURIComponent(layer)}${typeof step === "number" ? `?step=${step}` : ""}`;
}

/** Whether an element is visible, or nearly. */
export function useVisible() {
  const place = useRef<HTMLElement>(null);
  const [visible, setVisible] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver(([entry]) => entry && setVisible(entry.isIntersecting), { rootMargin: "200px" });
    observer.observe(place.current!);
    return () => observer.disconnect();
  }, []);
  return [place, visible] as const;
}

export function Labelled({ name, children }: { name: string; children: ComponentChildren }) {
  return <label class="row"><span class="muted">{name}</span>{children}</label>;
}
