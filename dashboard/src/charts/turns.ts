// Each chart is drawn in its own task, so that the page stays responsive however many are drawn at once.
import { useEffect, useState } from "preact/hooks";

const waiting = new Set<() => void>();
const channel = new MessageChannel(); // faster than nested timers, which are clamped to 4 ms
channel.port1.onmessage = next;

/** Queue a drawing. The returned function removes it from the queue. */
export function scheduleDraw(draw: () => void): () => void {
  const mine = () => draw();
  waiting.add(mine);
  if (waiting.size === 1) channel.port2.postMessage(null);
  return () => void waiting.delete(mine);
}

function next(): void {
  const [first] = waiting;
  if (!first) return;
  waiting.delete(first);
  try {
    first();
  } finally {
    if (waiting.size) channel.port2.postMessage(null);
  }
}

/** The number of charts to show: first one, then one more per task. */
export function useIncremental(many: number): number {
  const [few, setFew] = useState(1);
  useEffect(() => (few < many ? scheduleDraw(() => setFew(few + 1)) : undefined), [few, many]);
  return few;
}
