// A sample of a line for legends: its color and dash pattern.
import { dashOf } from "./series";

const COLORS = 8;

/** The CSS name of a line's color. */
export function colorName(style: number): string {
  return `series-${(style % COLORS) + 1}`;
}

export function Swatch({ style }: { style: number }) {
  return (
    <svg class="swatch" viewBox="0 0 24 6" aria-hidden="true">
      <line x1="0" y1="3" x2="24" y2="3" stroke={`var(--${colorName(style)})`} stroke-width="2.5" stroke-dasharray={dashOf(style).join(" ")} />
    </svg>
  );
}
