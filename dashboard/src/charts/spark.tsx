// A sparkline of a few dozen points in a table cell, requested when it becomes visible.
import { useEffect, useRef, useState } from "preact/hooks";

import { withQuery } from "../api/http";
import { useLive } from "../api/live";
import { type Number as JsonNumber, num } from "../api/types";
import { figure } from "../format";

const W = 112;
const H = 26;

export interface Columns {
  step: number[];
  epoch: number[];
  values: Record<string, (JsonNumber | null)[]>;
}

/** A metric of a job as a sparkline; it is refreshed while `live`. */
export function MetricSpark({ job, name, live }: { job: string; name: string; live: boolean }) {
  const [seen, place] = useSeen();
  const path = seen ? withQuery(`jobs/${job}/metrics/query`, { name, max_points: 60 }) : null;
  const { value } = useLive<Columns>(path, live ? 5 : Infinity);
  return <span ref={place}><Spark values={value?.values[name]?.map(num) ?? []} what={name} /></span>;
}

/** A sparkline with gaps at NaN and Inf. */
export function Spark({ values, what }: { values: (number | null)[]; what: string }) {
  const finite = values.filter((one): one is number => one !== null && Number.isFinite(one));
  if (finite.length < 2) return <span class="muted">–</span>;
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  const x = (place: number) => 2 + (place / Math.max(1, values.length - 1)) * (W - 4);
  const y = (value: number) => (high === low ? H / 2 : 2 + (1 - (value - low) / (high - low)) * (H - 4));
  let path = "";
  let drawing = false;
  const broken: number[] = [];
  values.forEach((value, place) => {
    if (value === null) return;
    if (!Number.isFinite(value)) {
      broken.push(x(place));
      drawing = false;
      return;
    }
    path += `${drawing ? "L" : "M"}${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
    drawing = true;
  });
  const label = `${what} from ${figure(finite[0])} to ${figure(finite[finite.length - 1])}${broken.length ? ", with NaN or Inf" : ""}`;
  return (
    <svg class="spark" viewBox={`0 0 ${W} ${H}`} role="img" aria-label={label} preserveAspectRatio="none">
      <title>{label}</title>
      <path d={path} fill="none" stroke="var(--series-1)" stroke-width="1.5" vector-effect="non-scaling-stroke" />
      {broken.map((at) => <path key={at} d={`M${at} 1V${H - 1}`} stroke="var(--bad)" stroke-width="1.5" />)}
    </svg>
  );
}

/** Whether an element has ever been visible, and its ref. */
export function useSeen(): [boolean, (element: HTMLElement | null) => void] {
  const [seen, setSeen] = useState(false);
  const watcher = useRef<IntersectionObserver | null>(null);
  useEffect(() => () => watcher.current?.disconnect(), []);
  const place = useRef((element: HTMLElement | null) => {
    watcher.current?.disconnect();
    if (!element) return;
    watcher.current = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        setSeen(true);
        watcher.current?.disconnect();
      }
    }, { rootMargin: "200px" });
    watcher.current.observe(element);
  });
  return [seen, place.current];
}
