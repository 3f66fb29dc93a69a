// Series as uPlot's columns, lines and bands, and the marks drawn over them.
import uPlot from "uplot";

import { color } from "../theme";
import { align, type Cell, clusters, dashOf, envelope, floorOf, type Odd, nonfinitePoints, type Series, smooth, weights } from "./series";
import { colorName } from "./swatch";

export interface Marker {
  x: number;
  kind: "checkpoint" | "command" | "attempt";
  /** A short text, shown near the cursor and in the table. */
  name: string;
}

export const NEAR_PX = 6;
const MANY_MARKS = 20;

export function colorOf(style: number): string {
  return color(colorName(style));
}

export interface Prepared {
  data: uPlot.AlignedData;
  lines: uPlot.Series[];
  bands: uPlot.Band[];
  odd: Odd[];
  /** Values that a logarithmic axis cannot show. */
  hidden: number;
}

/** For each series the raw line, the smoothed line over it, and the band from min to max. */
export function prepare(series: readonly Series[], smoothing: number, log: boolean): Prepared {
  const drawn = series.map((one) => (one.thinned && !one.low ? { ...one, ...envelope(one) } : one));
  const smoothed = weights(drawn, smoothing);
  let hidden = 0;
  const shown = (values: readonly Cell[]) =>
    !log ? values : values.map((y) => (typeof y === "number" && y <= 0 ? ((hidden += 1), null) : y));
  const floor = log ? floorOf(drawn) : -Infinity;
  const edgeOf = (values: readonly number[]) => values.map((y) => (y < floor ? floor : y)); // NaN stays NaN
  const lines: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  const tables = drawn.map((one, place) => {
    const style = one.style ?? place;
    const look = { stroke: colorOf(style), dash: dashOf(style), label: one.label };
    const columns: (readonly Cell[])[] = [shown(one.ys)];
    lines.push({ ...look, width: 1.3, alpha: smoothing ? 0.35 : 1 });
    if (smoothing) {
      columns.push(shown(smooth(one.ys, smoothed[place]!)));
      lines.push({ ...look, width: 2, points: { show: false } });
    }
    if (one.low && one.high) {
      // not alpha: 0, which would hide the band too
      const edge = { ...look, stroke: "transparent", width: 0, points: { show: false } };
      bands.push({ series: [lines.length, lines.length + 1], fill: `color-mix(in srgb, ${look.stroke} 22%, transparent)` });
      columns.push(edgeOf(one.high), edgeOf(one.low));
      lines.push(edge, edge);
    }
    return { xs: one.xs, columns };
  });
  const { xs, columns } = align(tables);
  return { data: [xs, ...columns] as uPlot.AlignedData, lines, bands, odd: nonfinitePoints(series), hidden };
}

export interface Asked {
  width: number;
  height: number;
  log: boolean;
  time: boolean;
  /** x are integers: ticks only at integers. */
  whole: boolean;
  range(): readonly [number, number] | null;
  marks(): { odd: readonly Odd[]; markers: readonly Marker[] };
  zoom(range: [number, number] | null): void;
  moved(plot: uPlot): void;
}

