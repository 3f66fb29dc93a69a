import assert from "node:assert/strict";
import { test } from "node:test";

import { duration, isRight, outputsOf, scoresOf, truthText, valuesOf } from "../src/views/models/answers";
import { entriesOf, type Fields, neededFields, type Network, randomRows, rowOf, targetsOf, topK, valueOf } from "../src/views/models/inputs";
import { referenceTo, servedVersion } from "../src/views/models/references";
import { evaluationSources, nameOf, validationSources } from "../src/views/models/sources";
import { driftOf, type Series, worstFirst } from "../src/views/job/serving/drift";

const FIELDS: Fields = {
  island: { type: "integer", dim: 3, classes: ["Biscoe", "Dream", "Torgersen"] },
  measures: { type: "dense", columns: ["length", "mass"], shape: [2], fill: "mean" },
  species: { type: "integer", dim: 3, classes: ["Adelie", "Chinstrap", "Gentoo"] },
};
const NETWORK: Network = {
  layers: [
    { name: "emb", type: "Embedding", inputs: ["island"] },
    { name: "joined", type: "cat", inputs: ["measures", "emb"] },
    { name: "fc", type: "Linear", inputs: ["joined"] },
    { name: "other", type: "Linear", inputs: ["species"] },
  ],
  outputs: ["fc"],
};
const one = (name: string, field: Fields[string]) => entriesOf([name], { [name]: field })[0]!;

test("only the fields that the default outputs depend on are entered", () => {
  assert.deepEqual(neededFields(NETWORK, FIELDS), ["island", "measures"]);
  assert.deepEqual(neededFields({ ...NETWORK, outputs: ["other"] }, FIELDS), ["species"]);
  assert.deepEqual(neededFields({ layers: [{ name: "lstm", type: "LSTM", inputs: ["words"], lengths: "size" }, { name: "fc", type: "Linear", inputs: ["lstm.0"] }] }, { words: { type: "integer_sequence" }, size: { type: "integer" }, label: { type: "integer" } }), ["words", "size"]);
});

test("a field of several columns has an entry for each, and a fill makes it optional", () => {
  const entries = entriesOf(["island", "measures"], FIELDS);
  assert.deepEqual(entries.map((each) => [each.column, each.kind, each.optional]), [["island", "class", false], ["length", "number", true], ["mass", "number", true]]);
});

test("the kind of an entry follows from the field", () => {
  assert.deepEqual([one("x", { type: "dense", shape: [3, 32, 24] })].map(({ kind, channels, height, width }) => [kind, channels, height, width]), [["image", 3, 32, 24]]);
  assert.equal(one("x", { type: "dense", shape: [28, 28] }).channels, 1);
  assert.equal(one("x", { type: "dense", shape: [2, 8, 8] }).kind, "json");
  assert.equal(one("x", { type: "dense", shape: [100, 3] }).kind, "json");
  assert.equal(one("x", { type: "dense", shape: [1] }).kind, "number");
  assert.equal(one("x", { type: "integer", dim: 10 }).hint, "0 to 9");
  assert.equal(one("x", { type: "integer_sequence", tokens: "words" }).kind, "text");
  assert.equal(one("x", { type: "integer_sequence", dim: 9 }).kind, "json");
  assert.equal(one("x", { type: "integer", column: "city", classes: ["Bern"] }).column, "city");
});

test("typed values are numbers, classes and texts; what is no number is sent for the service to explain", () => {
  const number = one("x", { type: "dense", shape: [1] });
  assert.equal(valueOf(number, " 3.5 "), 3.5);
  assert.equal(valueOf(number, "three"), "three");
  assert.equal(valueOf(number, ""), undefined);
  assert.equal(valueOf({ ...number, optional: true }, ""), null);
  assert.equal(valueOf(one("x", { type: "integer", classes: [10, 20] }), "20"), 20);
  assert.equal(valueOf(one("x", { type: "integer_sequence", tokens: "words" }), "12"), "12");
  assert.deepEqual(valueOf(one("x", { type: "dense", shape: [2, 3] }), "[[1, 2, 3], [4, 5, 6]]"), [[1, 2, 3], [4, 5, 6]]);
});

test("the classes of outputs follow from the losses, also after a softmax", () => {
  const loss = { type: "CrossEntropyLoss", inputs: ["fc", "species"] };
  assert.deepEqual(targetsOf(NETWORK, FIELDS, [loss]), [{ output: "fc", column: "species", classes: 3 }]);
  const softmax: Network = { layers: [...NETWORK.layers, { name: "prob", type: "Softmax", inputs: ["fc"] }], outputs: ["prob"] };
  assert.deepEqual(targetsOf(softmax, FIELDS, [loss]), [{ output: "prob", column: "species", classes: 3 }]);
  assert.equal(topK(NETWORK, targetsOf(NETWORK, FIELDS, [loss])), 3);
  assert.equal(topK({ ...NETWORK, outputs: ["fc", "joined"] }, targetsOf(NETWORK, FIELDS, [loss])), null);
  const regression = targetsOf(NETWORK, { ...FIELDS, price: { type: "dense", column: "CHF" } }, [{ type: "MSELoss", inputs: ["fc", "price"] }]);
  assert.deepEqual(regression, [{ output: "fc", column: "CHF", classes: null }]);
  assert.equal(topK(NETWORK, regression), null);
});

