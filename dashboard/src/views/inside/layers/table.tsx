// The layer table. Only visible rows are in the document, so that 2,000 layers scroll like 20.
import type { ComponentChildren } from "preact";
import { useMemo, useRef, useState } from "preact/hooks";

import { Spark } from "../../../charts/spark";
import { num } from "../../../api/types";
import { count, figure } from "../../../format";
import { useQuery } from "../../../query";
import type { Lines } from "./data";
import { MEASURES, type MeasureName, seriesName } from "./history";
import { Light } from "./health-sign";
import { type Column, matcher, type Row, sorted } from "./rows";

const ROW = 34; // px
const SPARE = 8; // rows rendered beyond the visible ones

const COLUMNS: readonly [key: Column, name: string, title: string][] = [
  ["health", "Health", "Rules over the newest statistics; descending sorts problems first"],
  ["name", "Layer", "Name in the network"],
  ["type", "Type", "PyTorch class or function"],
  ["shape", "Output shape", "Shape of the output, without the batch"],
  ["parameters", "Parameters", "Number of parameters"],
  ["mean", "Mean", "Mean of the activation"],
  ["std", "Std", "Standard deviation of the activation"],
  ["zeros", "Zeros", "Fraction of the activation that is exactly zero"],
  ["grad", "Gradient", "L2 norm of the weight gradient"],
  ["weight", "Weights", "L2 norm of the weights"],
  ["ratio", "log₁₀ upd/wt", "log10 of the ratio of the update's norm to the weights' norm; about −3 is typical"],
  ["nan", "NaN", "NaN in all its watched tensors; Inf is counted separately"],
];
const TEXT = new Set<Column>(["health", "name", "type", "shape"]);

interface Props { job: string; rows: readonly Row[]; lines: Lines | null; measure: MeasureName; canWatch: boolean; tools: ComponentChildren }

export function LayerTable({ job, rows, lines, measure, canWatch, tools }: Props) {
  const [query, change] = useQuery();
  const filter = query.get("filter") ?? "";
  const [column, down] = sortOf(query.get("sort"));
  const shown = useMemo(() => {
    const fits = matcher(filter);
    return sorted(rows.filter((row) => fits(row.name)), column, down);
  }, [rows, filter, column, down]);
  const sortBy = (key: Column) => change({ sort: key !== column ? `${TEXT.has(key) && key !== "health" ? "" : "-"}${key}` : down ? key : `-${key}` });
  return (
    <div class="stack">
      <div class="row">
        <label class="field"><span>Layers (name or glob)</span>
          <input type="search" value={filter} placeholder="conv*, block1_*" onInput={(event) => change({ filter: event.currentTarget.value })} />
        </label>
        {tools}
        <span class="muted" role="status">{shown.length === rows.length ? `${count(rows.length)} layers` : `${count(shown.length)} of ${count(rows.length)} layers`}</span>
      </div>
      <Window rows={shown} head={<Head column={column} down={down} onSort={sortBy} measure={measure} />}>
        {(row, key) => <Cells key={key} job={job} row={row} lines={lines} measure={measure} canWatch={canWatch} />}
      </Window>
    </div>
  );
}

function sortOf(text: string | null): [Column, boolean] {
  const down = text?.startsWith("-") ?? false;
  const key = COLUMNS.find(([name]) => name === text?.slice(down ? 1 : 0))?.[0];
  return key ? [key, down] : ["index", false];
}

function Head({ column, down, onSort, measure }: { column: Column; down: boolean; onSort: (key: Column) => void; measure: MeasureName }) {
  return (
    <tr>
      {COLUMNS.map(([key, name, title]) => (
        <th key={key} scope="col" title={title} class={TEXT.has(key) ? "" : "number"} aria-sort={key === column ? (down ? "descending" : "ascending") : "none"}>
          <button class="sort" onClick={() => onSort(key)}>{name}<span aria-hidden="true">{key === column ? (down ? " ↓" : " ↑") : ""}</span></button>
        </th>
      ))}
      <th scope="col" title={MEASURES[measure]}>Trend</th>
    </tr>
  );
}

