// JSON values and JSON pointers (RFC 6901). Nothing is changed in place.
export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };
export type JsonObject = { [key: string]: Json };

export function isObject(value: unknown): value is JsonObject {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** "/a/b~1c/0" → ["a", "b/c", "0"] */
export function partsOf(pointer: string): string[] {
  return pointer === "" ? [] : pointer.slice(1).split("/").map((part) => part.replaceAll("~1", "/").replaceAll("~0", "~"));
}

/** The pointer of a child. */
export function under(pointer: string, key: string | number): string {
  return `${pointer}/${String(key).replaceAll("~", "~0").replaceAll("/", "~1")}`;
}

/** The pointer of the parent; null for the root. */
export function above(pointer: string): string | null {
  return pointer === "" ? null : pointer.slice(0, pointer.lastIndexOf("/"));
}

/** The value at a pointer; undefined if there is none. */
export function getAt(value: Json | undefined, pointer: string): Json | undefined {
  for (const key of partsOf(pointer)) value = childOf(value, key);
  return value;
}

function childOf(value: Json | undefined, key: string): Json | undefined {
  if (Array.isArray(value)) return /^\d+$/.test(key) ? value[+key] : undefined;
  return isObject(value) && Object.hasOwn(value, key) ? value[key] : undefined;
}

/** The whole with another value at a pointer; undefined removes it. Missing parents are created as objects. */
export function setAt(whole: Json | undefined, pointer: string, value: Json | undefined): Json {
  return put(whole, partsOf(pointer), value) ?? null;
}

function put(whole: Json | undefined, [key, ...rest]: string[], value: Json | undefined): Json | undefined {
  if (key === undefined) return value;
  const child = put(childOf(whole, key), rest, value);
  if (Array.isArray(whole)) return withItem(whole, +key, child);
  const known = isObject(whole) ? whole : {};
  // Spreading keeps the order of the keys, so that the JSON text does not jump.
  if (child !== undefined) return { ...known, [key]: child };
  return Object.fromEntries(Object.entries(known).filter(([name]) => name !== key));
}

function withItem(list: Json[], at: number, item: Json | undefined): Json[] {
  const others = [...list];
  if (item === undefined) others.splice(at, 1);
  else others[Math.min(at, list.length)] = item;
  return others;
}

/** Whether two values are equal, ignoring the order of keys. */
export function same(a: Json | undefined, b: Json | undefined): boolean {
  if (Array.isArray(a) && Array.isArray(b)) return a.length === b.length && a.every((one, at) => same(one, b[at]));
  if (isObject(a) && isObject(b)) {
    const keys = Object.keys(a);
    return keys.length === Object.keys(b).length && keys.every((key) => Object.hasOwn(b, key) && same(a[key], b[key]));
  }
  return a === b;
}
