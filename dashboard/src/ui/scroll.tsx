// A table that may be wider than the screen: it scrolls on its own, also with the arrow keys.
import type { ComponentChildren } from "preact";

export function Scroll({ label, children }: { label: string; children: ComponentChildren }) {
  return <div class="table" role="group" aria-label={label} tabIndex={0}>{children}</div>;
}
