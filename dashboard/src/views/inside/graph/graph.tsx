// The network as a graph: data fields at the top, branches side by side, each layer with its health; large networks in groups.
import { useLocation } from "preact-iso";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import type { Job } from "../../../api/types";
import { count } from "../../../format";
import { useQuery } from "../../../query";
import { between, type Box, boxes, MOST, readers } from "./groups";
import { type Level, levelCount, SIGNS } from "../layers/health";
import { BOX, curve, place, type Placed } from "./layout";
import type { Row } from "../layers/rows";

interface Node { key: string; title: string; lines: [string, string]; level: Level | "field"; href: string | null; group: string | null }
interface Drawing { nodes: Node[]; edges: [number, number][]; placed: Placed; isGrouped: boolean }
const READABLE = 0.75; // the smallest initial scale
const TOP = 52; // px that the buttons cover: nothing is placed under them initially

interface Viewport { x: number; y: number; scale: number }

export function Graph({ job, rows }: { job: Job; rows: readonly Row[] }) {
  const [query, change] = useQuery();
  const opened = query.get("open") ?? "";
  const shape = useMemo(() => arranged(rows, opened), [rows.length, job.id, opened]);
  const drawing = useMemo(() => ({ ...shape, nodes: [...shape.fields.map(fieldNode), ...shape.shown.map((box) => nodeOf(job.id, rows, box))] }), [shape, rows]);
  const ids = opened.split(",").filter(Boolean);
  const open = (id: string) => change({ open: [...ids, id].slice(-20).join(",") });
  const groups = shape.shown.filter((box) => box.to - box.from > 1).length;
  return (
    <div class="stack">
      <div class="spread">
        <span class="muted" role="status">
          {count(rows.length)} layers{groups ? `, ${count(groups)} ${groups === 1 ? "group" : "groups"}. Click a group to open it` : ""}.
          {shape.refused && ` At most ${MOST} boxes are shown: the last group stays closed.`}
        </span>
        {ids.length > 0 && <button onClick={() => change({ open: null })}>Close all groups</button>}
      </div>
      <Canvas drawing={drawing} onOpen={open} />
      <p class="muted">Drag or use the arrow keys to move the graph. Zoom with + and −, the buttons, or Ctrl and the wheel. Press 0 to show all of it, and Enter to open a layer or a group.</p>
    </div>
  );
}

interface Arranged { shown: Box[]; fields: string[]; edges: [number, number][]; placed: Placed; isGrouped: boolean; refused: boolean }

/** The boxes and their positions; the same until the network or the open groups change. */
function arranged(rows: readonly Row[], opened: string): Arranged {
  const names = rows.map((row) => row.name);
  const ids = opened.split(",").filter(Boolean);
  let shown = boxes(names, new Set(ids));
  const refused = shown.length > MOST && ids.length > 0;
  for (let kept = ids.length - 1; shown.length > MOST && kept >= 0; kept--) shown = boxes(names, new Set(ids.slice(0, kept)));
  const { edges, fields } = readers(rows.map((row) => row.layer));
  const of = new Map(shown.flatMap((box, at) => Array.from({ length: box.to - box.from }, (_, n) => [box.from + n, at] as const)));
  const read = [...fields.keys()];
  const all = between(shown, edges).map(([from, to]): [number, number] => [from + read.length, to + read.length]);
  read.forEach((name, at) => new Set(fields.get(name)!.map((layer) => of.get(layer)!)).forEach((box) => all.push([at, box + read.length])));
  return { shown, fields: read, edges: all, placed: place(read.length + shown.length, all), isGrouped: shown.length < rows.length, refused };
}

function fieldNode(name: string): Node {
  return { key: `field ${name}`, title: `Data field ${name}`, lines: [name, "data"], level: "field", href: null, group: null };
}

const WORST: readonly Level[] = ["bad", "warn", "ok", "unknown"];

function nodeOf(job: string, rows: readonly Row[], box: Box): Node {
  const members = rows.slice(box.from, box.to);
  const level = WORST.find((one) => members.some((row) => row.verdict.level === one)) ?? "unknown";
  const [, word] = SIGNS[level];
  if (members.length === 1) {
    const row = members[0]!;
    const shared = row.layer.shared_with ? ` (shared: ${row.layer.shared_with})` : "";
    return { key: box.id, title: `${row.name}, ${row.type}${shared}, ${row.shape}: ${word}`, lines: [row.name, `${row.type}${shared} · ${row.shape}`], level, href: `/jobs/${job}/layers/${encodeURIComponent(row.name)}`, group: null };
  }
  const told = level === "ok" || level === "unknown" ? word : levelCount(level, members.filter((row) => row.verdict.level === level).length);
  return { key: box.id, title: `${box.label}, ${members.length} layers, ${told}: open`, lines: [box.label, `${members.length} layers · ${told}`], level, href: null, group: box.id };
}

