// Light or dark: as the system says, until somebody chooses.
import { computed, signal } from "@preact/signals";

export type Choice = "system" | "light" | "dark";

const KEY = "glasshouse-theme";
const prefers = matchMedia("(prefers-color-scheme: dark)");
const system = signal(prefers.matches);
export const choice = signal<Choice>(stored());
/** Charts read it, so that they are drawn again in the other colours. */
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

/** A colour of the theme by its name: "accent", "series-1". */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
