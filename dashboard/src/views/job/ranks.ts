// The times of the processes of a job, from its newest metrics. Pure.
import { num, type Number } from "../../api/types";

/** What is measured in each process, in the order of the columns. */
export const PARTS = ["data", "compute", "collective", "step"] as const;
export type Part = (typeof PARTS)[number];
const OF_ONE = /^system\/ranks\/(\d+)\/(data|compute|collective|step)_s$/;
const SLOW = 0.2; // of a step

export interface RankRow {
  rank: number;
  seconds: Record<Part, number | null>;
}

/** Whether a metric is of one process: shown in the table, not as a chart. */
export function isOfOneRank(name: string): boolean {
  return OF_ONE.test(name);
}

/** A row for each process, by rank. */
export function rankRows(metrics: readonly { name: string; last: Number }[]): RankRow[] {
  const rows = new Map<number, RankRow>();
  for (const { name, last } of metrics) {
    const [, rank, part] = OF_ONE.exec(name) ?? [];
    if (rank === undefined) continue;
    const row = rows.get(+rank) ?? { rank: +rank, seconds: { data: null, compute: null, collective: null, step: null } };
    row.seconds[part as Part] = num(last);
    rows.set(+rank, row);
  }
  return [...rows.values()].sort((a, b) => a.rank - b.rank);
}

/** The time in which a process does not wait for others. */
export function ownTime(row: RankRow): number {
  return (row.seconds.data ?? 0) + (row.seconds.compute ?? 0);
}

/** The process that keeps the others waiting, and for which fraction of a step: its own time beyond the median of theirs. */
export function straggler(rows: readonly RankRow[]): { rank: number; share: number } | null {
  if (rows.length < 2) return null;
  const slowest = rows.reduce((a, b) => (ownTime(b) > ownTime(a) ? b : a));
  const extra = ownTime(slowest) - spread(rows.filter((one) => one !== slowest).map(ownTime)).median;
  const share = extra / (slowest.seconds.step || Infinity);
  return share >= SLOW ? { rank: slowest.rank, share } : null;
}

export function spread(values: readonly number[]): { min: number; median: number; max: number } {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  const median = sorted.length % 2 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
  return { min: sorted[0]!, median, max: sorted.at(-1)! };
}
