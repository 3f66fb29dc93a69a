// Light or dark: the system's preference unless the user selects one.
import { computed, signal } from "@preact/signals";

export type Choice = "system" | "light" | "dark";

const KEY = "glasshouse-theme";
const prefers = matchMedia("(prefers-color-scheme: dark)");
const system = signal(prefers.matches);
export const choice = signal<Choice>(stored());
/** Charts read it, so that they are redrawn in the new colors. */
export const theme = computed(() => (choice.value === "system" ? (system.value ? "dark" : "light") : choice.value));

function stored(): Choice {
  const kept = localStorage.getItem(KEY);
  return kept === "light" || kept === "dark" ? kept : "system";
}

export function choose(wanted: Choice): void {
  choice.value = wanted;
  localStorage.setItem(KEY, wanted);
}

export function applyTheme(): void {
  prefers.addEventListener("change", (event) => (system.value = event.matches));
  theme.subscribe((now) => (document.documentElement.dataset["theme"] = now));
}

/** A color of the theme by name: "accent", "series-1". */
export function color(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
