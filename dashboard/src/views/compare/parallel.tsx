// Parallel coordinates: a vertical axis for each setting that differs and each result, a line for each job.
import { useLayoutEffect, useRef, useState } from "preact/hooks";

import { dashOf } from "../../charts/series";
import { colorName } from "../../charts/swatch";
import { figure } from "../../format";
import { shown, type Value } from "./differing";

export interface Axis {
  name: string;
  values: (Value | undefined)[];
}

const H = 220;
const TOP = 34;
/** The min and max distance between two axes, in pixels. */
const NARROWEST = 80;
const WIDEST = 280;
const SIDE = { least: 45, most: 90 };
const LETTER = 6.5;

/** The position of each value on its axis, from 0 (bottom) to 1: numbers to scale, others sorted and evenly spaced. */
export function places(values: (Value | undefined)[]): { at: (number | null)[]; low: string; high: string } {
  const known = values.filter((one) => one !== undefined && one !== null);
  if (known.length && known.every((one) => typeof one === "number")) {
    const numbers = (known as number[]).filter(Number.isFinite);
    const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
    const log = low > 0 && high / low >= 10; // such as learning rates
    const scale = (one: number) => (log ? Math.log(one) : one);
    const span = scale(high) - scale(low);
    const at = values.map((one) => (typeof one === "number" && Number.isFinite(one) ? (span ? (scale(one) - scale(low)) / span : 0.5) : null));
    return { at, low: figure(low), high: figure(high) };
  }
  const names = [...new Set(values.map(shown))].sort();
  const at = values.map((one) => (names.length > 1 ? names.indexOf(shown(one)) / (names.length - 1) : 0.5));
  return { at, low: names[0] ?? "", high: names[names.length - 1] ?? "" };
}

interface Props {
  axes: Axis[];
  /** The name of each job, and its index into the colors and dash patterns. */
  jobs: { name: string; style: number }[];
}

export function Parallel({ axes, jobs }: Props) {
  const placed = axes.map((axis) => places(axis.values));
  const [place, room] = useAvailableWidth();
  const side = Math.min(SIDE.most, Math.max(SIDE.least, room / 8));
  const gaps = Math.max(1, axes.length - 1);
  const step = Math.min(WIDEST, Math.max(NARROWEST, (room - 2 * side) / gaps));
  const width = 2 * side + step * (axes.length - 1);
  const letters = Math.floor(Math.min(step, 2 * side) / LETTER);
  const x = (axis: number) => side + axis * step;
  const y = (at: number) => TOP + (1 - at) * (H - TOP - 24);
  const line = (job: number) =>
    placed.map(({ at }, axis) => [axis, at[job]] as const).filter(([, at]) => at !== null && at !== undefined)
      .map(([axis, at], place) => `${place ? "L" : "M"}${x(axis)} ${y(at as number)}`).join("");
  return (
    <div class="table" ref={place}>
      <svg width={width} height={H} role="img" aria-label={`${jobs.length} jobs over ${axes.map((axis) => axis.name).join(", ")}; the table of settings has the same values`}>
        {axes.map((axis, place) => (
          <g key={axis.name} font-size="11" text-anchor="middle" fill="var(--muted)">
            <line x1={x(place)} x2={x(place)} y1={TOP} y2={H - 24} stroke="var(--line-strong)" />
            <text x={x(place)} y={14}><title>{axis.name}</title>{short(lastParts(axis.name), letters)}</text>
            <text x={x(place)} y={TOP - 6}>{short(placed[place]?.high ?? "", letters)}</text>
            <text x={x(place)} y={H - 8}>{short(placed[place]?.low ?? "", letters)}</text>
          </g>
        ))}
        {jobs.map((job, place) => <path key={job.name} d={line(place)} fill="none" stroke={`var(--${colorName(job.style)})`} stroke-width="2" stroke-dasharray={dashOf(job.style).join(" ")} stroke-opacity=".8"><title>{job.name}</title></path>)}
      </svg>
    </div>
  );
}

/** The width of the container. */
function useAvailableWidth() {
  const place = useRef<HTMLDivElement>(null);
  const [room, setRoom] = useState(0);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(() => setRoom(place.current?.clientWidth ?? 0));
    setRoom(place.current!.clientWidth);
    observer.observe(place.current!);
    return () => observer.disconnect();
  }, []);
  return [place, room] as const;
}

function lastParts(name: string): string {
  return name.split(".").slice(-2).join(".");
}

function short(text: string, letters: number): string {
  return text.length > letters ? `…${text.slice(1 - letters)}` : text;
}
