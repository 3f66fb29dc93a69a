// Histograms over steps as a heat map: steps horizontally, values vertically; lighter is denser.
import { useCallback, useMemo, useState } from "preact/hooks";

import { count, figure } from "../format";
import { color } from "../theme";
import { type Axis, borders, columnAt, densities, evenTicks } from "../views/inside/statistics/histogram-axis";
import { Canvas, type Draw } from "./canvas";
import { css, sequential } from "./palette";

const LEFT = 62;
const BOTTOM = 22;

export interface Spread { step: readonly number[]; edges: readonly number[]; counts: readonly (readonly number[])[] }

export function Heat({ spread, axis, chosen, onChoose, label, height = 260 }: { spread: Spread; axis: Axis; chosen: number; onChoose: (place: number) => void; label: string; height?: number }) {
  const [reading, setReading] = useState("");
  const draw = useCallback<Draw>((context, width, tall) => paint(context, width, tall, spread, axis, chosen), [spread, axis, chosen]);
  const edges = useMemo(() => borders(spread.step), [spread.step]);
  const column = (x: number, width: number) => columnAt(edges, edges[0]! + ((x - LEFT) / (width - LEFT)) * (edges.at(-1)! - edges[0]!));
  const point = (x: number, y: number, width: number) => {
    const place = column(x, width);
    const at = 1 - y / (height - BOTTOM);
    const bar = spread.counts[place]!.findIndex((_, n) => axis.place(spread.edges[n + 1]!) > at);
    setReading(bar < 0 || x < LEFT ? "" : `step ${count(spread.step[place])}: ${count(spread.counts[place]![bar])} values from ${figure(spread.edges[bar])} to ${figure(spread.edges[bar + 1])}`);
  };
  return (
    <>
      <Canvas draw={draw} height={height} label={label} onPoint={point} onLeave={() => setReading("")} onPick={(x, _, width) => onChoose(column(x, width))} />
      <p class="muted reading">{reading || "Lighter is denser. Click to select a step."}</p>
    </>
  );
}

function paint(context: CanvasRenderingContext2D, width: number, height: number, spread: Spread, axis: Axis, chosen: number): void {
  const up = height - BOTTOM;
  const edges = borders(spread.step);
  const x = (step: number) => LEFT + ((width - LEFT) * (step - edges[0]!)) / (edges.at(-1)! - edges[0]!);
  const y = (value: number) => up * (1 - axis.place(value));
  const dense = spread.counts.map((counts) => densities(counts, spread.edges, axis, up));
  const most = dense.reduce((high, column) => Math.max(high, ...column), 0) || 1;
  context.fillStyle = css(sequential(0));
  context.fillRect(LEFT, 0, width - LEFT, up);
  dense.forEach((column, place) => {
    const [left, right] = [x(edges[place]!), x(edges[place + 1]!)];
    column.forEach((density, cell) => {
      if (!density) return;
      context.fillStyle = css(sequential(0.06 + 0.94 * Math.sqrt(density / most)));
      context.fillRect(left, up - cell - 1, Math.max(1, right - left), 1);
    });
  });
  context.strokeStyle = color("text");
  context.lineWidth = 2;
  context.strokeRect(x(edges[chosen]!), 1, Math.max(2, x(edges[chosen + 1]!) - x(edges[chosen]!)), up - 2);
  scaleOf(context, axis, y, LEFT);
  stepsBelow(context, spread.step, x, width, height);
}

export function scaleOf(context: CanvasRenderingContext2D, axis: Axis, y: (value: number) => number, left: number): void {
  context.fillStyle = color("muted");
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

/** Ticks at round steps on an axis of steps. */
export function stepsBelow(context: CanvasRenderingContext2D, steps: readonly number[], x: (step: number) => number, width: number, height: number): void {
  context.fillStyle = color("muted");
  context.textBaseline = "bottom";
  context.textAlign = "center";
  const ticks = evenTicks(steps[0]!, steps.at(-1)!, Math.max(1, Math.floor(width / 90))).filter(Number.isInteger);
  for (const step of ticks) if (x(step) + 14 < width) context.fillText(count(step), x(step), height - 2);
}