export function optionsOf(prepared: Prepared, asked: Asked): uPlot.Options {
  const axis = { stroke: color("muted"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line"), width: 1 } };
  return {
    width: asked.width,
    height: asked.height,
    legend: { show: false },
    padding: [8, 12, 0, 0],
    series: prepared.lines,
    bands: prepared.bands,
    scales: { x: { time: asked.time, range: (plot, low, high) => within(asked.range(), plot.data[0], low, high) }, y: asked.log ? { distr: 3 } : {} },
    axes: [
      { ...axis, ...(asked.time ? { size: 50 } : { size: 34, incrs: asked.whole ? WHOLE : FINE, values: (_: uPlot, ticks: number[]) => ticks.map(tickText) }) },
      { ...axis, size: sizeOf, values: (_, ticks) => ticks.map(tickText) },
    ],
    cursor: {
      y: false,
      points: { show: false },
      drag: { x: true, y: false, setScale: false },
      bind: {
        dblclick: () => () => (asked.zoom(null), null),
        mouseleave: (plot, _, leave) => (event) => (leavesAbove(plot, event) ? null : leave(event)),
      },
    },
    hooks: {
      draw: [(plot) => drawMarks(plot, asked.marks())],
      setSelect: [(plot) => select(plot, asked.zoom)],
      setCursor: [asked.moved],
    },
  };
}

/** Whether the mouse leaves during a drag by the top or the bottom. uPlot would extend the selection to the end of the axis. */
function leavesAbove(plot: uPlot, event: MouseEvent): boolean {
  const { left, right } = plot.over.getBoundingClientRect();
  return (event.buttons & 1) === 1 && plot.select.width > 0 && event.clientX > left && event.clientX < right;
}

const WHOLE = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat();
const FINE = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, ...WHOLE];

function within(range: readonly [number, number] | null, xs: ArrayLike<number>, low: number | null, high: number | null): uPlot.Range.MinMax {
  if (range) return [range[0], range[1]];
  if (low === null || high === null || !xs.length) return [0, 1];
  return xs.length === 1 ? [xs[0]! - 1, xs[0]! + 1] : [low, high];
}

function tickText(value: number | null): string {
  if (value === null) return "";
  const size = Math.abs(value);
  if (size >= 1e12 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e+", "e");
  const [unit, letter] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  return `${+(value / unit).toPrecision(6)}${letter}`;
}

/** The width of its longest tick. */
function sizeOf(_: uPlot, values: string[] | null): number {
  return Math.max(40, 20 + 7.5 * Math.max(0, ...(values ?? []).map((text) => text?.length ?? 0)));
}

function select(plot: uPlot, zoom: Asked["zoom"]): void {
  const { left, width } = plot.select;
  if (width < NEAR_PX) return;
  const range: [number, number] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  zoom(range);
}

const GLYPHS: Record<Marker["kind"], string> = { checkpoint: "◆", command: "▼", attempt: "●" };

function drawMarks(plot: uPlot, { odd, markers }: ReturnType<Asked["marks"]>): void {
  const { ctx, bbox } = plot;
  const scale = uPlot.pxRatio;
  const at = (mark: { x: number }) => plot.valToPos(mark.x, "x", true);
  const seen = (mark: { x: number }) => at(mark) >= bbox.left - 1 && at(mark) <= bbox.left + bbox.width + 1;
  ctx.save();
  ctx.textAlign = "center";
  ctx.font = `${10 * scale}px system-ui, sans-serif`;
  ctx.lineWidth = scale;
  const together = clusters(markers.filter(seen), at, NEAR_PX * scale);
  for (const { at: x, marks } of together) drawMarker(ctx, bbox, x, marks, scale, together.length > MANY_MARKS);
  for (const { at: x, marks } of clusters(odd.filter(seen), at, NEAR_PX * scale)) drawNonfinite(ctx, bbox, x, marks.length, scale);
  ctx.restore();
}

/** If there are many marks, automatic checkpoints get no line, which would hide the chart. */
function drawMarker(ctx: CanvasRenderingContext2D, bbox: uPlot.BBox, x: number, marks: readonly Marker[], scale: number, isOneOfMany: boolean): void {
  const shown = marks.find((one) => one.kind !== "checkpoint") ?? marks[0]!;
  ctx.strokeStyle = ctx.fillStyle = color("line-strong");
  ctx.setLineDash([2 * scale, 3 * scale]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + (isOneOfMany && shown.kind === "checkpoint" ? 4 * scale : bbox.height));
  ctx.stroke();
  ctx.fillText(GLYPHS[shown.kind], x, bbox.top + 4 * scale);
}

/** A red cross on the axis, with the number of values that it represents. */
function drawNonfinite(ctx: CanvasRenderingContext2D, bbox: uPlot.BBox, x: number, many: number, scale: number): void {
  const y = bbox.top + bbox.height - 5 * scale;
  const arm = 4 * scale;
  ctx.strokeStyle = ctx.fillStyle = color("bad");
  ctx.setLineDash([]);
  ctx.lineWidth = 2 * scale;
  ctx.beginPath();
  ctx.moveTo(x - arm, y - arm);
  ctx.lineTo(x + arm, y + arm);
  ctx.moveTo(x + arm, y - arm);
  ctx.lineTo(x - arm, y + arm);
  ctx.stroke();
  if (many > 1) ctx.fillText(String(many), x, y - 7 * scale);
}
