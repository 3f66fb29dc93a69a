import assert from "node:assert/strict";
import { test } from "node:test";

import type { JsonObject } from "../src/spec/pointer";
import { firstSpec, outputOf, presetNetwork, suggestData, type Table, withDims, withTarget } from "../src/spec/suggest";

const DIGITS: Table = { id: "ds_1", columns: [{ name: "image", dtype: "float32", shape: [1, 8, 8] }, { name: "label", dtype: "int64", shape: [] }], splits: { train: 1297, validation: 250, test: 250 } };
const MLP = { name: "mlp", outputs: ["out"], schema: { properties: { num_outputs: { default: 10 } } } };

test("labeled images become image and label fields, with the existing splits", () => {
  const { data, target, classes } = suggestData(DIGITS, { train: { label: { min: 0, max: 9, distinct: 10 } } });
  assert.deepEqual(data, {
    train: { dataset: "ds_1", split: "train" },
    validation: { dataset: "ds_1", split: "validation" },
    fields: { image: { type: "dense", shape: [1, 8, 8] }, label: { type: "integer", dim: 10 } },
    batch_size: 32,
  });
  assert.deepEqual([target, classes], ["label", 10]);
});

test("a table without splits is divided, its numbers become one field, its strings classes", () => {
  const table: Table = { id: "ds_2", columns: [{ name: "species", dtype: "string", shape: [] }, { name: "bill length", dtype: "float64", shape: [] }, { name: "mass", dtype: "int64", shape: [] }], splits: { all: 10 } };
  const { data, target, classes } = suggestData(table, { all: { species: { counts: [["Adelie", 4], ["Gentoo", 6]] } } }, 8);
  assert.deepEqual(data["train"], { dataset: "ds_2", split: "all", fraction: [0, 0.8] });
  assert.deepEqual(data["validation"], { dataset: "ds_2", split: "all", fraction: [0.8, 1] });
  assert.deepEqual(data["fields"], { features: { type: "dense", columns: ["bill length", "mass"] }, species: { type: "integer", classes: ["Adelie", "Gentoo"] } });
  assert.deepEqual([data["batch_size"], target, classes], [8, "species", 2]);
});

test("a regression target gets MSELoss", () => {
  const table: Table = { id: "ds_3", columns: [{ name: "x", dtype: "float32", shape: [13] }, { name: "price", dtype: "float64", shape: [] }], splits: { all: 10 } };
  const suggestion = suggestData(table, {});
  const spec = firstSpec(suggestion, MLP);
  assert.deepEqual(spec["network"], { type: "preset", preset: "mlp", args: { num_outputs: 1 } });
  assert.deepEqual([spec["loss"], spec["metrics"]], [{ type: "MSELoss", inputs: ["out", "price"] }, []]);
});

test("invalid field names are replaced, and refer to their columns", () => {
  const table: Table = { id: "ds_4", columns: [{ name: "my image", dtype: "uint8", shape: [28, 28] }, { name: "label", dtype: "uint8", shape: [], classes: ["a", "b"] }], splits: { train: 1, test: 1 } };
  const { data } = suggestData(table, {});
  assert.deepEqual(data["fields"], { c_my_image: { type: "dense", shape: [1, 28, 28], column: "my image" }, label: { type: "integer" } });
  assert.deepEqual(data["validation"], { dataset: "ds_4", split: "test" });
});

test("the vocabulary size of sequences is from the statistics of all splits", () => {
  const table: Table = { id: "ds_5", columns: [{ name: "ids", dtype: "int64", shape: [null] }, { name: "label", dtype: "int64", shape: [] }], splits: { train: 2, test: 2 } };
  const stats = { train: { ids: { max: 90 }, label: { min: 0, max: 1, distinct: 2 } }, test: { ids: { max: 120 } } };
  const fields = withDims(suggestData(table, stats).data, stats)["fields"] as JsonObject;
  assert.deepEqual(fields["ids"], { type: "integer_sequence", dim: 121 });
});

test("the output is the network's last layer, or that of the preset in the catalog", () => {
  assert.equal(outputOf({ network: { type: "preset", preset: "mlp" } }, [MLP]), "out");
  assert.equal(outputOf({ network: { layers: [{ name: "a" }, { name: "b" }] } }, []), "b");
  assert.equal(outputOf({ network: { layers: [{ name: "a" }], outputs: ["c"] } }, []), "c");
  assert.equal(outputOf({}, []), null);
});

test("a preset gets the number of classes if it is not its default", () => {
  assert.deepEqual(presetNetwork(MLP, 10), { type: "preset", preset: "mlp" });
  assert.deepEqual(presetNetwork(MLP, 3), { type: "preset", preset: "mlp", args: { num_outputs: 3 } });
});

test("the rest of a spec stays when its target changes", () => {
  const spec = withTarget({ seed: 3, loss: {}, somewhere: { new: true } }, { data: {}, target: "y", classes: 4 }, "fc");
  assert.deepEqual(spec, { seed: 3, loss: { type: "CrossEntropyLoss", inputs: ["fc", "y"] }, somewhere: { new: true }, metrics: [{ type: "accuracy", inputs: ["fc", "y"] }] });
});
