// What a model reads and returns: the values of a row that a person can enter, and the classes of its outputs. Pure.
import type { Json, JsonObject } from "../../spec/pointer";
import type { Column } from "../../spec/suggest";

export interface Network {
  layers: { name: string; type: string; inputs?: string[] | null; lengths?: string | null }[];
  outputs?: string[] | null;
}

export interface Field {
  type: string;
  column?: string | null;
  columns?: string[] | null;
  shape?: number[] | null;
  dim?: number | null;
  classes?: (string | number)[] | null;
  tokens?: string | null;
  fill?: Json;
  scale?: number | null;
}

export type Fields = Record<string, Field>;
export interface Loss { type: string; inputs: string[] }

/** A value of a row. */
export interface Entry {
  /** Its name in a row of a request: the column of the training data. */
  column: string;
  kind: "image" | "number" | "class" | "text" | "json";
  /** Of an image. */
  channels: number;
  height: number;
  width: number;
  /** Of a class. */
  options: (string | number)[];
  /** May be empty: missing values are filled. */
  optional: boolean;
  hint: string;
}

const MOST_OPTIONS = 500;
const LEAST_SIDE = 4; // smaller tensors are not images
const root = (name: string) => name.split(".")[0]!;

/** The outputs that a request without `outputs` gets. */
export function defaultOutputs({ layers, outputs }: Network): string[] {
  return outputs?.length ? outputs : layers.slice(-1).map((one) => one.name);
}

/** The fields that the default outputs depend on. */
export function neededFields(network: Network, fields: Fields): string[] {
  const layers = new Map(network.layers.map((one) => [one.name, one]));
  const seen = new Set<string>();
  const left = defaultOutputs(network).map(root);
  while (left.length) {
    const name = left.pop()!;
    if (seen.has(name)) continue;
    seen.add(name);
    const layer = layers.get(name);
    if (layer) left.push(...[...(layer.inputs ?? []), ...(layer.lengths ? [layer.lengths] : [])].map(root));
  }
  return Object.keys(fields).filter((name) => seen.has(name) && !layers.has(name));
}

/** The columns that a field reads. */
export function columnsOf(name: string, field: Field): string[] {
  return field.columns ?? [field.column ?? name];
}

/** What a person enters for these fields. */
export function entriesOf(names: readonly string[], fields: Fields): Entry[] {
  return names.flatMap((name) => {
    const field = fields[name]!;
    return columnsOf(name, field).map((column) => entryOf(column, field));
  });
}

function entryOf(column: string, field: Field): Entry {
  const base: Entry = { column, kind: "json", channels: 0, height: 0, width: 0, options: [], optional: (field.fill ?? null) !== null, hint: "" };
  switch (field.type) {
    case "dense": return dense(base, field);
    case "integer":
      if (field.classes && field.classes.length <= MOST_OPTIONS) return { ...base, kind: "class", options: field.classes };
      if (typeof field.classes?.[0] === "string") return { ...base, kind: "text", hint: "the name of a class" };
      return { ...base, kind: "number", hint: field.dim ? `0 to ${field.dim - 1}` : "" };
    case "integer_sequence": return field.tokens ? { ...base, kind: "text", hint: `a text, read as ${field.tokens}` } : { ...base, hint: "a list of integers: [3, 1, 4]" };
    case "dense_sequence": return { ...base, hint: `a list of steps, each a list of ${field.dim} numbers` };
    case "sparse_float": return { ...base, hint: "a list of pairs [index, value]" };
    default: return { ...base, hint: "a list of indices: [3, 14]" };
  }
}

function dense(base: Entry, field: Field): Entry {
  const shape = field.columns && field.shape && product(field.shape) === field.columns.length ? [] : (field.shape ?? []);
  if (product(shape) === 1) return { ...base, kind: "number" };
  const [channels, height, width] = shape.length === 2 ? [1, ...shape] : shape;
  const isImage = shape.length <= 3 && (channels === 1 || channels === 3) && (height ?? 0) >= LEAST_SIDE && (width ?? 0) >= LEAST_SIDE;
  const hint = `numbers of shape [${shape.join(", ")}]`;
  return isImage ? { ...base, kind: "image", channels: channels!, height: height!, width: width!, hint } : { ...base, hint };
}

