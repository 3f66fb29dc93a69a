// Drawing takes turns: each chart in a task of its own, so that however many are drawn at once, the page answers in between.
import { useEffect, useState } from "preact/hooks";

const waiting = new Set<() => void>();
const bell = new MessageChannel(); // sooner than a timer, which waits 4 ms after a few
bell.port1.onmessage = next;

/** Do it soon, behind what waits already. The function that comes back takes it back. */
export function inTurn(draw: () => void): () => void {
  const mine = () => draw();
  waiting.add(mine);
  if (waiting.size === 1) bell.port2.postMessage(null);
  return () => void waiting.delete(mine);
}

function next(): void {
  const [first] = waiting;
  if (!first) return;
  waiting.delete(first);
  try {
    first();
  } finally {
    if (waiting.size) bell.port2.postMessage(null);
  }
}

/** How many of so many charts are there yet: at first one, then one more each turn. */
export function useOneByOne(many: number): number {
  const [few, setFew] = useState(1);
  useEffect(() => (few < many ? inTurn(() => setFew(few + 1)) : undefined), [few, many]);
  return few;
}
