// A line as charts draw it, beside its name: its colour and its pattern.
import { dashOf } from "./series";

const COLOURS = 8;

/** The colour of a line, as styles name it. */
export function colourName(style: number): string {
  return `series-${(style % COLOURS) + 1}`;
}

export function Swatch({ style }: { style: number }) {
  return (
    <svg class="swatch" viewBox="0 0 24 6" aria-hidden="true">
      <line x1="0" y1="3" x2="24" y2="3" stroke={`var(--${colourName(style)})`} stroke-width="2.5" stroke-dasharray={dashOf(style).join(" ")} />
    </svg>
  );
}
