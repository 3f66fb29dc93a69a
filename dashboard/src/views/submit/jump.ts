// From a problem in a list to its field: what is folded opens, and the field gets the focus.
import { signal } from "@preact/signals";

import { above } from "../../spec/pointer";
import { idOf } from "../../ui/form";

/** Where somebody wants to go; lists that show a part of their items turn to the right page. */
export const wantedAt = signal<string | null>(null);

const FRAMES = 6; // opening something may show more to open

export function jumpTo(pointer: string): void {
  wantedAt.value = null;
  wantedAt.value = pointer;
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

/** The field, or the nearest thing around it that is there. */
function nearest(pointer: string): HTMLElement | null {
  for (let at: string | null = pointer; at !== null; at = above(at)) {
    const found = document.getElementById(idOf(at));
    if (found) return found;
  }
  return null;
}
