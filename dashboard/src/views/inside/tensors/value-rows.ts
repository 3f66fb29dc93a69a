// The values of a tensor's JSON as rows of a table: its last axis across. Pure.

export interface ValueRow { index: string; values: unknown[] }

const FLAT = 20; // values per row of a tensor with fewer than two axes

/** The values of a truncated tensor are a flat list; the rows have their original indices. */
export function valueRows(values: unknown, shape: readonly number[], truncated: boolean): { rows: ValueRow[]; width: number } {
  const flat: unknown[] = [];
  collect(values, truncated ? 1 : shape.length, flat);
  const last = shape.at(-1) ?? 1;
  const width = shape.length > 1 ? Math.max(1, Math.min(last, 1000)) : Math.min(FLAT, Math.max(1, last));
  const rows: ValueRow[] = [];
  const axes = shape.length > 1 ? shape.slice(0, -1) : [Math.ceil(last / width)];
  for (let from = 0; from < flat.length; from += width) rows.push({ index: shape.length > 1 ? indexOf(from / width, axes) : String(from), values: flat.slice(from, from + width) });
  return { rows, width };
}

/** `depth` is the nesting of the numbers: a complex number is itself a pair. */
function collect(values: unknown, depth: number, into: unknown[]): void {
  if (depth === 0 || !Array.isArray(values)) into.push(values);
  else for (const one of values) collect(one, depth - 1, into);
}

function indexOf(row: number, axes: readonly number[]): string {
  const index: number[] = [];
  let left = row;
  for (let axis = axes.length - 1; axis >= 0; axis--) {
    index.unshift(left % axes[axis]!);
    left = Math.floor(left / axes[axis]!);
  }
  return index.join(", ");
}
