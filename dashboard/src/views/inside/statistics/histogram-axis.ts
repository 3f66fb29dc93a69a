// Histograms over steps: densities over an axis that is linear, or symmetric log. Pure.

export type Scale = "linear" | "log";

export interface Axis {
  readonly low: number;
  readonly high: number;
  /** From 0 (low) to 1 (high). */
  place(value: number): number;
  readonly ticks: readonly number[];
}

/** Below this magnitude a symmetric log axis is linear: a hundredth of the median magnitude of the edges. */
export function threshold(edges: readonly number[]): number {
  const sizes = edges.map(Math.abs).filter((size) => size > 0).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.floor(sizes.length / 2)]! / 100 : 1;
}

export function axisOf(edges: readonly number[], scale: Scale): Axis {
  const [low, high] = [edges[0] ?? 0, edges.at(-1) ?? 1];
  const soft = threshold(edges);
  const map = scale === "linear" ? (value: number) => value : (value: number) => Math.asinh(value / soft);
  const [first, last] = [map(low), map(high)];
  const span = last - first || 1;
  const ticks = scale === "linear" ? evenTicks(low, high) : powerTicks(low, high, soft);
  return { low, high, place: (value) => (map(value) - first) / span, ticks };
}

export function evenTicks(low: number, high: number, num = 5): number[] {
  const span = high - low;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  const raw = span / num;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= raw) ?? raw;
  const ticks: number[] = [];
  for (let n = Math.ceil(low / step); n * step <= high + step * 1e-9; n++) ticks.push(+(n * step).toPrecision(12));
  return ticks;
}

function powerTicks(low: number, high: number, soft: number): number[] {
  const first = Math.ceil(Math.log10(soft));
  const last = Math.floor(Math.log10(Math.max(Math.abs(low), Math.abs(high), soft)));
  const every = Math.max(1, Math.ceil((last - first + 1) / 4));
  const powers: number[] = [];
  for (let power = last; power >= first; power -= every) powers.unshift(10 ** power);
  return [...powers.map((size) => -size).reverse(), 0, ...powers].filter((tick) => tick >= low && tick <= high);
}

/** The density of one step's values in equal cells of the axis, lowest first; its mean is 1 if all values are on the axis.
    The values of a bin are spread evenly over it. Bins narrower than a cell are added up, so that the many
    narrow bins around zero do not cover each other on a linear axis. */
export function densities(counts: readonly number[], edges: readonly number[], axis: Axis, cells: number): number[] {
  const total = counts.reduce((sum, count) => sum + count, 0) || 1;
  const found = new Array<number>(cells).fill(0);
  counts.forEach((count, bar) => {
    if (!count) return;
    const [low, high] = [axis.place(edges[bar]!) * cells, axis.place(edges[bar + 1]!) * cells];
    const add = (cell: number, part: number) => (found[Math.max(0, Math.min(cells - 1, cell))]! += (count / total) * cells * part);
    if (!(high > low)) return add(Math.floor(low), 1);
    for (let cell = Math.floor(low); cell < high; cell++) add(cell, (Math.min(high, cell + 1) - Math.max(low, cell)) / (high - low));
  });
  return found;
}

/** The borders of the columns on an axis of steps, one more than there are steps: halfway to the neighboring steps. */
export function borders(steps: readonly number[]): number[] {
  if (steps.length < 2) return steps.flatMap((step) => [step - 0.5, step + 0.5]);
  const between = steps.slice(1).map((step, place) => (step + steps[place]!) / 2);
  const [first, last] = [steps[0]!, steps.at(-1)!];
  return [2 * first - between[0]!, ...between, 2 * last - between.at(-1)!];
}

/** The column that contains x on the axis of steps; the nearest one beyond its ends. */
export function columnAt(edges: readonly number[], x: number): number {
  const next = edges.findIndex((edge) => edge > x);
  return Math.max(0, Math.min(edges.length - 2, (next < 0 ? edges.length - 1 : next) - 1));
}

/** At most `most` evenly spaced indices, including the first and the last. */
export function atMost(num: number, most: number): number[] {
  if (num <= most) return Array.from({ length: num }, (_, n) => n);
  return Array.from({ length: most }, (_, n) => Math.round((n * (num - 1)) / (most - 1)));
}

/** The index of the newest step that is not after the requested one; the last if none was requested. */
export function placeOfStep(steps: readonly number[], requested: number | null): number {
  if (requested === null) return steps.length - 1;
  let found = 0;
  steps.forEach((step, place) => step <= requested && (found = place));
  return found;
}
