// Values typed in one line: 0.01, same, 3, 3 and [3, 3], true, null.
import { type Json, same } from "./pointer";

/** JSON, a comma-separated list of numbers, or else the text itself. Empty text is undefined. */
export function readLoose(text: string): Json | undefined {
  const trimmed = text.trim();
  if (trimmed === "") return undefined;
  return parsed(trimmed) ?? numbers(trimmed) ?? (trimmed === "null" ? null : trimmed);
}

function parsed(text: string): Json | undefined {
  try {
    return JSON.parse(text) as Json;
  } catch {
    return undefined;
  }
}

function numbers(text: string): Json | undefined {
  const inner = /^\((.*)\)$/.exec(text)?.[1] ?? text;
  const values = inner.split(",").map((one) => one.trim()).filter((one, at, all) => one !== "" || at < all.length - 1);
  const isList = inner.includes(",") && values.every((one) => one !== "" && Number.isFinite(+one));
  return isList ? values.map(Number) : undefined;
}

/** The inverse of `readLoose`. */
export function writeLoose(value: Json | undefined): string {
  if (value === undefined) return "";
  if (typeof value === "string" && same(readLoose(value), value)) return value;
  if (Array.isArray(value) && value.length > 1 && value.every((one) => typeof one === "number")) return value.join(", ");
  return JSON.stringify(value);
}

/** A number; other text is kept, so that the service can report it. */
export function readNumber(text: string): Json | undefined {
  const trimmed = text.trim();
  if (trimmed === "") return undefined;
  return Number.isFinite(+trimmed) ? +trimmed : trimmed;
}

/** "a, b" → ["a", "b"]; numbers if `numeric` and they can be parsed. */
export function readList(text: string, numeric: boolean): Json[] | undefined {
  const parts = text.split(",").map((one) => one.trim()).filter((one) => one !== "");
  if (!parts.length) return undefined;
  return parts.map((one) => (numeric ? readNumber(one)! : one));
}

export function writeList(value: Json | undefined): string {
  if (!Array.isArray(value)) return value === undefined || value === null ? "" : writeLoose(value);
  return value.map((one) => (typeof one === "string" ? one : writeLoose(one))).join(", ");
}
