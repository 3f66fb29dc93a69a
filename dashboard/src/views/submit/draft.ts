// The spec being edited: one value with two views, form and JSON.
import { type Signal, signal } from "@preact/signals";

import { type Json, setAt } from "../../spec/pointer";

const KEY = "glasshouse-draft";

export class Draft {
  readonly spec: Signal<Json>;
  readonly text: Signal<string>;
  /** Why the text is not valid JSON; the spec is then the last valid one. */
  readonly wrong: Signal<string | null> = signal(null);

  constructor(spec: Json) {
    this.spec = signal(spec);
    this.text = signal(written(spec));
  }

  set(pointer: string, value: Json | undefined): void {
    this.replace(setAt(this.spec.value, pointer, value));
  }

  replace(spec: Json): void {
    this.spec.value = spec;
    this.text.value = written(spec);
    this.wrong.value = null;
    keep(this.text.value);
  }

  /** The user types: the text is kept as typed. */
  write(text: string): void {
    this.text.value = text;
    try {
      this.spec.value = JSON.parse(text) as Json;
      this.wrong.value = null;
      keep(text);
    } catch (error) {
      this.wrong.value = (error as Error).message;
    }
  }
}

const written = (spec: Json) => JSON.stringify(spec, null, 2);

// Keep the draft over a reload of the tab. Without storage (a private window, a full disk) only that is lost.
function keep(text: string): void {
  try {
    sessionStorage.setItem(KEY, text);
  } catch { /* see above */ }
}

export function kept(): Json | null {
  try {
    return JSON.parse(sessionStorage.getItem(KEY) ?? "null") as Json;
  } catch {
    return null;
  }
}

export function forget(): void {
  sessionStorage.removeItem(KEY);
}
