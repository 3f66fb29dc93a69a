// Values as people write them in one line: 0.01, same, 3, 3 and [3, 3], true, null.
import { type Json, same } from "./pointer";

/** JSON; or plain values with commas between, a list; or else the text itself. Nothing is undefined. */
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

/** So that `readLoose` gives it back. */
export function writeLoose(value: Json | undefined): string {
  if (value === undefined) return "";
  if (typeof value === "string" && same(readLoose(value), value)) return value;
  if (Array.isArray(value) && value.length > 1 && value.every((one) => typeof one === "number")) return value.join(", ");
  return JSON.stringify(value);
}

/** A number; what is none stays the text, so that the service can say what it wants instead. */
export function readNumber(text: string): Json | undefined {
  const trimmed = text.trim();
  if (trimmed === "") return undefined;
  return Number.isFinite(+trimmed) ? +trimmed : trimmed;
}

/** "a, b" → ["a", "b"]; numbers where numbers are wanted and it can be. */
export function readList(text: string, numeric: boolean): Json[] | undefined {
  const parts = text.split(",").map((one) => one.trim()).filter((one) => one !== "");
  if (!parts.length) return undefined;
  return parts.map((one) => (numeric ? readNumber(one)! : one));
}

export function writeList(value: Json | undefined): string {
  if (!Array.isArray(value)) return value === undefined || value === null ? "" : writeLoose(value);
  return value.map((one) => (typeof one === "string" ? one : writeLoose(one))).join(", ");
}
