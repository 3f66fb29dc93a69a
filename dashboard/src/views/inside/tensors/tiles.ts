// A tensor as images: feature maps, filters, a matrix, a strip. Pure.
import type { Tensor } from "./npy";

/** Kinds whose first axis is the batch. */
export const OF_BATCHES: ReadonlySet<string> = new Set(["output", "input", "output_grad"]);
/** Beyond this many values only every n-th row and column is fetched. */
export const MOST_VALUES = 1_000_000;
export const MOST_TILES = 512;

/** The number of leading axes of which one index is selected: the example of a batch, and axes beyond a grid of tiles. */
export function selectedAxes(shape: readonly number[], kind: string): number {
  if (!OF_BATCHES.has(kind)) return Math.max(0, shape.length - 4);
  return shape.length < 3 ? 0 : Math.max(1, shape.length - 3);
}

/** The slice to request, in NumPy syntax, and its stride over rows and columns. */
export function sliceOf(shape: readonly number[], kind: string, at: readonly number[]): { slice: string | null; stride: number } {
  const axes = selectedAxes(shape, kind);
  const rest = shape.slice(axes);
  const size = rest.reduce((all, length) => all * length, 1);
  const stride = size > MOST_VALUES ? Math.ceil(rest.length > 1 ? Math.sqrt(size / MOST_VALUES) : size / MOST_VALUES) : 1;
  const parts = shape.slice(0, axes).map((length, axis) => String(Math.min(Math.max(0, at[axis] ?? 0), Math.max(0, length - 1))));
  if (stride > 1) parts.push(...rest.map((_, axis) => (axis >= rest.length - 2 ? `::${stride}` : ":")));
  return { slice: parts.length ? parts.join(",") : null, stride };
}

export interface Tiles {
  readonly height: number;
  readonly width: number;
  readonly columns: number;
  /** The index of each tile's first value. */
  readonly starts: readonly number[];
  readonly labels: readonly string[];
  /** The number of tiles, including those that are not drawn. */
  readonly total: number;
}

export function tilesOf({ shape, values }: Tensor): Tiles {
  const height = shape.length > 1 ? shape.at(-2)! : 1;
  const width = shape.at(-1) ?? 1;
  const lead = shape.slice(0, -2);
  const total = height * width ? Math.round(values.length / (height * width)) : 0;
  const shown = Math.min(total, MOST_TILES);
  const starts = Array.from({ length: shown }, (_, n) => n * height * width);
  const inner = lead.length === 2 ? lead[1]! : 1;
  const columns = inner > 1 && inner <= 32 ? inner : Math.max(1, Math.ceil(Math.sqrt((shown * height) / Math.max(1, width) || 1)));
  const labels = starts.map((_, n) => (lead.length === 2 ? `${Math.floor(n / inner)}, ${n % inner}` : String(n)));
  return { height, width, columns, starts, labels, total };
}

export interface Range { low: number; high: number; nan: number; inf: number }

/** The min and max of the finite values; symmetric around zero if some are negative. */
export function rangeOf(values: Float64Array, from = 0, to = values.length): Range {
  let [low, high, nan, inf] = [Infinity, -Infinity, 0, 0];
  for (let n = from; n < to; n++) {
    const value = values[n]!;
    if (Number.isNaN(value)) nan++;
    else if (!Number.isFinite(value)) inf++;
    else {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return { low: 0, high: 0, nan, inf };
  if (low < 0) {
    high = Math.max(-low, high);
    low = -high;
  }
  return { low, high, nan, inf };
}

/** The index of a value in the captured tensor, in NumPy syntax. */
export function indexText(shape: readonly number[], place: number, at: readonly number[], stride: number): string {
  const index: number[] = [];
  let left = place;
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    index.unshift((left % shape[axis]!) * (axis >= shape.length - 2 ? stride : 1));
    left = Math.floor(left / shape[axis]!);
  }
  return [...at, ...index].join(", ");
}
