// Short messages about completed and failed actions.
import { signal } from "@preact/signals";

import { Problem } from "../api/http";

interface Toast { id: number; text: string; bad: boolean }

const toasts = signal<Toast[]>([]);
let next = 1;

export function toast(text: string, bad = false): void {
  const added = { id: next++, text, bad };
  toasts.value = [...toasts.value.slice(-3), added];
  setTimeout(() => (toasts.value = toasts.value.filter((one) => one !== added)), bad ? 12_000 : 5_000);
}

/** Show a message when a promise is settled; undefined if it failed. */
export async function notify<T>(doing: Promise<T>, done?: string): Promise<T | undefined> {
  try {
    const value = await doing;
    if (done) toast(done);
    return value;
  } catch (error) {
    toast(error instanceof Problem ? [error.message, ...error.errors.map((one) => `${one.pointer}: ${one.detail}`)].join(" ") : String(error), true);
    return undefined;
  }
}

export function Toasts() {
  return (
    <div class="toasts" role="status" aria-live="polite">
      {toasts.value.map((one) => <div key={one.id} class={one.bad ? "toast bad" : "toast"}>{one.text}</div>)}
    </div>
  );
}
