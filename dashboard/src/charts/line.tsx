// A line chart over steps: zoom by dragging, read values with the mouse or the arrow keys, described in a sentence, with a table.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";

import { count, figure } from "../format";
import { theme } from "../theme";
import { type Asked, type Marker, NEAR_PX, optionsOf, type Prepared, prepare } from "./plot";
import { atText, counted, type Odd, readAt, sentence, type Series } from "./series";
import { Swatch } from "./swatch";
import { ChartTable, saveCsv } from "./table";
import { scheduleDraw } from "./turns";

export type { Marker } from "./plot";
export type { Series } from "./series";

export type Range = readonly [number, number];

export interface LineProps {
  title: string;
  series: readonly Series[];
  markers?: readonly Marker[];
  /** "step", "epoch" or "time"; times are seconds since 1970. */
  xName?: string;
  log?: boolean;
  /** Weight of the past in the smoothed line, 0 (off) to below 1. */
  smoothing?: number;
  /** The visible range of x; null: all. */
  range?: Range | null;
  onZoom?: (range: Range | null) => void;
  /** A link that explains the first NaN or Inf. */
  oddHref?: string | undefined;
  oddName?: string | undefined;
  height?: number;
  /** The data of the table and the CSV file if it is not `series`: the same over steps, if x is not the step. */
  table?: { series: readonly Series[]; xName: string };
}

const REPAINT_MS = 250;
const NO_MARKERS: readonly Marker[] = [];

export function LineChart(props: LineProps) {
  const { title, series, markers = NO_MARKERS, xName = "step", smoothing = 0, height = 200 } = props;
  const [asTable, setAsTable] = useState(false);
  const table = props.table ?? { series, xName };
  const positive = useMemo(() => series.some((one) => one.ys.some((y) => y > 0 && y < Infinity)), [series]);
  const log = !!props.log && positive;
  const prepared = useMemo(() => prepare(series, smoothing, log), [series, smoothing, log, theme.value]);
  const plot = useRef<uPlot | null>(null);
  const [cursor, setCursor] = useState<number | null>(null);
  return (
    <div class="line-chart">
      <Key series={series} x={cursor} xName={xName} markers={markers} plot={plot.current} />
      {!series.length ? (
        <div style={{ height: `${height}px` }} />
      ) : asTable ? (
        <ChartTable title={title} {...table} markers={markers} markName={xName} />
      ) : (
        <Canvas prepared={prepared} plot={plot} onCursor={setCursor} wanted={{ ...props, markers, xName, log, height }} />
      )}
      <div class="spread foot">
        <span class="row">
          <NonfiniteNote odd={prepared.odd} thinned={series.some((one) => one.thinned)} xName={xName} href={props.oddHref} name={props.oddName} />
          {props.log && !positive && <span class="muted">No values above 0: the axis is linear.</span>}
          {prepared.hidden > 0 && <span class="muted">{count(prepared.hidden)} {prepared.hidden === 1 ? "value" : "values"} at or below 0 not shown on the log axis.</span>}
        </span>
        <span class="row">
          {props.range && props.onZoom && <button class="small" onClick={() => props.onZoom?.(null)}>Reset zoom</button>}
          <button class="small" aria-pressed={asTable} onClick={() => setAsTable(!asTable)}>Table</button>
          <button class="small" onClick={() => saveCsv(title, table.series, table.xName)}>CSV</button>
        </span>
      </div>
      <span class="only-readers" role="status">{cursor === null ? "" : valuesAt(series, cursor, xName)}</span>
    </div>
  );
}

interface Wanted extends LineProps {
  markers: readonly Marker[];
  xName: string;
  log: boolean;
  height: number;
}

interface Shown {
  /** What a plot cannot change after it is created. */
  shape: string;
  prepared: Prepared;
  wanted: Wanted;
}