function Canvas({ drawing, onOpen }: { drawing: Drawing; onOpen: (id: string) => void }) {
  const { route } = useLocation();
  const host = useRef<HTMLDivElement>(null);
  const { placed } = drawing;
  const [viewport, setViewport] = useState<Viewport | null>(null);
  const fit = (least = 0.05): Viewport => {
    const { clientWidth: width, clientHeight: height } = host.current!;
    const room = height - TOP;
    const scale = Math.min(1, Math.max(least, Math.min(width / (placed.width + 40), room / (placed.height + 20))));
    return { scale, x: width / 2 - (placed.width / 2) * scale, y: TOP + Math.max(0, (room - 20 - placed.height * scale) / 2) };
  };
  useEffect(() => setViewport((before) => before ?? fit(READABLE)), []);
  const now = viewport ?? { x: 0, y: 0, scale: 1 };
  const zoom = (factor: number, x = host.current!.clientWidth / 2, y = host.current!.clientHeight / 2) =>
    setViewport((it) => {
      const old = it ?? now;
      const scale = Math.min(2.5, Math.max(0.05, old.scale * factor));
      return { scale, x: x - ((x - old.x) * scale) / old.scale, y: y - ((y - old.y) * scale) / old.scale };
    });
  const pan = (x: number, y: number) => setViewport((it) => ({ ...(it ?? now), x: (it ?? now).x + x, y: (it ?? now).y + y }));
  useResized(host, (more) => pan(more / 2, 0));
  const act = (node: Node) => (node.group ? onOpen(node.group) : node.href && route(node.href));
  const onKey = (event: KeyboardEvent) => {
    const moves: Record<string, [number, number]> = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    const move = moves[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (move) pan(...move);
    else if (event.key === "+" || event.key === "=") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "0") setViewport(fit());
    else return;
    event.preventDefault();
  };
  const drag = useDrag(pan);
  useWheel(host, zoom);
  /** Move a focused box into view. */
  const reveal = (n: number) => {
    const { clientWidth, clientHeight } = host.current!;
    const [x, y] = [placed.nodes[n]!.x * now.scale + now.x, placed.nodes[n]!.y * now.scale + now.y];
    if (x < 40 || y < 30 || x > clientWidth - 40 || y > clientHeight - 30) pan(clientWidth / 2 - x, clientHeight / 2 - y);
  };
  return (
    <div class="graph" ref={host} onKeyDown={onKey} onScroll={(event) => event.currentTarget.scrollTo(0, 0)}>
      <svg role="group" aria-label={`Graph of ${drawing.nodes.length} boxes, inputs at the top`} tabindex={0} {...drag}>
        <g transform={`translate(${now.x} ${now.y}) scale(${now.scale})`}>
          <g aria-hidden="true">{drawing.edges.map(([from, to], n) => <path key={`${from} ${to}`} class="edge" d={curve(placed.routes[n]!)} />)}</g>
          {drawing.nodes.map((node, n) => (
            <BoxOf key={node.key} node={node} x={placed.nodes[n]!.x} y={placed.nodes[n]!.y} onAct={() => drag.wasClick() && act(node)} onEnter={() => act(node)} onFocus={() => reveal(n)} />
          ))}
        </g>
      </svg>
      <div class="tools">
        <button aria-label="Zoom in" onClick={() => zoom(1.25)}>+</button>
        <button aria-label="Zoom out" onClick={() => zoom(0.8)}>−</button>
        <button onClick={() => setViewport(fit())}>Fit</button>
      </div>
    </div>
  );
}

function BoxOf({ node, x, y, onAct, onEnter, onFocus }: { node: Node; x: number; y: number; onAct: () => void; onEnter: () => void; onFocus: () => void }) {
  const [left, top] = [x - BOX.width / 2, y - BOX.height / 2];
  const sign = node.level === "field" ? "▽" : SIGNS[node.level][0];
  const acts = node.group || node.href;
  return (
    <g class={`box ${node.level}`} data-box={node.key} transform={`translate(${left} ${top})`} onClick={onAct}>
      {node.group && <rect x={5} y={5} width={BOX.width} height={BOX.height} rx={6} />}
      <rect width={BOX.width} height={BOX.height} rx={6} role={acts ? (node.group ? "button" : "link") : "img"} aria-label={node.title} tabindex={acts ? 0 : undefined}
        onFocus={onFocus} onKeyDown={(event) => event.key === "Enter" && onEnter()}>
        <title>{node.title}</title>
      </rect>
      <svg aria-hidden="true" width={BOX.width - 4} height={BOX.height}>
        <text x={10} y={19}>{sign} {cut(node.lines[0], 18)}</text>
        <text class="small" x={10} y={36}>{cut(node.lines[1], 26)}</text>
      </svg>
    </g>
  );
}

function cut(text: string, most: number): string {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** Call back with the change in an element's width, so that its center stays in the center. */
function useResized(host: { current: HTMLElement | null }, moved: (more: number) => void): void {
  useEffect(() => {
    const element = host.current!;
    let width = element.clientWidth;
    const observer = new ResizeObserver(() => {
      moved(element.clientWidth - width);
      width = element.clientWidth;
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
}

/** Pan by dragging; a press that moved less than 5 px is a click. */
function useDrag(pan: (x: number, y: number) => void) {
  const drag = useRef({ x: 0, y: 0, moved: 0, on: false });
  return {
    onPointerDown: (event: PointerEvent) => (drag.current = { x: event.clientX, y: event.clientY, moved: 0, on: true }),
    onPointerMove: (event: PointerEvent) => {
      const it = drag.current;
      if (!it.on || !event.buttons) return void (it.on = false);
      const [x, y] = [event.clientX - it.x, event.clientY - it.y];
      pan(x, y);
      drag.current = { x: event.clientX, y: event.clientY, moved: it.moved + Math.abs(x) + Math.abs(y), on: true };
    },
    onPointerUp: () => (drag.current.on = false),
    wasClick: () => drag.current.moved < 5,
  };
}

/** Zoom with Ctrl and the wheel (or a pinch). The listener is not passive, so that the browser does not zoom the page. */
function useWheel(host: { current: HTMLDivElement | null }, zoom: (factor: number, x: number, y: number) => void): void {
  const newest = useRef(zoom);
  newest.current = zoom;
  useEffect(() => {
    const element = host.current!;
    const onWheel = (event: WheelEvent) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = element.getBoundingClientRect();
      newest.current(Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
    };
    element.addEventListener("wheel", onWheel, { passive: false });
    return () => element.removeEventListener("wheel", onWheel);
  }, []);
}
