// A first spec for a dataset: the fields from its columns, the target and the loss.
import { isObject, type Json, type JsonObject, setAt } from "./pointer";

export interface Column { name: string; dtype: string; shape: (number | null)[]; classes?: unknown }
export interface Table { id: string; columns: Column[]; splits: Record<string, number> }
/** The statistics of a column in one split, from `/datasets/{id}/stats`. */
export interface ColumnStats { min?: Json; max?: Json; distinct?: number | null; counts?: [Json, number][] | null }
export type TableStats = Record<string, Record<string, ColumnStats>>;

export interface Suggestion {
  data: JsonObject;
  /** The target field; null if no column looks like one. */
  target: string | null;
  /** The number of classes; null for a regression target. */
  classes: number | null;
}

const TARGETS = ["label", "labels", "target", "class", "y", "species", "quality"];
const FIELD = /^[A-Za-z_][A-Za-z0-9_]{0,63}$/;

/** Fields, splits and a batch size for a dataset. */
export function suggestData(table: Table, stats: TableStats, batch: Json = 32): Suggestion {
  const train = sourceOf(table);
  const figures = stats[String(train["split"])] ?? {};
  const target = targetOf(table.columns);
  const fields = fieldsOf(table.columns.filter((column) => column !== target));
  let classes: number | null = null;
  let name: string | null = null;
  if (target) {
    const field = targetField(target, figures[target.name] ?? {});
    name = nameOf(target.name, fields);
    fields[name] = name === target.name ? field : { ...field, column: target.name };
    classes = classesOf(field);
  }
  const data: JsonObject = { train, ...validationOf(table), fields, batch_size: batch };
  return { data, target: name, classes };
}

function sourceOf({ id, splits }: Table): JsonObject {
  const split = "train" in splits ? "train" : (Object.keys(splits)[0] ?? "all");
  return hasOwnValidation(splits) ? { dataset: id, split } : { dataset: id, split, fraction: [0, 0.8] };
}

function validationOf({ id, splits }: Table): JsonObject {
  const other = ["validation", "test"].find((name) => name in splits);
  if (other && hasOwnValidation(splits)) return { validation: { dataset: id, split: other } };
  return { validation: { dataset: id, split: Object.keys(splits)[0] ?? "all", fraction: [0.8, 1] } };
}

function hasOwnValidation(splits: Record<string, number>): boolean {
  return "train" in splits && ("validation" in splits || "test" in splits);
}

function targetOf(columns: Column[]): Column | undefined {
  const single = columns.filter((column) => column.shape.length === 0);
  const named = TARGETS.map((name) => single.find((column) => column.name.toLowerCase() === name)).find(Boolean);
  if (named) return named;
  // The last column, unless it is the only one.
  return columns.length > 1 ? single.at(-1) : undefined;
}

function targetField(column: Column, figures: ColumnStats): JsonObject {
  if (column.dtype === "string") return { type: "integer", classes: (figures.counts ?? []).map(([value]) => value) };
  if (column.dtype.startsWith("float")) return { type: "dense", shape: [1] };
  if (Array.isArray(column.classes)) return { type: "integer" };
  const { min, max, distinct } = figures;
  const isClass = typeof min === "number" && typeof max === "number" && distinct !== null && max < 10_000;
  if (!isClass) return { type: "dense", shape: [1] };
  if (min >= 0) return { type: "integer", dim: max + 1 };
  return { type: "integer", classes: (figures.counts ?? []).map(([value]) => value) };
}

function classesOf(field: JsonObject): number | null {
  if (field["type"] !== "integer") return null;
  return typeof field["dim"] === "number" ? field["dim"] : Array.isArray(field["classes"]) ? field["classes"].length : null;
}

/** Scalar columns are combined into one field, tensors get a field each; text columns are skipped. */
function fieldsOf(columns: Column[]): JsonObject {
  const numbers = columns.filter((column) => column.dtype !== "string");
  const single = numbers.filter((column) => column.shape.length === 0);
  const fields: JsonObject = {};
  for (const column of numbers) {
    if (column.shape.length === 0) continue;
    const name = nameOf(column.name, fields);
    fields[name] = name === column.name ? tensorField(column) : { ...tensorField(column), column: column.name };
  }
  if (single.length === 1 && FIELD.test(single[0]!.name)) fields[single[0]!.name] = { type: "dense", shape: [1] };
  else if (single.length) fields[nameOf("features", fields)] = { type: "dense", columns: single.map((column) => column.name) };
  return fields;
}

