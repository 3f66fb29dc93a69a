// Histograms over steps as a map: steps across, values up, the lighter the more values lie there.
import { useCallback, useState } from "preact/hooks";

import { figure } from "../format";
import { colour } from "../theme";
import { type Axis, densities } from "../views/inside/spread";
import { Canvas, type Draw } from "./canvas";
import { css, sequential } from "./palette";

const LEFT = 62;
const BOTTOM = 22;

export interface Spread { step: readonly number[]; edges: readonly number[]; counts: readonly (readonly number[])[] }

export function Heat({ spread, axis, chosen, onChoose, label, height = 260 }: { spread: Spread; axis: Axis; chosen: number; onChoose: (place: number) => void; label: string; height?: number }) {
  const [told, setTold] = useState("");
  const draw = useCallback<Draw>((context, width, tall) => paint(context, width, tall, spread, axis, chosen), [spread, axis, chosen]);
  const column = (x: number, width: number) => Math.max(0, Math.min(spread.step.length - 1, Math.floor(((x - LEFT) / (width - LEFT)) * spread.step.length)));
  const point = (x: number, y: number, width: number) => {
    const place = column(x, width);
    const at = 1 - y / (height - BOTTOM);
    const bar = spread.counts[place]!.findIndex((_, n) => axis.place(spread.edges[n + 1]!) > at);
    setTold(bar < 0 || x < LEFT ? "" : `step ${spread.step[place]}: ${spread.counts[place]![bar]} values from ${figure(spread.edges[bar])} to ${figure(spread.edges[bar + 1])}`);
  };
  return (
    <>
      <Canvas draw={draw} height={height} label={label} onPoint={point} onLeave={() => setTold("")} onPick={(x, _, width) => onChoose(column(x, width))} />
      <p class="muted told">{told || "Lighter is denser. A click chooses a step."}</p>
    </>
  );
}

function paint(context: CanvasRenderingContext2D, width: number, height: number, spread: Spread, axis: Axis, chosen: number): void {
  const [across, up] = [(width - LEFT) / spread.step.length, height - BOTTOM];
  const y = (value: number) => up * (1 - axis.place(value));
  const dense = spread.counts.map((counts) => densities(counts, spread.edges, axis));
  const most = dense.reduce((high, column) => Math.max(high, ...column), 0) || 1;
  context.fillStyle = css(sequential(0));
  context.fillRect(LEFT, 0, width - LEFT, up);
  dense.forEach((column, place) => {
    column.forEach((density, bar) => {
      if (!density) return;
      const [top, bottom] = [y(spread.edges[bar + 1]!), y(spread.edges[bar]!)];
      context.fillStyle = css(sequential(0.06 + 0.94 * Math.sqrt(density / most)));
      context.fillRect(LEFT + place * across, top, Math.ceil(across), Math.max(1, bottom - top));
    });
  });
  context.strokeStyle = colour("text");
  context.lineWidth = 2;
  context.strokeRect(LEFT + chosen * across, 1, Math.max(2, across), up - 2);
  scaleOf(context, axis, y, LEFT);
  stepsBelow(context, spread.step, LEFT, width, height);
}

export function scaleOf(context: CanvasRenderingContext2D, axis: Axis, y: (value: number) => number, left: number): void {
  context.fillStyle = colour("muted");
  context.textAlign = "right";
  context.textBaseline = "middle";
  let last = Infinity;
  for (const tick of axis.ticks) {
    const at = y(tick);
    if (last - at < 13 && last !== Infinity) continue;
    context.fillText(figure(tick, 3), left - 6, Math.max(7, at));
    last = at;
  }
}

export function stepsBelow(context: CanvasRenderingContext2D, steps: readonly number[], left: number, width: number, height: number): void {
  context.fillStyle = colour("muted");
  context.textBaseline = "bottom";
  const across = (width - left) / steps.length;
  const every = Math.max(1, Math.ceil(60 / across));
  context.textAlign = "center";
  steps.forEach((step, place) => {
    const x = left + (place + 0.5) * across;
    if (place % every === 0 && x + 14 < width) context.fillText(String(step), x, height - 2);
  });
}
