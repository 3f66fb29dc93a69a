// Short words about what was just done, or could not be.
import { signal } from "@preact/signals";

import { Problem } from "../api/http";

interface Toast { id: number; text: string; bad: boolean }

const toasts = signal<Toast[]>([]);
let next = 1;

export function say(text: string, bad = false): void {
  const toast = { id: next++, text, bad };
  toasts.value = [...toasts.value.slice(-3), toast];
  setTimeout(() => (toasts.value = toasts.value.filter((one) => one !== toast)), bad ? 12_000 : 5_000);
}

/** Do something and say how it went; undefined where it failed. */
export async function tell<T>(doing: Promise<T>, done?: string): Promise<T | undefined> {
  try {
    const value = await doing;
    if (done) say(done);
    return value;
  } catch (error) {
    say(error instanceof Problem ? [error.message, ...error.errors.map((one) => `${one.pointer}: ${one.detail}`)].join(" ") : String(error), true);
    return undefined;
  }
}

export function Toasts() {
  return (
    <div class="toasts" role="status" aria-live="polite">
      {toasts.value.map((toast) => <div key={toast.id} class={toast.bad ? "toast bad" : "toast"}>{toast.text}</div>)}
    </div>
  );
}