function tensorField({ dtype, shape }: Column): JsonObject {
  const whole = shape.map((size) => size ?? 0);
  if (shape[0] !== null) return { type: "dense", shape: whole.length === 2 ? [1, ...whole] : whole };
  if (shape.length > 1) return { type: "dense_sequence", dim: whole[1]! };
  return dtype.startsWith("int") || dtype.startsWith("uint") ? { type: "integer_sequence", dim: 0 } : { type: "dense_sequence", dim: 1 };
}

function nameOf(column: string, taken: JsonObject): string {
  const plain = FIELD.test(column) ? column : `c_${column.replace(/[^A-Za-z0-9_]/g, "_")}`.slice(0, 60);
  return plain in taken ? `${plain}_2` : plain;
}

/** Fill in the vocabulary size of sequences, which is known only from the statistics. */
export function withDims(data: JsonObject, stats: TableStats): JsonObject {
  const fields = isObject(data["fields"]) ? data["fields"] : {};
  const all = Object.values(stats);
  const filled = Object.entries(fields).map(([name, field]) => {
    if (!isObject(field) || field["type"] !== "integer_sequence") return [name, field] as const;
    const most = Math.max(...all.map((split) => Number(split[String(field["column"] ?? name)]?.max ?? 0)));
    return [name, { ...field, dim: most + 1 }] as const;
  });
  return { ...data, fields: Object.fromEntries(filled) };
}

export interface PresetEntry { name: string; outputs?: string[] | null; schema: JsonObject }

/** The output layer of the network: a graph's, or a preset's. */
export function outputOf(spec: Json, presets: PresetEntry[]): string | null {
  const network = isObject(spec) ? spec["network"] : undefined;
  if (!isObject(network)) return null;
  if (network["type"] === "preset") return presets.find((one) => one.name === network["preset"])?.outputs?.[0] ?? null;
  if (Array.isArray(network["outputs"])) return String(network["outputs"][0]);
  const layers = network["layers"];
  const last = Array.isArray(layers) ? layers.at(-1) : undefined;
  return isObject(last) && typeof last["name"] === "string" ? last["name"] : null;
}

/** A preset with the output size of the target. */
export function presetNetwork(preset: PresetEntry, classes: number | null): JsonObject {
  const properties = isObject(preset.schema["properties"]) ? preset.schema["properties"] : {};
  const size = ["num_classes", "num_outputs"].find((name) => name in properties);
  const wanted = classes ?? (size === "num_outputs" ? 1 : null);
  const differs = size !== undefined && wanted !== null && (properties[size] as JsonObject)["default"] !== wanted;
  return { type: "preset", preset: preset.name, ...(differs ? { args: { [size]: wanted } } : {}) };
}

/** Loss and metrics for a target; the rest of the spec stays. */
export function withTarget(spec: JsonObject, suggestion: Suggestion, output: string | null): JsonObject {
  const { target, classes } = suggestion;
  if (!target || !output) return spec;
  const inputs = [output, target];
  const loss = { type: classes === null ? "MSELoss" : "CrossEntropyLoss", inputs };
  const metrics = classes === null ? [] : [{ type: "accuracy", inputs }];
  return setAt(setAt(spec, "/loss", loss), "/metrics", metrics) as JsonObject;
}

/** A complete initial spec. */
export function firstSpec(suggestion: Suggestion, preset: PresetEntry): JsonObject {
  const network = presetNetwork(preset, suggestion.classes);
  const spec: JsonObject = {
    kind: "train",
    network,
    loss: { type: "CrossEntropyLoss", inputs: [] },
    optimizer: { type: "Adam", args: { lr: 0.001 } },
    data: suggestion.data,
    stop: { epochs: 5 },
    evaluate: { every_epochs: 1 },
    metrics: [],
    probes: [{ layers: ["*"], kinds: ["output", "param_grad"], every: 25 }],
  };
  return withTarget(spec, suggestion, preset.outputs?.[0] ?? null);
}
