// The columns of a split: their types, and statistics over all their values.
import { num, type Number as JsonNumber } from "../../api/types";
import { count, figure } from "../../format";
import type { Column, ColumnStats } from "../../spec/suggest";
import { Scroll } from "../../ui/scroll";

type Figures = ColumnStats & { count?: number; missing?: number; infinite?: number; mean?: JsonNumber | null; std?: JsonNumber | null };

const SHOWN = 200; // tables of thousands of columns would stall

export function ColumnFigures({ columns, figures }: { columns: Column[]; figures: Record<string, ColumnStats> | null }) {
  return (
    <section class="card">
      <h2>Columns</h2>
      <Scroll label="Columns">
        <table>
          <thead>
            <tr><th>Column</th><th>Type</th><th>Shape</th><th class="number">Min</th><th class="number">Max</th><th class="number">Mean</th><th class="number">Std</th><th class="number">Missing</th><th class="number">Unique</th></tr>
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
      <td class="nowrap">{column.shape.length ? column.shape.map((size) => size ?? "any").join(" × ") : "scalar"}</td>
      <td class="number">{value(figures.min)}</td>
      <td class="number">{value(figures.max)}</td>
      <td class="number">{value(figures.mean)}</td>
      <td class="number">{value(figures.std)}</td>
      <td class="number">{count(figures.missing)}</td>
      <td class="number">{column.shape.length ? "–" : figures.distinct === null ? "many" : count(figures.distinct)}</td>
    </tr>
  );
}

const value = (one: unknown) => (typeof one === "number" || typeof one === "string" ? figure(num(one as JsonNumber)) : "–");
