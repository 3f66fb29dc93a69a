// The rows of a split, paged: images are drawn, long values are truncated.
import { useEffect, useRef } from "preact/hooks";

import { withQuery } from "../../api/http";
import { useLive } from "../../api/live";
import { type DatasetStats, num, type Number as JsonNumber, type Rows } from "../../api/types";
import { count, figure } from "../../format";
import { isObject, type Json } from "../../spec/pointer";
import type { Column, ColumnStats, TableStats } from "../../spec/suggest";
import { Scroll } from "../../ui/scroll";
import { Loading, ProblemBox } from "../../ui/state";

const PAGE = 20;
const COLUMNS = 50;
const VALUES = 12;
const FEW = 3;
const DEFAULT = 1000;
const MOST = 50_000; // per row: a page of 20 rows has a million

interface Shown {
  id: string;
  split: string;
  columns: Column[];
  figures: Record<string, ColumnStats> | null;
  offset: number;
  go(offset: number): void;
}

export function RowTable({ id, split, columns, figures, offset, go }: Shown) {
  const live = useLive<Rows>(withQuery(`datasets/${id}/rows`, { split, offset, limit: PAGE, values: valuesOf(columns) }), Infinity);
  const shown = columns.slice(0, COLUMNS);
  if (!live.value) return live.problem ? <ProblemBox problem={live.problem} /> : <Loading what="Loading rows" />;
  const { data, num_rows: num, note } = live.value;
  return (
    <section class="card">
      <div class="spread">
        <h2>Rows</h2>
        <div class="row">
          <button type="button" disabled={offset === 0} onClick={() => go(Math.max(0, offset - PAGE))}>Previous</button>
          <span>{num ? `${count(offset)} to ${count(offset + data.length - 1)} of ${count(num)}` : "none"}</span>
          <button type="button" disabled={offset + PAGE >= num} onClick={() => go(offset + PAGE)}>Next</button>
          <label>from row <input style={{ width: "6rem" }} inputMode="numeric" value={offset} onChange={(event) => go(within(event.currentTarget.value, num))} /></label>
        </div>
      </div>
      {note && <p class="muted">{note}</p>}
      {columns.length > COLUMNS && <p class="muted">The first {COLUMNS} of {count(columns.length)} columns.</p>}
      <Scroll label="Rows">
        <table>
          <caption class="only-readers">Rows from {offset}</caption>
          <thead><tr><th class="number">Row</th>{shown.map((one) => <th key={one.name}>{one.name}</th>)}</tr></thead>
          <tbody>
            {data.map((row, at) => (
              <tr key={at}>
                <th class="number" scope="row">{count(offset + at)}</th>
                {shown.map((one) => <td key={one.name}><Cell value={row[one.name] as Json | undefined} column={one} range={rangeOf(one, figures?.[one.name])} row={offset + at} /></td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </section>
  );
}

interface One {
  id: string;
  split: string;
  /** All columns of the dataset. */
  columns: Column[];
  /** The columns to show. */
  shown: Column[];
  row: number;
  /** The row is requested only if it is visible. */
  visible: boolean;
}

/** A single row outside of the table. */
export function OneRow({ id, split, columns, shown, row, visible }: One) {
  const path = withQuery(`datasets/${id}/rows`, { split, offset: row, limit: 1, values: valuesOf(columns) });
  const live = useLive<Rows>(visible ? path : null, Infinity);
  const stats = useLive<DatasetStats>(visible ? `datasets/${id}/stats` : null, Infinity);
  const figures = (stats.value?.splits as unknown as TableStats | undefined)?.[split];
  const found = live.value?.data[0];
  if (!found) return <span class="muted">{live.problem ? "unavailable" : "…"}</span>;
  return <RowValues stored={found} shown={shown} figures={figures ?? null} row={row} />;
}

/** Some values of a row that is at hand. */
export function RowValues({ stored, shown, figures, row }: { stored: Record<string, unknown>; shown: Column[]; figures: Record<string, ColumnStats> | null; row: number }) {
  return (
    <div class="row">
      {shown.map((one) => (
        <span key={one.name}>
          {shown.length > 1 && <span class="muted">{one.name} </span>}
          <Cell value={stored[one.name] as Json | undefined} column={one} range={rangeOf(one, figures?.[one.name])} row={row} />
        </span>
      ))}
    </div>
  );
}

/** The columns that identify a row to a person: its image or its text, else the first few. */
export function identifying(columns: Column[], without: string): Column[] {
  const others = columns.filter((one) => one.name !== without);
  const best = others.find((one) => isPicture(one.shape)) ?? others.find((one) => one.dtype === "string");
  return best ? [best] : others.slice(0, FEW);
}

/** The number of values per row that its images need, up to `MOST`; null: the service's default. */
function valuesOf(columns: Column[]): number | null {
  const sizes = columns.map(({ shape }) => shape.reduce<number>((product, size) => product * (size ?? 0), 1));
  const needed = sizes.reduce((sum, size) => sum + size, 0);
  return columns.some(({ shape }) => isPicture(shape)) && needed > DEFAULT ? Math.min(needed, MOST) : null;
}

function within(text: string, num: number): number {
  return Math.max(0, Math.min(Math.floor(Number(text) || 0), num - 1));
}

type Range = readonly [least: number, most: number];

/** The values of black and white. */
function rangeOf({ dtype }: Column, figures: ColumnStats | undefined): Range {
  if (dtype === "uint8" || typeof figures?.min !== "number" || typeof figures.max !== "number") return [0, dtype === "uint8" ? 255 : 1];
  return [Math.min(0, figures.min), Math.max(figures.max, figures.min + 1e-12)];
}

function Cell({ value, column, range, row }: { value: Json | undefined; column: Column; range: Range; row: number }) {
  if (value === undefined) return <span class="muted">not shown</span>;
  const planes = Array.isArray(value) ? planesOf(value, column.shape) : null;
  if (planes) return <Picture planes={planes} range={range} label={`${column.name} of row ${row}`} />;
  return <>{text(value)}</>;
}

type Plane = number[][];

/** [height][width] or [1 or 3][height][width] of some size is an image. */
function planesOf(value: Json[], shape: (number | null)[]): Plane[] | null {
  if (!isPicture(shape)) return null;
  return shape.length === 2 ? [value as Plane] : (value as unknown as Plane[]);
}

/** Whether a tensor of this shape is drawn as an image. */
export function isPicture(shape: (number | null)[]): boolean {
  const isOfSize = shape.length >= 2 && shape.slice(-2).every((size) => size !== null && size >= 4);
  return isOfSize && (shape.length === 2 || (shape.length === 3 && (shape[0] === 1 || shape[0] === 3)));
}

function Picture({ planes, range, label }: { planes: Plane[]; range: Range; label: string }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const height = planes[0]!.length;
  const width = planes[0]![0]!.length;
  useEffect(() => {
    const context = canvas.current?.getContext("2d");
    context?.putImageData(painted(planes, width, height, range), 0, 0);
  }, [planes]);
  const scale = Math.max(1, Math.round(48 / height));
  return <canvas ref={canvas} class="picture" role="img" aria-label={label} width={width} height={height} style={{ width: `${width * scale}px`, height: `${height * scale}px` }} />;
}

function painted(planes: Plane[], width: number, height: number, [least, most]: Range): ImageData {
  const image = new ImageData(width, height);
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      const at = 4 * (y * width + x);
      for (let channel = 0; channel < 3; channel += 1) {
        const value = (planes[channel] ?? planes[0]!)[y]![x]!;
        image.data[at + channel] = (255 * (value - least)) / (most - least);
      }
      image.data[at + 3] = 255;
    }
  }
  return image;
}

function text(value: Json): string {
  if (isObject(value)) return shortened(value);
  if (Array.isArray(value)) return listed(value);
  return typeof value === "number" ? figure(value, 6) : String(value);
}

/** A value that the service truncated: a long text, or the first values of a large tensor. */
function shortened(value: Record<string, Json>): string {
  if (typeof value["value"] === "string") return `${value["value"].slice(0, 200)} … (${count(value["length"] as number)} characters)`;
  const shape = Array.isArray(value["shape"]) ? value["shape"].map((size) => size ?? "any").join(" × ") : "";
  return `${shape}: ${Array.isArray(value["values"]) ? listed(value["values"]) : ""}`;
}

function listed(values: Json[]): string {
  const first = values.slice(0, VALUES).map((one) => (Array.isArray(one) ? `[${listed(one.slice(0, 3))}]` : typeof one === "number" ? figure(num(one as JsonNumber), 3) : String(one)));
  return first.join(", ") + (values.length > VALUES ? ` … (${count(values.length)})` : "");
}
