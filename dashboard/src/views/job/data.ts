// The requests of a job's views: series, events by cursor, and the epoch and time of a step.
import { signal } from "@preact/signals";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { get, type Problem, withQuery } from "../../api/http";
import { type Live, useLive } from "../../api/live";
import { ended, type Job, num, type Number, type Page } from "../../api/types";
import { between, epochLadder, ladder, type Series } from "../../charts/series";

export const MAX_POINTS = 1000;
const AGAIN_MS = 3000;
const RESTING = new Set<Job["state"]>(["queued", "paused"]);

export interface Metric {
  name: string;
  last: Number;
  last_step: number;
  min: Number | null;
  max: Number | null;
  count: number;
  first_nonfinite_step: number | null;
}

export interface Columns {
  step: number[];
  epoch: number[];
  values: Record<string, (Number | null)[]>;
}

export interface Logged {
  job: string;
  seq: number;
  attempt: number;
  at: string;
  type: string;
  [field: string]: unknown;
}

/** The polling interval: never for an ended job, longer for a queued or paused one. */
export function pollEvery(job: Job, everyS = 2): number {
  if (ended(job)) return Infinity;
  return RESTING.has(job.state) ? 4 * everyS : everyS;
}

export function useMetrics(job: Job): Live<Page<Metric>> {
  return useLive<Page<Metric>>(`jobs/${job.id}/metrics`, pollEvery(job, 3));
}

/** The metrics in the job's summary, shown until their list has loaded. */
export function summaryMetrics(job: Job): Metric[] {
  const step = Number(job.progress?.["step"] ?? 0);
  return Object.entries(job.summary).map(([name, one]) => ({
    name,
    last: one["last"] ?? "NaN",
    last_step: step,
    min: one["min"] ?? null,
    max: one["max"] ?? null,
    count: name.startsWith("validation/") ? 1 : step + 1,
    first_nonfinite_step: num(one["first_nonfinite_step"]),
  }));
}

/** A longer interval for many points: the service takes seconds to read a million. */
function pollInterval(everyS: number, points: number): number {
  return Math.min(60, everyS + Math.floor(points / 100_000) * 5);
}

export type Steps = readonly [from: number, to: number];

/** The columns of some metrics. The previous ones stay until new ones have loaded. */
export function useColumns(job: Job, metrics: readonly Metric[], range: Steps | null, visible: boolean): { columns: Columns | null; problem: Problem | null } {
  const query = { name: metrics.map((one) => one.name), from_step: range?.[0], to_step: range?.[1], max_points: MAX_POINTS };
  const wanted = visible && metrics.length ? withQuery(`jobs/${job.id}/metrics/query`, query) : null;
  const [answered, setAnswered] = useState<string | null>(null);
  const first = wanted !== null && answered !== wanted;
  const turn = useQueueSlot(first);
  const points = Math.max(0, ...metrics.map((one) => one.count));
  const live = useLive<Columns>(!first || turn ? wanted : null, pollEvery(job, pollInterval(2, points)));
  useEffect(() => {
    if (live.value || live.problem) setAnswered(wanted);
  }, [live.value, live.problem, wanted]);
  const kept = useRef<Columns | null>(null);
  if (live.value) kept.current = live.value;
  return { columns: kept.current, problem: live.problem };
}

const MAX_CONCURRENT = 2;
const waiting = signal<readonly object[]>([]);

/** A browser opens at most six connections per host: initial chart requests take turns, so that the job's state does not queue behind them. */
function useQueueSlot(waits: boolean): boolean {
  const me = useRef<object>({}).current;
  useEffect(() => {
    if (!waits) return;
    waiting.value = [...waiting.peek(), me];
    return () => void (waiting.value = waiting.peek().filter((one) => one !== me));
  }, [waits]);
  return waiting.value.slice(0, MAX_CONCURRENT).includes(me);
}

/** A metric of the columns as a series over steps. */
export function seriesOf(columns: Columns, metric: Metric, range: Steps | null, label = metric.name): Series {
  const xs: number[] = [];
  const ys: number[] = [];
  (columns.values[metric.name] ?? []).forEach((value, place) => {
    if (value === null) return;
    xs.push(columns.step[place]!);
    ys.push(num(value)!);
  });
  return { label, xs, ys, thinned: expected(metric, range) > MAX_POINTS };
}

/** The expected number of points in a range, if they are evenly spaced. */
function expected(metric: Metric, range: Steps | null): number {
  if (!range) return metric.count;
  const part = (Math.min(range[1], metric.last_step) - range[0] + 1) / (metric.last_step + 1);
  return metric.count * Math.max(0, part);
}

/** The items so far, oldest first; new ones are appended. */
export interface Growing<T> {
  items: T[];
  problem: Problem | null;
  loading: boolean;
}

const NOTHING = { items: [], problem: null, loading: true };