/** A table in a scroll box whose rows have the same height. */
function Window({ rows, head, children }: { rows: readonly Row[]; head: ComponentChildren; children: (row: Row, key: number) => ComponentChildren }) {
  const box = useRef<HTMLDivElement>(null);
  const [first, setFirst] = useState(0);
  const height = Math.min(rows.length * ROW + 60, Math.max(300, innerHeight * 0.68));
  const most = Math.ceil(height / ROW) + 2 * SPARE; // elements: each is reused for the row that scrolls in when its own scrolls out
  const from = Math.max(0, Math.min(first, rows.length - 1) - SPARE);
  const to = Math.min(rows.length, from + most);
  const onScroll = () => {
    const now = Math.floor((box.current?.scrollTop ?? 0) / ROW);
    if (Math.abs(now - first) >= SPARE / 2 || now === 0) setFirst(now);
  };
  return (
    <div class="table window" ref={box} onScroll={onScroll} style={{ maxHeight: `${height}px` }} tabIndex={0} role="region" aria-label="Layers">
      <table aria-rowcount={rows.length + 1}>
        <thead>{head}</thead>
        <tbody>
          {from > 0 && <tr aria-hidden="true" style={{ height: `${from * ROW}px` }} />}
          {rows.slice(from, to).map((row, n) => children(row, (from + n) % most))}
          {to < rows.length && <tr aria-hidden="true" style={{ height: `${(rows.length - to) * ROW}px` }} />}
        </tbody>
      </table>
    </div>
  );
}

function Cells({ job, row, lines, measure, canWatch }: { job: string; row: Row; lines: Lines | null; measure: MeasureName; canWatch: boolean }) {
  const watched = row.step !== null;
  const series = lines?.byName.get(seriesName(row.layer, measure));
  return (
    <tr class="layer-row" data-layer={row.name} style={{ height: `${ROW}px` }}>
      <td><Light verdict={row.verdict} name={row.name} /></td>
      <th scope="row"><a href={`/jobs/${job}/layers/${encodeURIComponent(row.name)}`}>{row.name}</a></th>
      <td>{row.type}</td>
      <td class="nowrap">{row.shape}</td>
      <Value of="parameters" value={row.parameters} text={count(row.parameters)} />
      <Value of="mean" value={row.mean} />
      <Value of="std" value={row.std} />
      <Value of="zeros" value={row.zeros} text={row.zeros === null ? "–" : `${(row.zeros * 100).toFixed(1)} %`} />
      <Value of="grad" value={row.grad} />
      <Value of="weight" value={row.weight} />
      <Value of="ratio" value={row.ratio} text={row.ratio === null ? "–" : figure(row.ratio, 3)} />
      <Value of="nan" value={row.nan} text={nanText(row)} bad={!!(row.nan || row.inf)} />
      <td>
        {series ? <Spark values={Object.values(series.values)[0]!.map(num)} what={`${row.name}: ${MEASURES[measure]}`} />
          : watched ? <span class="muted">–</span>
          : canWatch ? <a class="nowrap" href={`?view=probes&watch=${encodeURIComponent(row.name)}`} aria-label={`Watch ${row.name}`}>Watch</a>
          : <span class="muted">–</span>}
      </td>
    </tr>
  );
}

function nanText({ nan, inf }: Row): string {
  if (nan === null) return "–";
  return `${nan || inf ? "✕ " : ""}${count(nan)}${inf ? ` + ${count(inf)} Inf` : ""}`;
}

function Value({ of, value, text, bad = false }: { of: string; value: number | null; text?: string; bad?: boolean }) {
  return <td class={bad ? "number bad-value" : "number"} data-of={of} data-value={value ?? ""}>{text ?? figure(value)}</td>;
}
