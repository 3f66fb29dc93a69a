// The spec as a command that runs as is. It has no key; it uses $GLASSHOUSE_API_KEY.
import { isObject, type Json } from "./pointer";

export type Tool = "curl" | "Python" | "CLI";
export const TOOLS: readonly Tool[] = ["curl", "Python", "CLI"];

export function snippet(tool: Tool, spec: Json, url: string): string {
  const write = { curl, Python: python, CLI: cli }[tool];
  return write(spec, url);
}

// A here-document with a quoted delimiter expands nothing, and no line of JSON is just "JSON".
function curl(spec: Json, url: string): string {
  return [
    `curl -sS --fail-with-body ${quoted(`${url}/api/v1/jobs`)} \\`,
    `  -H "Authorization: Bearer $GLASSHOUSE_API_KEY" \\`,
    `  -H 'Content-Type: application/json' -d @- <<'JSON'`,
    JSON.stringify(spec, null, 2),
    "JSON",
    "",
  ].join("\n");
}

function cli(spec: Json, url: string): string {
  return [`GLASSHOUSE_URL=${quoted(url)} glasshouse submit - --watch <<'JSON'`, JSON.stringify(spec, null, 2), "JSON", ""].join("\n");
}

function python(spec: Json, url: string): string {
  return [
    "import glasshouse as gh",
    "",
    `client = gh.Client(${literal(url)})  # the key: $GLASSHOUSE_API_KEY`,
    `job = client.jobs.create(${literal(spec)})`,
    "print(job.id)",
    "job.wait(progress=True)",
    "",
  ].join("\n");
}

/** Quote for a POSIX shell. */
export function quoted(text: string): string {
  return /^[A-Za-z0-9_./:@%+=-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

/** A JSON value as a Python literal. */
export function literal(value: Json, indent = ""): string {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return text(value);
  if (typeof value === "number") return String(value);
  const entries = isObject(value) ? Object.entries(value).map(([key, one]) => [`${text(key)}: `, one] as const) : value.map((one) => ["", one] as const);
  const [open, close] = isObject(value) ? "{}" : "[]";
  const flat = `${open}${entries.map(([key, one]) => key + literal(one)).join(", ")}${close}`;
  if (!flat.includes("\n") && flat.length + indent.length <= 88) return flat;
  const inner = `${indent}    `;
  return `${open}\n${entries.map(([key, one]) => `${inner}${key}${literal(one, inner)},\n`).join("")}${indent}${close}`;
}

/** JSON strings are Python strings, except surrogate pairs, which JSON.stringify does not escape. */
function text(value: string): string {
  return JSON.stringify(value).replaceAll("\u007f", "\\u007f");
}
