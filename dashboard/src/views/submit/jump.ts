// Jump from a listed problem to its field: collapsed sections open, and the field gets the focus.
import { signal } from "@preact/signals";

import { above } from "../../spec/pointer";
import { idOf } from "../../ui/form";

/** The target of a jump; paged lists go to its page. */
export const jumpTarget = signal<string | null>(null);

const FRAMES = 6; // opening something may show more to open

export function jumpTo(pointer: string): void {
  jumpTarget.value = null;
  jumpTarget.value = pointer;
  step(pointer, FRAMES);
}

function step(pointer: string, left: number): void {
  requestAnimationFrame(() => {
    const found = nearest(pointer);
    for (let at = found; at; at = at.parentElement) if (at instanceof HTMLDetailsElement) at.open = true;
    if (found?.id !== idOf(pointer) && left > 0) return step(pointer, left - 1);
    found?.scrollIntoView({ block: "center" });
    found?.querySelector<HTMLElement>("input, select, summary, button")?.focus({ preventScroll: true });
  });
}

/** The field, or its nearest ancestor that exists. */
function nearest(pointer: string): HTMLElement | null {
  for (let at: string | null = pointer; at !== null; at = above(at)) {
    const found = document.getElementById(idOf(at));
    if (found) return found;
  }
  return null;
}
