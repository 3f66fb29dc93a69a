// The data of line charts: smoothing, envelopes, one x for several series, descriptions. Pure.
import { count, figure } from "../format";

export interface Series {
  label: string;
  /** Ascending. */
  xs: readonly number[];
  /** One for each x; NaN and Inf are values like others. */
  ys: readonly number[];
  /** The min and max around each x, if it has several values. */
  low?: readonly number[];
  high?: readonly number[];
  /** The service omitted points and kept the extremes: drawn as a band with its middle. */
  thinned?: boolean;
  /** Index into the theme's colors and dash patterns; default: its index among the series. */
  style?: number;
}

export type Cell = number | null | undefined;

/** Exponential moving average without bias toward zero at the beginning; NaN and Inf are skipped. */
export function smooth(ys: readonly number[], weight: number): (number | null)[] {
  let mean = 0;
  let share = 0;
  return ys.map((y) => {
    if (!Number.isFinite(y)) return null;
    mean = weight * mean + (1 - weight) * y;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

/** The weight of each series, so that all are smoothed over the same range of x: a sparse one changes little. */
export function weights(series: readonly Pick<Series, "xs">[], weight: number): number[] {
  const dense = series.map(({ xs }) => (xs.length > 1 ? (xs.length - 1) / (xs.at(-1)! - xs[0]!) : 0));
  const most = Math.max(0, ...dense);
  return dense.map((one) => (one ? weight ** (most / one) : weight));
}

/** A thinned series as a band with its middle. The service keeps the min and the max of each interval, ordered by x, and
    sometimes one point more or less, so interval borders are unknown. Therefore each band point is a window of three
    neighbors whose last point is the first of the next window: it always contains both extremes of one interval. */
export function envelope({ xs, ys }: Pick<Series, "xs" | "ys">): Required<Pick<Series, "xs" | "ys" | "low" | "high">> {
  const band = { xs: [] as number[], ys: [] as number[], low: [] as number[], high: [] as number[] };
  const put = (from: number, to: number) => {
    const within = ys.slice(from, to);
    const [low, high] = [Math.min(...within), Math.max(...within)];
    band.xs.push((xs[from]! + xs[to - 1]!) / 2);
    band.ys.push((low + high) / 2);
    band.low.push(low);
    band.high.push(high);
  };
  for (let place = 0; place < xs.length; ) {
    const end = Math.max(place + 1, endOfRun(ys, place)); // NaN and Inf are separate points
    for (let from = place; from === place || from + 1 < end; from += 2) {
      const start = Math.max(place, Math.min(from, end - 3));
      put(start, Math.min(start + 3, end));
    }
    place = end;
  }
  return band;
}

/** The index after the run of finite values that starts here. */
function endOfRun(ys: readonly number[], place: number): number {
  let end = place;
  while (end < ys.length && Number.isFinite(ys[end]!)) end += 1;
  return end;
}

/** The sorted union of all x, and the columns over it: undefined if a series has no point there. */
export function align(tables: readonly { xs: readonly number[]; columns: readonly (readonly Cell[])[] }[]): { xs: number[]; columns: Cell[][] } {
  const xs = [...new Set(tables.flatMap((table) => [...table.xs]))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  const columns = tables.flatMap((table) =>
    table.columns.map((column) => {
      const spread = new Array<Cell>(xs.length).fill(undefined);
      table.xs.forEach((x, index) => (spread[place.get(x)!] = drawable(column[index])));
      return spread;
    }),
  );
  return { xs, columns };
}

/** The bottom of a logarithmic axis: the power of ten at or below the smallest positive value.
    Bands are clipped here. */
export function floorOf(series: readonly Series[]): number {
  const above = series.flatMap((one) => [...one.ys, ...(one.high ?? []), ...(one.low ?? [])]).filter((y) => y > 0 && y < Infinity);
  const least = above.reduce((low, y) => Math.min(low, y), Infinity);
  return least === Infinity ? -Infinity : 10 ** Math.floor(Math.log10(least));
}

/** The newest point of a series at or before x, with its own x; null before its first. Later points are never read. */
export function readAt({ xs, ys }: Pick<Series, "xs" | "ys">, x: number): { x: number; y: number } | null {
  let low = 0;
  let high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle]! <= x) low = middle + 1;
    else high = middle;
  }
  return low ? { x: xs[low - 1]!, y: ys[low - 1]! } : null;
}

/** NaN and Inf are gaps in a line. */
function drawable(value: Cell): Cell {
  return value === undefined || value === null || Number.isFinite(value) ? value : null;
}

export interface Odd {
  x: number;
  label: string;
  value: number;
}

/** The NaN and Inf points, sorted by x. */
export function nonfinitePoints(series: readonly Series[]): Odd[] {
  const found = series.flatMap(({ label, xs, ys }) =>
    xs.flatMap((x, place) => (Number.isFinite(ys[place]!) ? [] : [{ x, label, value: ys[place]! }])),
  );
  return found.sort((a, b) => a.x - b.x);
}

/** Groups of marks that would overlap, with their positions. */
export function clusters<T>(marks: readonly T[], at: (mark: T) => number, gap: number): { at: number; marks: T[] }[] {
  const sorted = [...marks].sort((a, b) => at(a) - at(b));
  const found: { at: number; marks: T[] }[] = [];
  for (const mark of sorted) {
    const last = found.at(-1);
    if (last && at(mark) - last.at < gap) last.marks.push(mark);
    else found.push({ at: at(mark), marks: [mark] });
  }
  return found;
}

/** "3 NaN, 1 Inf" */
export function counted(odd: readonly Odd[]): string {
  const kinds = new Map<string, number>();
  for (const { value } of odd) kinds.set(figure(value), (kinds.get(figure(value)) ?? 0) + 1);
  return [...kinds].map(([kind, number]) => `${count(number)} ${kind}`).join(", ");
}

/** A description of the chart: "loss fell from 2.10 to 0.31 over 4,000 steps, 2 NaN". */
export function sentence(series: readonly Series[], xName: string): string {
  const texts = series.map((one) => trend(one, xName)).filter(Boolean);
  return texts.length ? texts.join("; ") : "No values yet";
}

function trend({ label, xs, ys, thinned }: Series, xName: string): string {
  const finite = ys.flatMap((y, place) => (Number.isFinite(y) ? [place] : []));
  const odd = nonfinitePoints([{ label, xs, ys }]);
  // A thinned series has only the ends of each run of NaN or Inf: the count is a lower bound.
  const bad = odd.length ? `, ${thinned ? "at least " : ""}${counted(odd)}` : "";
  if (!finite.length) return ys.length ? `${label} has no finite value${bad}` : "";
  const [first, last] = [finite[0]!, finite.at(-1)!];
  const [from, to] = [ys[first]!, ys[last]!];
  if (first === last) return `${label} is ${figure(from)} at ${xName} ${atText(xs[first]!, xName)}${bad}`;
  const how = to < from ? "fell" : to > from ? "rose" : "stayed";
  const values = how === "stayed" ? `at ${figure(to)}` : `from ${figure(from)} to ${figure(to)}`;
  return `${label} ${how} ${values} over ${span(xs[last]! - xs[first]!, xName)}${bad}`;
}

/** An x in words: a step, an epoch, a time. */
export function atText(x: number, xName: string): string {
  if (xName === "time") return new Date(x * 1000).toLocaleString("en-GB");
  return xName === "step" ? count(x) : figure(x);
}

function span(width: number, xName: string): string {
  if (xName === "time") return `${count(width)} seconds`;
  const text = xName === "step" ? count(width) : figure(width, 3);
  return `${text} ${xName}${text === "1" ? "" : "s"}`;
}

/** Linear interpolation of y at x between points with ascending x; linear extrapolation beyond the ends. */
export function between(xs: readonly number[], ys: readonly number[], x: number): number {
  if (xs.length < 2) return ys[0] ?? NaN;
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle]! <= x) low = middle;
    else high = middle;
  }
  const [x0, x1, y0, y1] = [xs[low]!, xs[high]!, ys[low]!, ys[high]!];
  return x1 === x0 ? y0 : y0 + ((x - x0) / (x1 - x0)) * (y1 - y0);
}

