// Polling: one poll per path, shared by all components that use it.
// An unchanged response is a 304 (ETag); a hidden tab polls once a minute.
import { type Signal, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";

import { ask, connection, Problem } from "./http";

const HIDDEN_S = 60;
const LOST_S = 3;
const KEPT_MS = 30_000; // an unused response is kept this long

export interface Live<T> {
  /** The newest response; null before the first. It stays while later requests fail. */
  readonly value: T | null;
  /** Why the newest request failed; null if it did not. */
  readonly problem: Problem | null;
  /** Request now. */
  reload(): void;
}

class Feed<T> {
  readonly value: Signal<T | null> = signal(null);
  readonly problem: Signal<Problem | null> = signal(null);
  private watchers = new Map<object, number>();
  private etag: string | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private running: AbortController | null = null;
  private leftAt = Date.now(); // the component that created it watches it next

  constructor(private readonly path: string) {}

  watch(who: object, everyS: number): void {
    this.watchers.set(who, everyS);
    if (this.running) return;
    if (this.watchers.size === 1 || this.timer === undefined) this.now();
  }

  leave(who: object): void {
    this.watchers.delete(who);
    if (this.watchers.size) return;
    this.leftAt = Date.now();
    this.stop();
  }

  /** Abort the running request and the next one. */
  stop(): void {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.running?.abort();
    this.running = null;
  }

  get expired(): boolean {
    return this.watchers.size === 0 && Date.now() - this.leftAt > KEPT_MS;
  }

  now(): void {
    if (!this.watchers.size || this.running || isDeleted(this.path)) return;
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
      this.problem.value = error instanceof Problem ? error : new Problem(0, "unreadable", "The response could not be read.");
    }
    if (this.running !== running) return;
    this.running = null;
    this.later();
  }

  private later(): void {
    if (!this.watchers.size) return;
    const wanted = Math.min(...this.watchers.values());
    const everyS = document.hidden ? Math.max(wanted, HIDDEN_S) : connection.value === "lost" ? Math.max(wanted, LOST_S) : wanted;
    if (Number.isFinite(everyS)) this.timer = setTimeout(() => this.now(), everyS * 1000);
  }
}

const feeds = new Map<string, Feed<unknown>>();
const deleted = new Set<string>();
const isDeleted = (path: string) => [...deleted].some((one) => path.startsWith(one));

function feedOf<T>(path: string): Feed<T> {
  for (const [key, feed] of feeds) if (feed.expired && key !== path) feeds.delete(key);
  let feed = feeds.get(path);
  if (!feed) feeds.set(path, (feed = new Feed(path)));
  return feed as Feed<T>;
}

/** Poll a path every `everyS` seconds while the component is mounted. A null path requests nothing; Infinity requests once. */
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

/** The same for several paths; the responses are in their order. */
export function useLiveAll<T>(paths: readonly string[], everyS = 2): Live<T>[] {
  const all = paths.map((path) => feedOf<T>(path));
  useEffect(() => {
    const who = {};
    for (const feed of all) feed.watch(who, everyS);
    return () => all.forEach((feed) => feed.leave(who));
  }, [paths.join("\n"), everyS]);
  return all.map((feed) => ({ value: feed.value.value, problem: feed.problem.value, reload: () => feed.now() }));
}

/** Refresh every path with this prefix, after the user changed something. */
export function refresh(path = ""): void {
  for (const [key, feed] of feeds) if (key.startsWith(path)) feed.now();
}

/** Run an action that deletes the resource at a path. It and what is under it is no longer polled, unless the action fails. */
export async function deleting<T>(path: string, act: () => Promise<T>): Promise<T> {
  deleted.add(path);
  for (const [key, feed] of feeds) if (key.startsWith(path)) feed.stop();
  try {
    return await act();
  } catch (error) {
    deleted.delete(path);
    refresh(path);
    throw error;
  }
}

addEventListener("visibilitychange", () => document.hidden || refresh());
addEventListener("online", () => refresh());
