// The data of a chart as a paged table and as a CSV file.
import { useMemo, useState } from "preact/hooks";

import { figure } from "../format";
import type { Marker } from "./plot";
import { atText, csv, rows, type Series } from "./series";

const PAGE = 50; // a table is rendered in one task: twice as many rows take a slow machine 100 ms

interface TableProps {
  title: string;
  series: readonly Series[];
  xName: string;
  markers: readonly Marker[];
  /** The axis of the marks. */
  markName: string;
}

export function ChartTable({ title, series, markers, xName, markName }: TableProps) {
  const all = useMemo(() => rows(series), [series]);
  const pages = Math.max(1, Math.ceil(all.length / PAGE));
  const [asked, setPage] = useState(0);
  const page = Math.min(asked, pages - 1);
  return (
    <div class="chart-table" tabIndex={0} role="region" aria-label={`Table of ${title}`}>
      <table>
        <thead><tr><th scope="col">{xName}</th>{series.map((one) => <th key={one.label} scope="col" class="number">{one.label}</th>)}</tr></thead>
        <tbody>
          {all.slice(page * PAGE, (page + 1) * PAGE).map(({ x, values }) => (
            <tr key={x}>
              <th scope="row">{xName === "step" ? x : atText(x, xName)}</th>
              {values.map((value, place) => <td key={series[place]!.label} class="number" data-value={value}>{value === undefined ? "" : figure(value, 7)}</td>)}
            </tr>
          ))}
        </tbody>
      </table>
      {pages > 1 && (
        <p class="row">
          <button class="small" disabled={page === 0} onClick={() => setPage(0)}>First</button>
          <button class="small" disabled={page === 0} onClick={() => setPage(page - 1)}>Previous</button>
          <span>{page + 1} of {pages}</span>
          <button class="small" disabled={page === pages - 1} onClick={() => setPage(page + 1)}>Next</button>
          <button class="small" disabled={page === pages - 1} onClick={() => setPage(pages - 1)}>Last</button>
        </p>
      )}
      {markers.length > 0 && (
        <ul aria-label="Marks">{markers.slice(-PAGE).map((one) => <li key={one.kind + one.name + one.x}>{markName} {atText(one.x, markName)}: {one.name}</li>)}</ul>
      )}
    </div>
  );
}

export function saveCsv(title: string, series: readonly Series[], xName: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv(series, xName)], { type: "text/csv" }));
  link.download = `${title.replace(/[^A-Za-z0-9._-]+/g, "-")}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
