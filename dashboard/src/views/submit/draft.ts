// The spec that is being written: one value with two views, the form and its text.
import { type Signal, signal } from "@preact/signals";

import { type Json, setAt } from "../../spec/pointer";

const KEY = "glasshouse-draft";

export class Draft {
  readonly spec: Signal<Json>;
  readonly text: Signal<string>;
  /** Why the text is no JSON; the spec is then the last one that could be read. */
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

  /** Somebody types: the text stays as it is typed. */
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

// A reload of the tab shall lose nothing. No storage (a private window, a full disk) loses it, and nothing else.
function keep(text: string): void {
  try {
    sessionStorage.setItem(KEY, text);
  } catch { /* said above */ }
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