/** Items that grow with a job's log: `read` advances the cursor and passes what it finds to `put`; `keep` bounds the items. A new key starts over. */
export function useGrowing<T, A>(job: Job, key: string, first: A, read: (cursor: { after: A }, put: (found: T[]) => void) => Promise<void>, keep: (items: T[]) => T[]): Growing<T> {
  const [state, setState] = useState<Growing<T>>(NOTHING);
  const cursor = useRef({ key, after: first, asked: -1, busy: false });
  if (cursor.current.key !== key) cursor.current = { key, after: first, asked: -1, busy: false };
  useEffect(() => setState(NOTHING), [key]);
  useEffect(() => {
    const mine = cursor.current;
    if (mine.busy || mine.asked === job.last_seq) return;
    mine.busy = true;
    const seen = job.last_seq;
    void read(mine, (found) => {
      if (cursor.current !== mine) return;
      setState((was) => ({ items: found.length ? keep([...was.items, ...found]) : was.items, problem: null, loading: false }));
    })
      .then(() => Object.assign(mine, { asked: seen, busy: false }))
      .catch((problem: Problem) => {
        if (cursor.current === mine) setState((was) => ({ ...was, problem, loading: false }));
        if (problem.status === 422) return; // the same request is refused again
        setTimeout(() => {
          mine.busy = false;
          if (cursor.current === mine) setState((was) => ({ ...was }));
        }, AGAIN_MS);
      });
  });
  return state;
}

/** The newest events of some types; new ones are appended. */
export function useEvents(job: Job, types: string, from = 0): Growing<Logged> {
  return useEventsAs<Logged>(job, types, from, (event) => [event], newest);
}

export const MOST_EVENTS = 10_000;
const newest = (events: Logged[]) => events.slice(-MOST_EVENTS);

/** The same, keeping only what `made` returns for each: a day may have a hundred thousand events. */
export function useEventsAs<T>(job: Job, types: string, from: number, made: (event: Logged) => T[], keep: (items: T[]) => T[]): Growing<T> {
  return useGrowing<T, number>(job, `${job.id} ${types} ${from}`, from, async (cursor, put) => {
    const seen = job.last_seq;
    await readOn(job, types, cursor, (found) => put(found.flatMap(made)));
    // Everything up to the log's last number is read: the next request starts after it.
    cursor.after = Math.max(cursor.after, seen);
  }, keep);
}

async function readOn(job: Job, types: string, cursor: { after: number }, put: (found: Logged[]) => void): Promise<void> {
  for (let more = true; more; ) {
    const page = await get<Page<Logged>>(withQuery(`jobs/${job.id}/events`, { types, after: cursor.after, limit: 1000 }));
    cursor.after = page.has_more && page.next ? +page.next : (page.data.at(-1)?.seq ?? cursor.after);
    more = page.has_more;
    put(page.data);
  }
}

/** Convert steps to positions on the axis, and back. */
export interface Axis {
  name: "step" | "epoch" | "time";
  of(step: number): number;
  steps(x: number): number;
  ready: boolean;
  note: string | null;
}

const STEPS: Axis = { name: "step", of: (step) => step, steps: (x) => x, ready: true, note: null };

export function useAxis(job: Job, name: string | null): Axis {
  const columns = useLive<Columns>(name === "epoch" ? withQuery(`jobs/${job.id}/metrics/query`, { name: ["loss"], max_points: MAX_POINTS }) : null, pollEvery(job, 5)).value;
  const anchors = useAnchors(job, name === "time");
  return useMemo(() => {
    if (name === "epoch") return axisOf("epoch", columns ? epochLadder(columns.step, columns.epoch, null) : [[], []], null);
    if (name === "time") return axisOf("time", ladder(anchors.map((one) => [one.step, one.at] as const)), TIME_NOTE);
    return STEPS;
  }, [name, columns, anchors]);
}

const TIME_NOTE = "Times are read from the log at some steps and interpolated between them.";

function axisOf(name: Axis["name"], [xs, ys]: [number[], number[]], note: string | null): Axis {
  if (xs.length < 2) return { ...STEPS, name, ready: false };
  return { name, note, ready: true, of: (step) => between(xs, ys, step), steps: (x) => between(ys, xs, x) };
}

interface Anchor { seq: number; step: number; at: number }
const ANCHORS = 40;

/** The times of some steps, from the log: spread over it, and repeatedly the newest. */
function useAnchors(job: Job, wanted: boolean): Anchor[] {
  const [anchors, setAnchors] = useState<Anchor[]>([]);
  const state = useRef({ seq: 0, busy: false, at: 0 });
  useEffect(() => {
    const mine = state.current;
    const fresh = mine.seq === 0;
    const due = fresh || ended(job) || performance.now() - mine.at > 4000;
    if (!wanted || mine.busy || mine.seq >= job.last_seq || !due) return;
    const seqs = fresh ? spread(job.last_seq) : [Math.max(mine.seq, job.last_seq - 20)];
    Object.assign(mine, { busy: true, seq: job.last_seq, at: performance.now() });
    void Promise.all(seqs.map((seq) => anchorAfter(job.id, seq)))
      .then((found) => setAnchors((was) => [...was, ...found.flat()]))
      .catch(() => (mine.seq = fresh ? 0 : mine.seq))
      .finally(() => (mine.busy = false));
  });
  return anchors;
}

/** The positions to read in a log of this length: evenly spaced, and at its end. */
function spread(last: number): number[] {
  const places = Array.from({ length: ANCHORS }, (_, place) => Math.floor((place * last) / ANCHORS));
  return [...new Set([...places, Math.max(0, last - 20), Math.max(0, last - 5)])];
}

async function anchorAfter(job: string, seq: number): Promise<Anchor[]> {
  const page = await get<Page<Logged>>(withQuery(`jobs/${job}/events`, { types: "metrics", after: seq, limit: 1 }));
  return page.data.filter((one) => one.type === "metrics").map((one) => ({ seq: one.seq, step: one["step"] as number, at: Date.parse(one.at) / 1000 }));
}
