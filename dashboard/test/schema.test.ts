import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import type { JsonObject } from "../src/spec/pointer";
import { blank, type Definitions, type Field, fieldOf, variantName, variantOf } from "../src/spec/schema";

const DEFINITIONS = JSON.parse(readFileSync("../docs/reference/openapi.json", "utf8")).components.schemas as Definitions;
type Group = Extract<Field, { kind: "group" }>;
type Variants = Extract<Field, { kind: "variants" }>;

const group = (name: string) => fieldOf(DEFINITIONS[name]!, DEFINITIONS) as Group;
function property(name: string, key: string): Field {
  const found = group(name).properties.find((one) => one.name === key);
  assert.ok(found, `${name} has no ${key}`);
  return found.field;
}

test("a plain type becomes its input, and null makes it nullable", () => {
  assert.equal(fieldOf({ type: "string" }).kind, "text");
  assert.equal(fieldOf({ type: "boolean", default: true }).fallback, true);
  const count = fieldOf({ anyOf: [{ type: "integer", minimum: 1 }, { type: "null" }], default: null, description: "Of ``it``." });
  assert.deepEqual([count.kind, count.nullable, count.fallback, count.help], ["integer", true, null, "Of `it`."]);
  assert.deepEqual([fieldOf({ type: ["null", "number"] }).kind, fieldOf({ type: ["null", "number"] }).nullable], ["number", true]);
});

test("an alternative without a name is edited as JSON", () => {
  for (const schema of [{ type: ["array", "integer"] }, {}, { type: "array" }, { type: "array", prefixItems: [{ type: "number" }], items: { type: "number" } }, { type: "object", additionalProperties: {} }]) {
    assert.equal(fieldOf(schema as JsonObject).kind, "json");
  }
});

test("every property of a training spec is a field, with the required ones marked", () => {
  const spec = group("TrainJob");
  assert.equal(spec.properties.length, Object.keys(DEFINITIONS["TrainJob"]!["properties"] as object).length);
  assert.deepEqual(spec.properties.filter((one) => one.required).map((one) => one.name).sort(), ["data", "kind", "loss", "network", "optimizer", "stop"]);
  assert.equal(property("TrainJob", "precision").kind, "choice");
  assert.equal(property("TrainJob", "probes").kind, "list");
  assert.equal(property("TrainJob", "labels").kind, "map");
  assert.deepEqual([property("TrainJob", "scheduler").kind, property("TrainJob", "scheduler").nullable, property("TrainJob", "scheduler").title], ["group", true, "Scheduler"]);
  assert.equal(property("Data", "fields").kind, "map");
  assert.equal(property("Probe", "kinds").kind, "plain list");
});

test("the variant of a data field is found by its type", () => {
  const kinds = (property("Data", "fields") as Extract<Field, { kind: "map" }>).item as Variants;
  const named = (type: string) => variantName(kinds.variants[variantOf(kinds.variants, { type, dim: 3 })]!);
  for (const type of ["dense", "integer", "integer_sequence", "dense_sequence", "sparse_binary", "sparse_float"]) assert.equal(named(type), type);
});

test("a graph is distinguished from a preset without a type, and a loss from a list of losses", () => {
  const network = property("TrainJob", "network") as Variants;
  assert.equal(variantName(network.variants[variantOf(network.variants, { layers: [] })]!), "graph");
  assert.equal(variantName(network.variants[variantOf(network.variants, { type: "preset", preset: "mlp" })]!), "preset");
  const loss = property("TrainJob", "loss") as Variants;
  assert.deepEqual([variantOf(loss.variants, { type: "MSELoss", inputs: [] }), variantOf(loss.variants, [])], [0, 1]);
  assert.deepEqual(loss.variants.map(variantName), ["one", "several"]);
});

test("a validation source is distinguished from several by name", () => {
  const { variants } = property("Data", "validation") as Variants;
  assert.deepEqual(variants.map(variantName), ["one", "by name"]);
  const chosen = (value: JsonObject) => variantName(variants[variantOf(variants, value)]!);
  assert.equal(chosen({ dataset: "ds_1", split: "test" }), "one");
  assert.equal(chosen({ datset: "ds_1" }), "one");
  assert.equal(chosen({ clean: { dataset: "ds_1" }, noisy: {} }), "by name");
  for (const one of variants) assert.equal(chosen(blank(one) as JsonObject), variantName(one));
});

test("an added field has only what is required", () => {
  assert.deepEqual(blank(group("MetricSpec")), { type: "", inputs: [] });
  assert.deepEqual(blank(group("Preset")), { type: "preset", preset: "cbow" });
  assert.deepEqual(blank(group("IntegerField")), { type: "integer" });
  assert.deepEqual(blank(group("Early")), { metric: "", mode: "min", patience: 1 });
});

test("a recursive schema is supported", () => {
  const tree: Definitions = { Tree: { type: "object", properties: { left: { $ref: "#/$defs/Tree" } } } };
  const root = fieldOf({ $ref: "#/$defs/Tree" }, tree) as Group;
  assert.equal(((root.properties[0]!.field as Group).properties[0]!.field as Group).kind, "group");
});
