// A bar chart on a logarithmic scale: gradient flow.
import { useCallback } from "preact/hooks";

import { figure } from "../format";
import { color } from "../theme";
import { Canvas, type Draw } from "./canvas";
import { powersAround } from "./powers";

const LEFT = 62;
const TOP = 16;
const BOTTOM = 22;
const ROOM = 60; // px per bar from which names are drawn

export interface Bar {
  readonly name: string;
  /** Null: unknown; NaN: NaN or Inf. */
  readonly value: number | null;
  readonly mark: "vanishing" | "exploding" | "nonfinite" | null;
}

interface Props { bars: readonly Bar[]; chosen: number | null; label: string; onPoint: (place: number | null) => void; onPick: (place: number) => void; height?: number }

export function Bars({ bars, chosen, label, onPoint, onPick, height = 260 }: Props) {
  const draw = useCallback<Draw>((context, width, tall) => paint(context, width, tall, bars, chosen), [bars, chosen]);
  const place = (x: number, width: number) => Math.floor(((x - LEFT) / (width - LEFT)) * bars.length);
  const there = (x: number, width: number) => x >= LEFT && place(x, width) < bars.length;
  return (
    <Canvas
      draw={draw}
      height={height}
      label={label}
      onPoint={(x, _, width) => onPoint(there(x, width) ? place(x, width) : null)}
      onLeave={() => onPoint(null)}
      onPick={(x, _, width) => there(x, width) && onPick(place(x, width))}
    />
  );
}

function paint(context: CanvasRenderingContext2D, width: number, height: number, bars: readonly Bar[], chosen: number | null): void {
  const [low, high] = powersAround(bars.map((bar) => bar.value));
  const up = height - TOP - BOTTOM;
  const y = (value: number) => TOP + up * (1 - (Math.log10(value) - low) / (high - low));
  grid(context, low, high, y, width);
  const across = (width - LEFT) / Math.max(1, bars.length);
  const wide = Math.max(1, Math.min(24, across * 0.75));
  bars.forEach((bar, place) => {
    const x = LEFT + (place + 0.5) * across;
    if (place === chosen) {
      context.fillStyle = color("raised");
      context.fillRect(x - Math.max(across, 4) / 2, TOP, Math.max(across, 4), up);
    }
    if (across >= ROOM) named(context, bar.name, x, TOP + up, across);
    if (bar.value === null) return;
    const finite = Number.isFinite(bar.value);
    const top = !finite ? TOP : bar.value > 0 ? Math.min(TOP + up - 1, Math.max(TOP, y(bar.value))) : TOP + up - 1;
    context.fillStyle = color(bar.mark === null ? "accent" : bar.mark === "vanishing" ? "warn" : "bad");
    context.fillRect(x - wide / 2, top, wide, TOP + up - top);
    if (bar.mark) sign(context, bar.mark, x, top);
  });
}

function grid(context: CanvasRenderingContext2D, low: number, high: number, y: (value: number) => number, width: number): void {
  const every = Math.max(1, Math.ceil((high - low) / 6));
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let power = low; power <= high; power += every) {
    const at = y(10 ** power);
    context.fillStyle = color("line");
    context.fillRect(LEFT, at, width - LEFT, 1);
    context.fillStyle = color("muted");
    context.fillText(figure(10 ** power, 2), LEFT - 6, at);
  }
}

function named(context: CanvasRenderingContext2D, name: string, x: number, y: number, room: number): void {
  context.textAlign = "center";
  context.textBaseline = "top";
  context.fillStyle = color("muted");
  let text = name;
  while (text.length > 3 && context.measureText(text).width > room - 4) text = `${text.slice(0, -2)}…`;
  context.fillText(text, x, y + 6);
}

function sign(context: CanvasRenderingContext2D, mark: NonNullable<Bar["mark"]>, x: number, top: number): void {
  context.textAlign = "center";
  context.textBaseline = "bottom";
  context.fillText(mark === "vanishing" ? "▼" : mark === "exploding" ? "▲" : "✕", x, top);
}