test("a stored row becomes a row of a request: bytes are scaled, other columns are omitted", () => {
  const fields: Fields = { image: { type: "dense", shape: [1, 1, 2] }, raw: { type: "dense", scale: 1 }, text: { type: "integer_sequence", tokens: "words" } };
  const columns = [{ name: "image", dtype: "uint8", shape: [1, 1, 2] }, { name: "raw", dtype: "uint8", shape: [] }, { name: "text", dtype: "string", shape: [] }];
  const stored = { image: [[[0, 51]]], raw: 7, text: { truncated: true, length: 2000, value: "a fine" }, label: 3 };
  assert.deepEqual(rowOf(stored, columns, ["image", "raw", "text"], fields), { row: { image: [[[0, 0.2]]], raw: 7, text: "a fine" }, cut: true });
  assert.deepEqual(rowOf({ text: "a film" }, columns, ["text"], fields), { row: { text: "a film" }, cut: false });
});

test("random rows are different ones, and all of a small split", () => {
  assert.deepEqual(randomRows(3, 8), [0, 1, 2]);
  let next = 0;
  assert.deepEqual(randomRows(100, 3, () => [0.5, 0.5, 0.01, 0.99][next++]!), [1, 50, 99]);
  assert.deepEqual(randomRows(0, 8), []);
});

test("a response has classes with probabilities, or the best one, or values", () => {
  const outputs = { "a.b/value": [[1, "NaN"]], "fc/id": [1], "fc/prob": [0.75], "fc/class": ["Dream"], "fc/top_k": [[1, 0]], "fc/top_k_class": [["Dream", "Biscoe"]], "fc/top_k_prob": [[0.75, 0.25]] };
  assert.deepEqual(outputsOf({ outputs }), ["a.b", "fc"]);
  assert.deepEqual(scoresOf({ outputs }, "fc", 0), [{ name: "Dream", prob: 0.75 }, { name: "Biscoe", prob: 0.25 }]);
  assert.deepEqual(scoresOf({ outputs: { "fc/id": [4], "fc/prob": [0.5] } }, "fc", 0), [{ name: "4", prob: 0.5 }]);
  assert.equal(scoresOf({ outputs: { "fc/id": [[4, 1]], "fc/prob": [[0.5, 0.5]] } }, "fc", 0), null); // one for each step
  assert.equal(scoresOf({ outputs }, "a.b", 0), null);
  assert.deepEqual(valuesOf({ outputs }, "a.b", 0), [1, NaN]);
});

test("the true class may be stored as the number of a named class", () => {
  assert.ok(isRight("cat", 1, ["dog", "cat"]));
  assert.ok(isRight("1", 1, ["dog", "cat"]));
  assert.ok(!isRight("dog", 1, ["dog", "cat"]));
  assert.ok(isRight("Adelie", "Adelie", undefined));
  assert.equal(truthText(1, ["dog", "cat"]), "cat");
});

test("times are read from the header Server-Timing", () => {
  assert.equal(duration("queue;dur=0.141, compute;dur=1.138", "compute"), 1.138);
  assert.equal(duration("queue;dur=0.141", "queue"), 0.141);
  assert.equal(duration("", "queue"), null);
});

test("a reference names a version, and a version is served by its alias", () => {
  const model = { name: "m", latest: 4, aliases: { production: 2, old: 1 } };
  const served = (reference: string, version: number | null = null) => servedVersion(model, { reference, version });
  assert.deepEqual(["m", "m@latest", "m@production", "m:3", "m@gone"].map((text) => served(text)), [4, 4, 2, 3, null]);
  assert.equal(served("m@production", 1), 1); // before the alias has been followed
  assert.equal(referenceTo(model, { version: 2, aliases: ["a", "production"] }), "m@production");
  assert.equal(referenceTo(model, { version: 1, aliases: ["old"] }), "m@old");
  assert.equal(referenceTo(model, { version: 4, aliases: [] }), "m");
  assert.equal(referenceTo(model, { version: 3, aliases: [] }), "m:3");
});

test("an evaluation offers the validation rows first and the training split last", () => {
  const train = { dataset: "ds", split: "train" };
  assert.deepEqual(evaluationSources({ train, validation: { dataset: "ds", split: "validation" } }, ["train", "validation", "test"]).map(nameOf), ["validation", "test", "train"]);
  const part = { dataset: "ds", split: "all", fraction: [0.8, 1] as [number, number] };
  assert.deepEqual(evaluationSources({ train: { ...part, fraction: [0, 0.8] }, validation: part }, ["all"]).map(nameOf), ["all (fraction 0.8 to 1)", "all"]);
  assert.equal(validationSources({ validation: { clean: train, noisy: part } }).length, 2);
  assert.deepEqual(evaluationSources({}, []), []);
});

test("drift is that of a model, drifted series first; a service without drift has none", () => {
  const serving = { drift: [{ model: "a", version: 1 }, { model: "b", version: 2 }] } as never;
  assert.equal(driftOf(serving).length, 2);
  assert.deepEqual(driftOf(serving, "b").map((each) => each.version), [2]);
  assert.deepEqual(driftOf({} as never), []);
  assert.deepEqual(driftOf(null), []);
  const series = (name: string, psi: number, threshold: number, drifted = false) => ({ of: "field", name, measure: "mean", psi, threshold, drifted }) as Series;
  assert.deepEqual(worstFirst([series("a", 0.1, 0.2), series("b", 0.3, 0.2, true), series("c", 0.15, 0.2)]).map((each) => each.name), ["b", "c", "a"]);
});
