// What is shown is asked for again and again: one poll for each path, however many look at it.
// An answer that has not changed costs a 304 (ETag); a tab that nobody sees asks once a minute.
import { type Signal, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";

import { ask, connection, Problem } from "./http";

const HIDDEN_S = 60;
const LOST_S = 3;
const KEPT_MS = 30_000; // an answer that nobody looks at any more, for who comes back

export interface Live<T> {
  /** The newest answer; null before the first. It stays while later requests fail. */
  readonly value: T | null;
  /** Why the newest request failed; null where it did not. */
  readonly problem: Problem | null;
  /** Ask now. */
  reload(): void;
}

class Feed<T> {
  readonly value: Signal<T | null> = signal(null);
  readonly problem: Signal<Problem | null> = signal(null);
  private wishes = new Map<object, number>();
  private etag: string | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private running: AbortController | null = null;
  private leftAt = Date.now(); // made by a component that is about to watch it

  constructor(private readonly path: string) {}

  watch(who: object, everyS: number): void {
    this.wishes.set(who, everyS);
    if (this.running) return;
    if (this.wishes.size === 1 || this.timer === undefined) this.now();
  }

  leave(who: object): void {
    this.wishes.delete(who);
    if (this.wishes.size) return;
    this.leftAt = Date.now();
    this.stop();
  }

  /** What is on its way is of something that may be gone before it comes. */
  stop(): void {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.running?.abort();
    this.running = null;
  }

  get forgotten(): boolean {
    return this.wishes.size === 0 && Date.now() - this.leftAt > KEPT_MS;
  }

  now(): void {
    if (!this.wishes.size || this.running || isGone(this.path)) return;
    clearTimeout(this.timer);
    this.timer = undefined;
    void this.poll();
  }

  private async poll(): Promise<void> {
    const running = (this.running = new AbortController());
    try {
      const headers: Record<string, string> = this.etag ? { "If-None-Match": this.etag } : {};
      const answer = await ask(this.path, { headers, signal: running.signal });
      if (answer.status !== 304) {
        const value = (await answer.json()) as T;
        this.etag = answer.headers.get("etag");
        this.value.value = value;
      }
      this.problem.value = null;
    } catch (error) {
      if (running.signal.aborted) return;
      this.problem.value = error instanceof Problem ? error : new Problem(0, "unreadable", "The answer could not be read.");
    }
    if (this.running !== running) return;
    this.running = null;
    this.later();
  }

  private later(): void {
    if (!this.wishes.size) return;
    const wished = Math.min(...this.wishes.values());
    const everyS = document.hidden ? Math.max(wished, HIDDEN_S) : connection.value === "lost" ? Math.max(wished, LOST_S) : wished;
    if (Number.isFinite(everyS)) this.timer = setTimeout(() => this.now(), everyS * 1000);
  }
}

const feeds = new Map<string, Feed<unknown>>();
const gone = new Set<string>();
const isGone = (path: string) => [...gone].some((one) => path.startsWith(one));

function feedOf<T>(path: string): Feed<T> {
  for (const [key, feed] of feeds) if (feed.forgotten && key !== path) feeds.delete(key);
  let feed = feeds.get(path);
  if (!feed) feeds.set(path, (feed = new Feed(path)));
  return feed as Feed<T>;
}

/** Ask for a path every so many seconds while the component is there. A null path asks nothing; Infinity asks once. */
export function useLive<T>(path: string | null, everyS = 2): Live<T> {
  const feed = path === null ? null : feedOf<T>(path);
  useEffect(() => {
    if (!feed) return;
    const who = {};
    feed.watch(who, everyS);
    return () => feed.leave(who);
  }, [feed, everyS]);
  return {
    value: feed?.value.value ?? null,
    problem: feed?.problem.value ?? null,
    reload: () => feed?.now(),
  };
}

/** The same for several paths at once; the answers in their order. */
export function useLiveAll<T>(paths: readonly string[], everyS = 2): Live<T>[] {
  const all = paths.map((path) => feedOf<T>(path));
  useEffect(() => {
    const who = {};
    for (const feed of all) feed.watch(who, everyS);
    return () => all.forEach((feed) => feed.leave(who));
  }, [paths.join("\n"), everyS]);
  return all.map((feed) => ({ value: feed.value.value, problem: feed.problem.value, reload: () => feed.now() }));
}

/** Ask again now for everything that begins with this path: something was changed by hand. */
export function refresh(path = ""): void {
  for (const [key, feed] of feeds) if (key.startsWith(path)) feed.now();
}

/** Do what deletes the thing at a path. Nobody asks for it, or for what is under it, from now on; but where it fails. */
export async function deleting<T>(path: string, act: () => Promise<T>): Promise<T> {
  gone.add(path);
  for (const [key, feed] of feeds) if (key.startsWith(path)) feed.stop();
  try {
    return await act();
  } catch (error) {
    gone.delete(path);
    refresh(path);
    throw error;
  }
}

addEventListener("visibilitychange", () => document.hidden || refresh());
addEventListener("online", () => refresh());
