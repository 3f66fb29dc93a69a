// Which metrics belong into one chart. Pure.

export interface Group {
  /** Stands in the address. */
  key: string;
  title: string;
  names: string[];
}

const VALIDATION = "validation/";
const UPKEEP = ["throughput/", "system/", "time/", "data/", "padding/"];
const FIRST = ["loss", "accuracy"];
const RATES = ["lr", "lr/"];

/** One chart for a metric with its validation, for the rates together, for the parts of a step's time together. */
export function grouped(names: readonly string[]): Group[] {
  const groups = new Map<string, string[]>();
  for (const name of names) {
    const key = keyOf(name);
    groups.set(key, [...(groups.get(key) ?? []), name]);
  }
  return [...groups]
    .map(([key, members]) => ({ key, title: titleOf(key), names: members.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b)) }))
    .sort((a, b) => order(a.key) - order(b.key) || a.key.localeCompare(b.key));
}

/** All names in the order of their charts: the same whatever order the service gives them in. */
export function inOrder(names: readonly string[]): string[] {
  return grouped(names).flatMap((group) => group.names);
}

function keyOf(name: string): string {
  if (name.startsWith("time/")) return "time";
  if (name === "lr" || name.startsWith("lr/")) return "lr";
  return name.startsWith(VALIDATION) ? name.slice(VALIDATION.length) : name;
}

const UNITS: [ending: string, unit: string][] = [
  ["_bytes_per_s", "bytes/s"], ["_per_s", "per second"], ["_bytes", "bytes"], ["_percent", "%"],
  ["_celsius", "°C"], ["_watts", "W"], ["_fraction", "fraction of the peak"],
];

function titleOf(key: string): string {
  if (key === "time") return "time of a step (s)";
  if (key === "lr") return "learning rate";
  return isUpkeep(key) ? inWords(key.slice(key.indexOf("/") + 1)) : key;
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

/** Loss, metrics, rates, then what is about the running: throughput, machine, time, data. */
function order(key: string): number {
  const first = FIRST.indexOf(key);
  if (first >= 0) return first;
  if (RATES.includes(key)) return 20;
  if (key === "time") return 30 + UPKEEP.indexOf("time/");
  const upkeep = UPKEEP.findIndex((prefix) => key.startsWith(prefix));
  return upkeep >= 0 ? 30 + upkeep : key.startsWith("output_grad_clip/") ? 25 : 10;
}

/** Metrics that are about the job's running: nobody looks for their best value. */
export function isUpkeep(name: string): boolean {
  return UPKEEP.some((prefix) => name.startsWith(prefix));
}
