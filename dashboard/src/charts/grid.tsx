// A tensor as images side by side: every value is a square, without interpolation. NaN and Inf are hatched.
import { useCallback, useMemo, useState } from "preact/hooks";

import { figure } from "../format";
import { color } from "../theme";
import type { Tensor } from "../views/inside/tensors/npy";
import { type Range, rangeOf, type Tiles } from "../views/inside/tensors/tiles";
import { Canvas, type Draw } from "./canvas";
import { colorOf } from "./palette";

const GAP = 3;
const MOST_ZOOM = 28;
const LOWEST = 140; // px: the minimum height of a single matrix
const MOST_HATCHED = 20_000;

interface Props { tensor: Tensor; tiles: Tiles; apart: boolean; label: string; indexText: (place: number) => string }

interface Frame { zoom: number; wide: number; tall: number; columns: number; height: number }

export function frameOf(tiles: Tiles, width: number): Frame {
  const rows = (columns: number) => Math.ceil(tiles.starts.length / columns);
  const columns = Math.min(tiles.columns, Math.max(1, tiles.starts.length));
  const zoom = Math.max(0.25, Math.min(MOST_ZOOM, (width / columns - GAP) / Math.max(1, tiles.width)));
  const whole = zoom >= 1 ? Math.floor(zoom) : zoom;
  const tall = tiles.starts.length === 1 ? Math.max(tiles.height * whole, Math.min(tiles.height * MOST_ZOOM, LOWEST)) : tiles.height * whole;
  return { zoom: whole, wide: tiles.width * whole, tall, columns, height: Math.ceil(rows(columns) * (tall + GAP)) };
}

/** `apart`: each tile has its own color scale. */
export function Grid({ tensor, tiles, apart, label, indexText }: Props) {
  const [reading, setReading] = useState("");
  const ranges = useMemo(() => rangesOf(tensor, tiles, apart), [tensor, tiles, apart]);
  const height = useCallback((width: number) => Math.max(20, Math.min(4000, frameOf(tiles, Math.min(width, 1000)).height)), [tiles]);
  const draw = useCallback<Draw>((context, width) => paint(context, frameOf(tiles, Math.min(width, 1000)), tensor, tiles, ranges), [tensor, tiles, ranges]);
  const point = (x: number, y: number, width: number) => {
    const place = placeAt(frameOf(tiles, Math.min(width, 1000)), tiles, x, y);
    setReading(place === null ? "" : `[${indexText(place)}] is ${figure(tensor.values[place], 6)}`);
  };
  return (
    <>
      <Canvas draw={draw} height={height} label={label} onPoint={point} onLeave={() => setReading("")} />
      <p class="muted reading">{reading || "Hover over a value to read it."}</p>
    </>
  );
}

function rangesOf({ values }: Tensor, tiles: Tiles, apart: boolean): Range[] {
  if (!apart) return new Array<Range>(tiles.starts.length).fill(rangeOf(values));
  return tiles.starts.map((start) => rangeOf(values, start, start + tiles.height * tiles.width));
}

function placeAt(frame: Frame, tiles: Tiles, x: number, y: number): number | null {
  const [column, row] = [Math.floor(x / (frame.wide + GAP)), Math.floor(y / (frame.tall + GAP))];
  const start = column < frame.columns ? tiles.starts[row * frame.columns + column] : undefined;
  const [across, down] = [Math.floor((x - column * (frame.wide + GAP)) / frame.zoom), Math.floor(((y - row * (frame.tall + GAP)) / frame.tall) * tiles.height)];
  if (start === undefined || across >= tiles.width || down >= tiles.height) return null;
  return start + down * tiles.width + across;
}

function paint(context: CanvasRenderingContext2D, frame: Frame, { values }: Tensor, tiles: Tiles, ranges: readonly Range[]): void {
  if (!tiles.width || !tiles.height) return;
  const one = document.createElement("canvas");
  [one.width, one.height] = [tiles.width, tiles.height];
  const small = one.getContext("2d");
  if (!small) return;
  context.imageSmoothingEnabled = false;
  let hatched = 0;
  tiles.starts.forEach((start, n) => {
    const { low, high, nan, inf } = ranges[n]!;
    const image = small.createImageData(tiles.width, tiles.height);
    const [left, top] = [(n % frame.columns) * (frame.wide + GAP), Math.floor(n / frame.columns) * (frame.tall + GAP)];
    for (let at = 0; at < tiles.width * tiles.height; at++) {
      const [red, green, blue] = colorOf(values[start + at]!, low, high);
      image.data[at * 4] = red;
      image.data[at * 4 + 1] = green;
      image.data[at * 4 + 2] = blue;
      image.data[at * 4 + 3] = 255;
    }
    small.putImageData(image, 0, 0);
    context.drawImage(one, left, top, frame.wide, frame.tall);
    if (!nan && !inf) return;
    for (let at = 0; at < tiles.width * tiles.height && hatched < MOST_HATCHED; at++) {
      if (Number.isFinite(values[start + at]!)) continue;
      hatched++;
      hatch(context, left + (at % tiles.width) * frame.zoom, top + Math.floor(at / tiles.width) * (frame.tall / tiles.height), frame.zoom, frame.tall / tiles.height);
    }
  });
}

function hatch(context: CanvasRenderingContext2D, x: number, y: number, width: number, height: number): void {
  if (width < 3) return;
  context.strokeStyle = "#000";
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x, y + height);
  context.lineTo(x + width, y);
  context.stroke();
}

/** The colors of a range, from its low to its high end. */
export function Legend({ low, high }: { low: number; high: number }) {
  const draw = useCallback<Draw>((context, width, height) => {
    for (let x = 0; x < width; x++) {
      const [red, green, blue] = colorOf(low + ((high - low) * x) / Math.max(1, width - 1), low, high);
      context.fillStyle = `rgb(${red} ${green} ${blue})`;
      context.fillRect(x, 0, 1, height);
    }
    context.strokeStyle = color("line-strong");
    context.strokeRect(0.5, 0.5, width - 1, height - 1);
  }, [low, high]);
  return (
    <div class="row legend">
      <span class="number">{figure(low)}</span>
      <div style={{ width: "10rem" }}><Canvas draw={draw} height={12} label={`Colors from ${figure(low)} to ${figure(high)}`} /></div>
      <span class="number">{figure(high)}</span>
    </div>
  );
}
