// The counts of values and of lengths in a column, as labeled bars.
import { count, percent } from "../../format";
import type { Json } from "../../spec/pointer";
import type { Column, ColumnStats } from "../../spec/suggest";

const BARS = 30;

interface Shown { columns: Column[]; figures: Record<string, ColumnStats>; split: string }
type Counted = [label: string, times: number][];

export function Distributions({ columns, figures, split }: Shown) {
  const balances = columns.flatMap((column) => balanceOf(column, figures[column.name] ?? {}));
  const lengths = columns.flatMap((column) => lengthsOf(column, split));
  if (!balances.length && !lengths.length) return null;
  return (
    <div class="grid">
      {balances.map(([name, counts]) => <Bars key={name} title={`Values of ${name}`} counts={counts} />)}
      {lengths.map(([name, counts]) => <Bars key={name} title={`Lengths of ${name}`} counts={counts} />)}
    </div>
  );
}

/** Columns with few unique values; classes by name. */
function balanceOf(column: Column, { counts }: ColumnStats): [string, Counted][] {
  if (!counts || counts.length < 2 || counts.length > BARS) return [];
  const classes = Array.isArray(column.classes) ? (column.classes as string[]) : null;
  return [[column.name, counts.map(([value, times]) => [nameOf(value, classes), times])]];
}

function nameOf(value: Json, classes: string[] | null): string {
  return (classes && typeof value === "number" ? classes[value] : undefined) ?? (value === "" ? "(empty)" : String(value));
}

/** Rows by length, in at most `BARS` ranges of the same width. */
function lengthsOf(column: Column, split: string): [string, Counted][] {
  const counts = (column as Column & { length_counts?: Record<string, [number, number][] | null> }).length_counts?.[split];
  if (!counts?.length) return [];
  const [least, most] = [counts[0]![0], counts.at(-1)![0]];
  const width = Math.max(1, Math.ceil((most - least + 1) / BARS));
  const ranges: Counted = [];
  for (let from = least; from <= most; from += width) {
    const times = counts.filter(([length]) => length >= from && length < from + width).reduce((sum, [, rows]) => sum + rows, 0);
    ranges.push([width === 1 ? String(from) : `${from} to ${Math.min(most, from + width - 1)}`, times]);
  }
  return [[column.name, ranges]];
}

function Bars({ title, counts }: { title: string; counts: Counted }) {
  const all = counts.reduce((sum, [, times]) => sum + times, 0);
  const most = Math.max(...counts.map(([, times]) => times), 1);
  return (
    <section class="card">
      <h2>{title}</h2>
      <table class="bars">
        <caption class="only-readers">{title}</caption>
        <tbody>
          {counts.map(([label, times]) => (
            <tr key={label}>
              <th scope="row">{label}</th>
              <td class="wide"><i aria-hidden="true" style={{ width: `${(100 * times) / most}%` }} /></td>
              <td class="number">{count(times)}</td>
              <td class="number">{percent(times / all, 1)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
