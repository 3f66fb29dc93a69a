// The form fields of a JSON Schema: kind of input, options, defaults and help. Independent of the UI.
import { isObject, type Json, type JsonObject, same } from "./pointer";

export type Schema = JsonObject;

interface Words {
  title: string;
  help: string;
  /** Null is allowed. */
  nullable: boolean;
  /** The default; undefined if the schema has none. */
  fallback: Json | undefined;
}
export interface Property { name: string; field: Field; required: boolean }
export type Field = Words &
  (
    | { kind: "text" | "integer" | "number" | "switch" }
    /** One of these values; a single one is fixed, and distinguishes variants. */
    | { kind: "choice"; options: Json[] }
    /** A list of plain values, comma-separated. */
    | { kind: "plain list"; item: Field }
    | { kind: "list"; item: Field; least: number }
    | { kind: "group"; properties: Property[] }
    /** Entries with arbitrary names. */
    | { kind: "map"; item: Field }
    | { kind: "variants"; variants: Field[] }
    /** Anything, as JSON. */
    | { kind: "json" }
  );

/** The targets of `$ref`s: `#/components/schemas/Name` and `#/$defs/Name`. */
export type Definitions = Record<string, Schema>;

const PLAIN = new Set(["text", "integer", "number", "choice"]);

/** The field of a schema. Nested fields are created on access: schemas may contain themselves. */
export function fieldOf(schema: Schema, definitions: Definitions = {}): Field {
  const { schema: full, nullable } = withoutNull(resolved(schema, definitions), definitions);
  const words: Words = {
    title: typeof full["title"] === "string" ? full["title"] : "",
    help: typeof full["description"] === "string" ? full["description"].replaceAll("``", "`") : "",
    nullable,
    fallback: full["default"],
  };
  return Object.assign(shapeOf(full, definitions), words) as Field; // spreading would access nested fields
}

function resolved(schema: Schema, definitions: Definitions): Schema {
  const { $ref, ...own } = schema;
  if (typeof $ref !== "string") return schema;
  const found = definitions[$ref.slice($ref.lastIndexOf("/") + 1)];
  return found ? { ...resolved(found, definitions), ...own } : own;
}

/** Null among the alternatives makes a field nullable; it is not a variant. */
function withoutNull(schema: Schema, definitions: Definitions): { schema: Schema; nullable: boolean } {
  const { anyOf, ...own } = schema;
  if (Array.isArray(anyOf)) {
    const others = (anyOf as Schema[]).filter((one) => one["type"] !== "null");
    const nullable = others.length < anyOf.length;
    if (others.length > 1) return { schema: { ...own, anyOf: others }, nullable };
    return { schema: { ...resolved(others[0] ?? {}, definitions), ...own }, nullable };
  }
  if (!Array.isArray(schema["type"])) return { schema, nullable: false };
  const types = schema["type"].filter((one) => one !== "null");
  const type = types.length === 1 ? types[0]! : types;
  return { schema: { ...schema, type }, nullable: types.length < schema["type"].length };
}

function shapeOf(schema: Schema, definitions: Definitions): object {
  const several = schema["oneOf"] ?? schema["anyOf"];
  if (Array.isArray(several)) return variantsOf(several as Schema[], definitions);
  if ("const" in schema) return { kind: "choice", options: [schema["const"]] };
  if (Array.isArray(schema["enum"])) return { kind: "choice", options: schema["enum"] };
  switch (schema["type"]) {
    case "string": return { kind: "text" };
    case "integer": return { kind: "integer" };
    case "number": return { kind: "number" };
    case "boolean": return { kind: "switch" };
    case "array": return listOf(schema, definitions);
    case "object": return objectOf(schema, definitions);
    default: return { kind: "json" };
  }
}

function variantsOf(several: Schema[], definitions: Definitions): object {
  const made = { kind: "variants" } as Record<string, unknown>;
  later(made, "variants", () => several.map((one) => fieldOf(one, definitions)));
  return made;
}

