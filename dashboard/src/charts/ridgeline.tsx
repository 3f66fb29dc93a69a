// Histograms over steps as ridges: one curve per step, the oldest at the back.
import { useCallback } from "preact/hooks";

import { count, figure } from "../format";
import { color } from "../theme";
import { atMost, type Axis, densities } from "../views/inside/statistics/histogram-axis";
import { Canvas, type Draw } from "./canvas";
import type { Spread } from "./heat";
import { css, sequential } from "./palette";

const LEFT = 48;
const BOTTOM = 22;
const MOST = 24; // ridges
const OVER = 4; // neighbors that the highest ridge may cover
const CELLS = 160; // points of a ridge

export function Ridgeline({ spread, axis, chosen, label, height = 340 }: { spread: Spread; axis: Axis; chosen: number; label: string; height?: number }) {
  const draw = useCallback<Draw>((context, width, tall) => paint(context, width, tall, spread, axis, chosen), [spread, axis, chosen]);
  return <Canvas draw={draw} height={height} label={label} />;
}

function paint(context: CanvasRenderingContext2D, width: number, height: number, spread: Spread, axis: Axis, chosen: number): void {
  const places = atMost(spread.step.length, MOST);
  if (!places.includes(chosen)) places.push(chosen);
  places.sort((a, b) => a - b);
  const dense = places.map((place) => densities(spread.counts[place]!, spread.edges, axis, CELLS));
  const most = dense.reduce((high, one) => Math.max(high, ...one), 0) || 1;
  const apart = (height - BOTTOM - 8) / (places.length - 1 + OVER);
  const rise = OVER * apart;
  const across = (place: number) => LEFT + (width - LEFT - 4) * place;
  places.forEach((place, n) => {
    const base = rise + 4 + n * apart;
    ridge(context, dense[n]!, across, base, rise / most, place === chosen, n / Math.max(1, places.length - 1));
  });
  context.textAlign = "right";
  context.textBaseline = "alphabetic";
  const every = Math.max(1, Math.ceil(14 / Math.max(apart, 0.1)));
  places.forEach((place, n) => {
    if (n % every && place !== chosen) return;
    context.fillStyle = color(place === chosen ? "text" : "muted");
    context.fillText(count(spread.step[place]), LEFT - 6, rise + 6 + n * apart);
  });
  valuesBelow(context, axis, (value) => across(axis.place(value)), height);
}

function ridge(context: CanvasRenderingContext2D, density: readonly number[], across: (place: number) => number, base: number, rise: number, isChosen: boolean, age: number): void {
  context.beginPath();
  context.moveTo(across(0), base);
  density.forEach((one, cell) => context.lineTo(across((cell + 0.5) / density.length), base - one * rise));
  context.lineTo(across(1), base);
  context.closePath();
  context.globalAlpha = 0.8;
  context.fillStyle = css(sequential(0.15 + 0.7 * age));
  context.fill();
  context.globalAlpha = 1;
  context.lineWidth = isChosen ? 2.5 : 1;
  context.strokeStyle = color(isChosen ? "text" : "line-strong");
  context.stroke();
}

export function valuesBelow(context: CanvasRenderingContext2D, axis: Axis, x: (value: number) => number, height: number): void {
  context.fillStyle = color("muted");
  context.textAlign = "center";
  context.textBaseline = "bottom";
  let last = -Infinity;
  for (const tick of axis.ticks) {
    if (x(tick) - last < 52) continue;
    context.fillText(figure(tick, 3), x(tick), height - 2);
    last = x(tick);
  }
}
