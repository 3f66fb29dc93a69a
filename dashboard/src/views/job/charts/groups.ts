// The grouping of metrics into charts. Pure.
import { metricOf, sourcesOf } from "../../../sources";
import { isOfOneRank } from "../ranks";

export interface Group {
  /** Used in the URL. */
  key: string;
  title: string;
  names: string[];
}

const VALIDATION = "validation/";
const SYSTEM = ["throughput/", "system/", "time/", "data/", "padding/"];
const FIRST = ["loss", "accuracy"];
const RANKS = "system/ranks/";
const RATES = ["lr", "lr/"];

/** One chart for a metric and its validation metrics, of each source, one for all learning rates, one for the parts of the step time. */
export function grouped(names: readonly string[]): Group[] {
  const groups = new Map<string, string[]>();
  const sources = sourcesOf(names);
  for (const name of names) {
    if (isOfOneRank(name)) continue; // in a table: a line for each of 64 processes cannot be read
    const key = keyOf(name, sources);
    groups.set(key, [...(groups.get(key) ?? []), name]);
  }
  return [...groups]
    .map(([key, members]) => ({ key, title: titleOf(key), names: members.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b)) }))
    .sort((a, b) => order(a.key) - order(b.key) || a.key.localeCompare(b.key));
}

/** All names in the order of their charts, independent of the order in the response. */
export function inOrder(names: readonly string[]): string[] {
  return grouped(names).flatMap((group) => group.names);
}

function keyOf(name: string, sources: ReadonlySet<string>): string {
  if (name.startsWith("time/")) return "time";
  const spread = /^(system\/ranks\/\w+)_(min|median|max)_s$/.exec(name);
  if (spread) return spread[1]!;
  if (name === "lr" || name.startsWith("lr/")) return "lr";
  return name.startsWith(VALIDATION) ? metricOf(name, sources) : name;
}

const UNITS: [ending: string, unit: string][] = [
  ["_bytes_per_s", "bytes/s"], ["_per_s", "per second"], ["_bytes", "bytes"], ["_percent", "%"],
  ["_celsius", "°C"], ["_watts", "W"],
];

function titleOf(key: string): string {
  if (key === "time") return "step time (s)";
  if (key === "throughput/flops_fraction") return "MFU (model FLOPs utilization)";
  if (key === "lr") return "learning rate";
  if (key === "system/ranks/slowest") return "rank of the slowest process";
  if (key.startsWith(RANKS)) return `${key.slice(RANKS.length)} time of the processes (s)`;
  return isSystem(key) ? inWords(key.slice(key.indexOf("/") + 1)) : key;
}

/** "disk_read_bytes_per_s": "disk read (bytes/s)". The line in the chart has the metric's own name. */
function inWords(name: string): string {
  const found = UNITS.find(([ending]) => name.endsWith(ending));
  const rest = (found ? name.slice(0, -found[0].length) : name).replaceAll("_", " ");
  return found ? `${rest} (${found[1]})` : rest;
}

function rank(name: string): number {
  return name.startsWith(VALIDATION) ? 1 : 0;
}

/** Loss, metrics, learning rates, then system metrics: throughput, machine, time, data. */
function order(key: string): number {
  const first = FIRST.indexOf(key);
  if (first >= 0) return first;
  if (RATES.includes(key)) return 20;
  if (key === "time") return 30 + SYSTEM.indexOf("time/");
  const system = SYSTEM.findIndex((prefix) => key.startsWith(prefix));
  return system >= 0 ? 30 + system : key.startsWith("output_grad_clip/") ? 25 : 10;
}

/** System metrics have no best value. */
export function isSystem(name: string): boolean {
  return SYSTEM.some((prefix) => name.startsWith(prefix));
}
