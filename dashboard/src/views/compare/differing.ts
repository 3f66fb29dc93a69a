// The differences between jobs: the keys of their specs whose values are not equal in all of them.

export type Value = string | number | boolean | null;
export type Flat = Map<string, Value>;

/** Not settings: names, labels and versions. */
const IGNORED = [/^name$/, /^labels\./, /^versions\./, /^spec_version$/];

/** The leaves of a spec by path, such as `optimizer.args.lr`; layers by name, not by index. */
export function flatten(spec: unknown, path = "", into: Flat = new Map()): Flat {
  if (Array.isArray(spec)) spec.forEach((item, place) => flatten(item, `${path}${named(item) ? `.${named(item)}` : `[${place}]`}`, into));
  else if (spec !== null && typeof spec === "object")
    for (const [key, value] of Object.entries(spec)) flatten(value, path ? `${path}.${key}` : key, into);
  else into.set(path, spec as Value);
  return into;
}

function named(item: unknown): string | null {
  const name = item !== null && typeof item === "object" ? (item as Record<string, unknown>)["name"] : null;
  return typeof name === "string" ? name : null;
}

export interface Difference {
  key: string;
  /** One per job, in order; undefined if the job's spec has no such key. */
  values: (Value | undefined)[];
}

export function differing(specs: Flat[]): Difference[] {
  const keys = new Set(specs.flatMap((spec) => [...spec.keys()]));
  const found: Difference[] = [];
  for (const key of keys) {
    if (IGNORED.some((one) => one.test(key))) continue;
    const values = specs.map((spec) => spec.get(key));
    if (values.some((value) => value !== values[0])) found.push({ key, values });
  }
  return found;
}

/** Indices of jobs grouped by their values of these keys; the group's name lists the values. */
export function groupsBy(keys: string[], specs: Flat[]): Map<string, number[]> {
  const groups = new Map<string, number[]>();
  specs.forEach((spec, job) => {
    const text = keys.map((key) => `${key.split(".").pop()} = ${shown(spec.get(key))}`).join(", ") || "all";
    groups.set(text, [...(groups.get(text) ?? []), job]);
  });
  return groups;
}

export function shown(value: Value | undefined): string {
  return value === undefined ? "–" : value === null ? "null" : String(value);
}