const product = (sizes: readonly number[]) => sizes.reduce((all, size) => all * size, 1);

/** The value of an entry from what was typed. Undefined: nothing. What is no number is sent as it is, so that the service explains it. */
export function valueOf(entry: Entry, text: string): Json | undefined {
  const typed = text.trim();
  if (entry.kind === "text") return text === "" ? undefined : text;
  if (typed === "") return entry.optional ? null : undefined;
  if (entry.kind === "class") return entry.options.find((one) => String(one) === typed) ?? typed;
  try {
    return JSON.parse(typed) as Json;
  } catch {
    return typed;
  }
}

/** An output and the column of the data with its true value. */
export interface Target {
  output: string;
  column: string;
  /** The number of classes; null: it is no class. */
  classes: number | null;
}

const CLASS_LOSSES: ReadonlySet<string> = new Set(["CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"]);
const SOFTMAXES: ReadonlySet<string> = new Set(["Softmax", "softmax", "LogSoftmax", "log_softmax"]);

/** The default outputs whose true values are known from the losses of the training job. As in `engine/inference/classes.py`. */
export function targetsOf(network: Network, fields: Fields, losses: readonly Loss[]): Target[] {
  const found = new Map<string, Target>();
  for (const { type, inputs } of losses) {
    const [output, target] = [inputs[0], inputs.at(-1)];
    const field = target === undefined ? undefined : fields[target];
    if (!output || !target || !field || field.columns) continue;
    const isClass = CLASS_LOSSES.has(type) && field.type === "integer";
    found.set(output, { output, column: field.column ?? target, classes: isClass ? (field.classes?.length ?? field.dim ?? 0) : null });
  }
  for (const layer of network.layers) {
    const scores = found.get(layer.inputs?.[0] ?? "");
    if (SOFTMAXES.has(layer.type) && scores?.classes != null) found.set(layer.name, { ...scores, output: layer.name });
  }
  return defaultOutputs(network).flatMap((name) => found.get(name) ?? []);
}

const MOST_CLASSES = 100;

/** How many of the most probable classes to request; null: not all outputs have classes. */
export function topK(network: Network, targets: readonly Target[]): number | null {
  const sizes = defaultOutputs(network).map((name) => targets.find((one) => one.output === name)?.classes ?? 0);
  const k = Math.min(MOST_CLASSES, ...sizes);
  return sizes.length && k > 0 ? k : null;
}

/** A row of a dataset as a row of a request: the needed columns. `cut`: a long text is only its beginning. */
export function rowOf(stored: JsonObject, columns: readonly Column[], names: readonly string[], fields: Fields): { row: JsonObject; cut: boolean } {
  const row: JsonObject = {};
  let cut = false;
  for (const name of names) {
    const field = fields[name]!;
    for (const column of columnsOf(name, field)) {
      const value = stored[column];
      if (value === undefined) continue;
      const isBytes = columns.find((one) => one.name === column)?.dtype === "uint8" && field.type.startsWith("dense") && (field.scale ?? null) === null;
      const isCut = typeof value === "object" && value !== null && !Array.isArray(value) && typeof value["value"] === "string";
      cut ||= isCut;
      row[column] = isCut ? (value["value"] as string) : isBytes ? divided(value) : value;
    }
  }
  return { row, cut };
}

/** Numbers of a request are not scaled, those of a uint8 column are divided by 255. */
function divided(value: Json): Json {
  return Array.isArray(value) ? value.map(divided) : typeof value === "number" ? value / 255 : value;
}

/** Random places of rows, without repetition, ascending. */
export function randomRows(total: number, wanted: number, random: () => number = Math.random): number[] {
  const found = new Set<number>();
  while (found.size < Math.min(total, wanted)) found.add(Math.floor(random() * total));
  return [...found].sort((a, b) => a - b);
}
