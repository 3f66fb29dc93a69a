// A canvas as wide as its container, sharp on every screen, redrawn when its size, the theme or its content changes.
import { useEffect, useRef } from "preact/hooks";

import { theme } from "../theme";
import { scheduleDraw } from "./turns";

export type Draw = (context: CanvasRenderingContext2D, width: number, height: number) => void;

interface Props {
  draw: Draw;
  /** May depend on the width. */
  height: number | ((width: number) => number);
  /** A description of the chart. */
  label: string;
  onPoint?: (x: number, y: number, width: number) => void;
  onLeave?: () => void;
  onPick?: (x: number, y: number, width: number) => void;
}

export function Canvas({ draw, height, label, onPoint, onLeave, onPick }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const colors = theme.value;
  useEffect(() => {
    const element = canvas.current;
    const place = element?.parentElement;
    if (!element || !place) return;
    const paint = () => {
      const width = Math.max(50, place.clientWidth);
      const tall = typeof height === "number" ? height : height(width);
      const sharp = Math.min(3, devicePixelRatio || 1);
      element.width = Math.round(width * sharp);
      element.height = Math.round(tall * sharp);
      element.style.width = `${width}px`;
      element.style.height = `${tall}px`;
      const context = element.getContext("2d");
      if (!context) return;
      context.scale(sharp, sharp);
      context.font = `12px ${getComputedStyle(element).fontFamily}`;
      draw(context, width, tall);
    };
    const cancel = scheduleDraw(paint);
    const watcher = new ResizeObserver(() => place.clientWidth !== parseInt(element.style.width, 10) && paint());
    watcher.observe(place);
    return () => {
      cancel();
      watcher.disconnect();
    };
  }, [draw, height, colors]);
  const located = (handler: Props["onPoint"]) => handler && ((event: MouseEvent) => {
    const box = (event.currentTarget as HTMLElement).getBoundingClientRect();
    handler(event.clientX - box.left, event.clientY - box.top, box.width);
  });
  return (
    <div class="chart">
      <canvas ref={canvas} role="img" aria-label={label} onMouseMove={located(onPoint)} onMouseLeave={onLeave} onClick={located(onPick)} />
    </div>
  );
}