function listOf(schema: Schema, definitions: Definitions): object {
  if (!isObject(schema["items"]) || "prefixItems" in schema) return { kind: "json" };
  const item = fieldOf(schema["items"], definitions);
  if (item.kind === "variants" || item.kind === "json") return { kind: "json" };
  return { kind: PLAIN.has(item.kind) ? "plain list" : "list", item, least: schema["minItems"] ?? 0 };
}

function objectOf(schema: Schema, definitions: Definitions): object {
  const properties = schema["properties"];
  if (isObject(properties)) return groupOf(schema, properties, definitions);
  const pattern = schema["patternProperties"];
  const item = isObject(pattern) ? Object.values(pattern)[0] : undefined;
  if (!isObject(item)) return { kind: "json" };
  return { kind: "map", item: fieldOf(item, definitions) };
}

function groupOf(schema: Schema, properties: JsonObject, definitions: Definitions): object {
  const required = new Set(schema["required"] as string[] | undefined);
  const made = { kind: "group" } as Record<string, unknown>;
  later(made, "properties", () =>
    Object.entries(properties).map(([name, one]) => ({ name, field: fieldOf(one as Schema, definitions), required: required.has(name) })),
  );
  return made;
}

function later(made: Record<string, unknown>, name: string, make: () => unknown): void {
  let kept: unknown;
  Object.defineProperty(made, name, { enumerable: true, get: () => (kept ??= make()) });
}

/** The variant of a value: the first that fits with all that it requires, else that fits; 0 if none does. */
export function variantOf(variants: Field[], value: Json | undefined): number {
  const whole = variants.findIndex((one) => fits(one, value) && isWhole(one, value));
  return whole >= 0 ? whole : Math.max(0, variants.findIndex((one) => fits(one, value)));
}

function isWhole(field: Field, value: Json | undefined): boolean {
  return field.kind !== "group" || (isObject(value) && field.properties.every((one) => !one.required || one.name in value));
}

function fits(field: Field, value: Json | undefined): boolean {
  switch (field.kind) {
    case "group": return isObject(value) && field.properties.every(({ name, field: inner }) => agrees(inner, value[name]));
    case "map": return isObject(value) && Object.values(value).every((one) => fits(field.item, one));
    case "list":
    case "plain list": return Array.isArray(value);
    case "choice": return field.options.some((one) => same(one, value));
    case "integer":
    case "number": return typeof value === "number";
    case "switch": return typeof value === "boolean";
    case "text": return typeof value === "string";
    default: return value !== undefined;
  }
}

/** A property that can only have one value distinguishes variants. */
function agrees(field: Field, value: Json | undefined): boolean {
  if (field.kind !== "choice" || field.options.length !== 1) return true;
  return same(field.options[0], value === undefined ? field.fallback : value);
}

/** The name of a variant: its type, else its kind of field. */
export function variantName(field: Field): string {
  const type = field.kind === "group" ? field.properties.find((one) => one.name === "type" || one.name === "kind") : undefined;
  if (type?.field.kind === "choice" && type.field.options.length === 1) return String(type.field.options[0]);
  if (field.kind === "list" || field.kind === "plain list") return "several";
  if (field.kind === "map") return "by name";
  if (field.kind === "choice") return field.options.join(", ");
  return field.kind === "group" ? "one" : field.kind;
}

/** The initial value of an added field: only what is required. */
export function blank(field: Field): Json {
  switch (field.kind) {
    case "group": return Object.fromEntries(field.properties.filter((one) => one.required || isTag(one.field)).map((one) => [one.name, blank(one.field)]));
    case "list": return field.least ? [blank(field.item)] : [];
    case "variants": return blank(field.variants[0]!);
    case "map": return {};
    case "plain list": return [];
    case "choice": return field.options[0]!;
    case "switch": return field.fallback === false; // it is added to differ from the default
    case "text": return typeof field.fallback === "string" ? field.fallback : "";
    case "integer":
    case "number": return typeof field.fallback === "number" ? field.fallback : 1;
    default: return field.fallback ?? {};
  }
}

function isTag(field: Field): boolean {
  return field.kind === "choice" && field.options.length === 1;
}
