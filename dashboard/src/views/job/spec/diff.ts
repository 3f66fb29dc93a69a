// The differences between two specs, by path. Pure.

export interface Difference {
  path: string;
  before: unknown;
  after: unknown;
}

const isObject = (value: unknown): value is Record<string, unknown> => typeof value === "object" && value !== null && !Array.isArray(value);

/** The leaves that differ; undefined if one side has none. Lists of objects with names are compared by name. */
export function differences(before: unknown, after: unknown, path = ""): Difference[] {
  const [a, b] = [byName(before), byName(after)];
  if (isObject(a) && isObject(b)) {
    const keys = [...new Set([...Object.keys(a), ...Object.keys(b)])];
    return keys.flatMap((key) => differences(a[key], b[key], path ? `${path}.${key}` : key));
  }
  return JSON.stringify(before) === JSON.stringify(after) ? [] : [{ path, before, after }];
}

function byName(value: unknown): unknown {
  if (!Array.isArray(value) || !value.length) return value;
  const names = value.map((one) => (isObject(one) ? one["name"] : undefined));
  const named = names.every((name) => typeof name === "string") && new Set(names).size === names.length;
  return named ? Object.fromEntries(value.map((one, place) => [names[place], one])) : value;
}
