// What jobs differ in: the keys of their specs whose values are not the same in all of them.

export type Value = string | number | boolean | null;
export type Flat = Map<string, Value>;

/** Not choices but consequences of when and where a job was submitted. */
const NOT_CHOSEN = [/^name$/, /^labels\./, /^versions\./, /^spec_version$/];

/** A spec's leaves by their paths: `optimizer.args.lr`; layers by their names, not by their places. */
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
  /** One a job, in their order; undefined where the job's spec has no such key. */
  values: (Value | undefined)[];
}

export function differing(specs: Flat[]): Difference[] {
  const keys = new Set(specs.flatMap((spec) => [...spec.keys()]));
  const found: Difference[] = [];
  for (const key of keys) {
    if (NOT_CHOSEN.some((one) => one.test(key))) continue;
    const values = specs.map((spec) => spec.get(key));
    if (values.some((value) => value !== values[0])) found.push({ key, values });
  }
  return found;
}

/** Jobs that have the same values of these keys, by the text that says them. */
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