/** A uPlot: recreated when its lines, axes or colors change, else updated with new data, at most 4 times a second. */
function Canvas({ prepared, wanted, plot, onCursor }: { prepared: Prepared; wanted: Wanted; plot: { current: uPlot | null }; onCursor: (x: number | null) => void }) {
  const host = useRef<HTMLDivElement>(null);
  const look = useMemo(() => JSON.stringify([prepared.lines, prepared.bands]), [prepared]);
  const shape = JSON.stringify([look, wanted.log, wanted.xName, wanted.height, theme.value]);
  const newest = useRef<Shown>({ shape, prepared, wanted });
  newest.current = { shape, prepared, wanted };
  const drawn = useRef<Shown | null>(null);
  const words = useMemo(() => sentence(wanted.series, wanted.xName), [wanted.series, wanted.xName]);
  useEffect(() => scheduleDraw(() => {
    if (!host.current) return; // unmounted: effects are cleaned up only after the next frame
    if (plot.current) onCursor(null);
    plot.current?.destroy(); // only now, so that the old plot stays visible until it is replaced
    drawn.current = newest.current;
    plot.current = plotOf(host.current, newest, onCursor);
  }), [shape]);
  useEffect(() => {
    const element = host.current!;
    const observer = new ResizeObserver(() => element.clientWidth && plot.current?.setSize({ width: element.clientWidth, height: newest.current.wanted.height }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      plot.current?.destroy();
      plot.current = null;
      onCursor(null);
    };
  }, []);
  useThrottled(() => {
    if (!plot.current || drawn.current?.shape !== newest.current.shape || isSame(drawn.current, newest.current)) return;
    drawn.current = newest.current;
    plot.current.setData(newest.current.prepared.data);
  }, [prepared, wanted.markers, wanted.range]);
  return (
    <div class="canvas" ref={host} role="img" tabIndex={0} style={{ height: `${wanted.height}px` }}
      aria-label={`${wanted.title}: ${words}`} onKeyDown={(event) => onKey(event, plot.current, wanted.onZoom)} />
  );
}

function isSame(one: Shown, other: Shown): boolean {
  return one.prepared === other.prepared && one.wanted.markers === other.wanted.markers && one.wanted.range === other.wanted.range;
}

function plotOf(element: HTMLElement, newest: { readonly current: Shown }, onCursor: (x: number | null) => void): uPlot {
  const { prepared, wanted } = newest.current;
  const asked: Asked = {
    width: element.clientWidth,
    height: wanted.height,
    log: wanted.log,
    time: wanted.xName === "time",
    whole: wanted.xName === "step",
    range: () => newest.current.wanted.range ?? null,
    marks: () => ({ odd: newest.current.prepared.odd, markers: newest.current.wanted.markers }),
    zoom: (range) => newest.current.wanted.onZoom?.(range),
    moved: (it) => onCursor(it.data[0][it.cursor.idx ?? -1] ?? null),
  };
  return new uPlot(optionsOf(prepared, asked), prepared.data, element);
}

/** Repaint when something has changed, at most once per `REPAINT_MS`. */
function useThrottled(repaint: () => void, changes: readonly unknown[]): void {
  const state = useRef({ at: 0, timer: 0 });
  const cancel = useRef(() => {});
  useEffect(() => {
    const { at, timer } = state.current;
    if (timer) return;
    const run = () => {
      state.current = { at: performance.now(), timer: 0 };
      cancel.current = scheduleDraw(repaint);
    };
    const wait = at + REPAINT_MS - performance.now();
    if (wait <= 0) run();
    else state.current.timer = window.setTimeout(run, wait);
  }, changes as unknown[]);
  useEffect(() => () => (clearTimeout(state.current.timer), cancel.current()), []);
}

/** The arrow keys move the cursor, + and − zoom around it, Escape resets the zoom. */
function onKey(event: KeyboardEvent, plot: uPlot | null, zoom: LineProps["onZoom"]): void {
  if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
  const xs = plot.data[0];
  const last = xs.length - 1;
  const here = plot.cursor.idx ?? (event.key === "ArrowLeft" ? last + 1 : -1);
  const hop = event.shiftKey ? 10 : 1;
  const places: Record<string, number> = { ArrowLeft: here - hop, ArrowRight: here + hop, Home: 0, End: last };
  const place = places[event.key];
  if (place !== undefined && last >= 0) move(plot, xs[Math.min(last, Math.max(0, place))]!);
  else if (event.key === "Escape" || event.key === "0") zoom?.(null);
  else if (event.key === "+" || event.key === "-") zoomAround(plot, event.key === "+" ? 0.5 : 2, zoom);
  else return;
  event.preventDefault();
}

function move(plot: uPlot, x: number): void {
  plot.setCursor({ left: plot.valToPos(x, "x"), top: 1 });
}

function zoomAround(plot: uPlot, factor: number, zoom: LineProps["onZoom"]): void {
  const { min, max } = plot.scales["x"]!;
  if (min === undefined || max === undefined || min === null || max === null) return;
  const center = plot.data[0][plot.cursor.idx ?? -1] ?? (min + max) / 2;
  zoom?.([center - (center - min) * factor, center + (max - center) * factor]);
}

/** The legend with the values at the cursor. The cursor never shifts the layout: values have a fixed width, and
    the line below, with the position of the cursor and its marks, is always present. */
function Key({ series, x, xName, markers, plot }: { series: readonly Series[]; x: number | null; xName: string; markers: readonly Marker[]; plot: uPlot | null }) {
  const near = x === null || !plot ? [] : markers.filter((one) => Math.abs(plot.valToPos(one.x, "x") - plot.valToPos(x, "x")) < NEAR_PX);
  const older = x === null ? [] : series.flatMap((one) => olderText(one, x, xName) ?? []);
  const here = x === null ? "" : [`${xName} ${atText(x, xName)}`, ...older, ...near.slice(0, 3).map((one) => one.name)].join(" · ");
  return (
    <div aria-hidden="true">
      <div class="key">
        {series.map((one, place) => (
          <span key={one.label} class="nowrap">
            <Swatch style={one.style ?? place} /> {one.label} <b>{x === null ? "" : figure(readAt(one, x)?.y ?? null)}</b>
          </span>
        ))}
      </div>
      <div class="cursor-note muted" title={here}>{here}</div>
    </div>
  );
}

function valuesAt(series: readonly Series[], x: number, xName: string): string {
  const values = series.map((one) => `${one.label} ${figure(readAt(one, x)?.y ?? null)}${isOlder(one, x) ? ` (at ${xName} ${atText(readAt(one, x)!.x, xName)})` : ""}`);
  return `${xName} ${atText(x, xName)}: ${values.join(", ")}`;
}

function isOlder(one: Series, x: number): boolean {
  const read = readAt(one, x);
  return read !== null && read.x !== x;
}

/** The x of a value that was measured before the cursor's position, such as a validation metric between two epochs. */
function olderText(one: Series, x: number, xName: string): string | null {
  return isOlder(one, x) ? `${one.label} at ${atText(readAt(one, x)!.x, xName)}` : null;
}

function NonfiniteNote({ odd, thinned, xName, href, name }: { odd: readonly Odd[]; thinned: boolean; xName: string; href: string | undefined; name: string | undefined }) {
  const [first] = odd;
  if (!first) return null;
  const text = `${thinned ? "at least " : ""}${counted(odd)}, first in ${first.label} at ${xName} ${atText(first.x, xName)}`;
  return <span class="odd">✕ {text}{href && <> · <a href={href}>{name ?? "inspect"}</a></>}</span>;
}
