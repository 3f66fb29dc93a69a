// The columns of a split: their types, and figures over all of their values.
import { num, type Number as Told } from "../../api/types";
import { count, figure } from "../../format";
import type { Column, ColumnStats } from "../../spec/suggest";
import { Scroll } from "../../ui/scroll";

type Figures = ColumnStats & { count?: number; missing?: number; infinite?: number; mean?: Told | null; std?: Told | null };

const SHOWN = 200; // tables of thousands of columns would stall

export function ColumnFigures({ columns, figures }: { columns: Column[]; figures: Record<string, ColumnStats> | null }) {
  return (
    <section class="card">
      <h2>Columns</h2>
      <Scroll label="Columns">
        <table>
          <thead>
            <tr><th>Column</th><th>Type</th><th>Shape</th><th class="number">Least</th><th class="number">Greatest</th><th class="number">Mean</th><th class="number">Spread</th><th class="number">Missing</th><th class="number">Different</th></tr>
          </thead>
          <tbody>{columns.slice(0, SHOWN).map((one) => <Line key={one.name} column={one} figures={figures?.[one.name] ?? {}} />)}</tbody>
        </table>
      </Scroll>
      {columns.length > SHOWN && <p class="muted">The first {SHOWN} of {count(columns.length)} columns.</p>}
    </section>
  );
}

function Line({ column, figures }: { column: Column; figures: Figures }) {
  return (
    <tr>
      <td class="mono">{column.name}</td>
      <td>{column.dtype}</td>
      <td class="nowrap">{column.shape.length ? column.shape.map((size) => size ?? "any").join(" × ") : "one value"}</td>
      <td class="number">{value(figures.min)}</td>
      <td class="number">{value(figures.max)}</td>
      <td class="number">{value(figures.mean)}</td>
      <td class="number">{value(figures.std)}</td>
      <td class="number">{count(figures.missing)}</td>
      <td class="number">{column.shape.length ? "–" : figures.distinct === null ? "many" : count(figures.distinct)}</td>
    </tr>
  );
}

const value = (told: unknown) => (typeof told === "number" || typeof told === "string" ? figure(num(told as Told)) : "–");