/** The (step, x) points for converting steps to another axis: both strictly ascending. */
export function ladder(pairs: readonly (readonly [number, number])[]): [number[], number[]] {
  const xs: number[] = [];
  const ys: number[] = [];
  for (const [x, y] of [...pairs].sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    if (xs.length && (x <= xs.at(-1)! || y <= ys.at(-1)!)) continue;
    xs.push(x);
    ys.push(y);
  }
  return [xs, ys];
}

/** The first step of each epoch in the columns, and the expected end of the last epoch.
    `perEpoch`: the plan's steps per epoch, used while there is only one epoch. */
export function epochLadder(steps: readonly number[], epochs: readonly number[], perEpoch: number | null): [number[], number[]] {
  const starts = new Map<number, number>();
  steps.forEach((step, place) => {
    const epoch = epochs[place]!;
    if (step < (starts.get(epoch) ?? Infinity)) starts.set(epoch, step);
  });
  const [xs, ys] = ladder([...starts].map(([epoch, step]) => [step, epoch] as const));
  if (!xs.length) return [xs, ys];
  const length = xs.length > 1 ? (xs.at(-1)! - xs[0]!) / (ys.at(-1)! - ys[0]!) : perEpoch;
  if (length) {
    xs.push(xs.at(-1)! + length);
    ys.push(ys.at(-1)! + 1);
  }
  return [xs, ys];
}

/** The table of a chart: every x with the original values, not the smoothed ones. */
export function rows(series: readonly Series[]): { x: number; values: (number | undefined)[] }[] {
  const found = new Map<number, (number | undefined)[]>();
  series.forEach(({ xs, ys }, index) =>
    xs.forEach((x, place) => {
      let row = found.get(x);
      if (!row) found.set(x, (row = new Array<number | undefined>(series.length).fill(undefined)));
      row[index] = ys[place];
    }),
  );
  return [...found].sort((a, b) => a[0] - b[0]).map(([x, values]) => ({ x, values }));
}

/** The table as CSV, with every digit. */
export function csv(series: readonly Series[], xName: string): string {
  const quoted = (text: string) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const head = [xName, ...series.map((one) => one.label)].map(quoted).join(",");
  const lines = rows(series).map(({ x, values }) => [x, ...values.map((value) => value ?? "")].join(","));
  return [head, ...lines, ""].join("\n");
}

const DASHES: readonly number[][] = [[], [7, 3], [2, 2.5], [9, 3, 2, 3], [4, 2]];

/** The dash pattern of a line; the first is solid, and adjacent ones differ in more than color. */
export function dashOf(style: number): number[] {
  return DASHES[style % DASHES.length]!;
}
