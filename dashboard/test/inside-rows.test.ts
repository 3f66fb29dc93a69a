import assert from "node:assert/strict";
import { test } from "node:test";

import { verdictOf } from "../src/views/inside/layers/health";
import { matcher, rowOf, sorted } from "../src/views/inside/layers/rows";
import { together, updateRatio } from "../src/views/inside/layers/combined";
import { figures, layer } from "./inside-layers";

test("the gradient norm of a layer is over all its parameters together", () => {
  const found = together(layer({ tensors: { "fc.weight": { param_grad: figures({ l2: 3, absmax: 2 }) }, "fc.bias": { param_grad: figures({ l2: 4, absmax: 4 }) } } }), "param_grad");
  assert.deepEqual(found, { l2: 5, absmax: 4, size: 20, step: 10, nonfinite: 0 });
});

test("the update ratio counts only parameters that have both at one step", () => {
  const tensors = { "fc.weight": { update: figures({ l2: 0.003 }), param: figures({ l2: 3 }) }, "fc.bias": { update: figures({ l2: 9 }), param: figures({ l2: 1, step: 5 }) } };
  assert.ok(Math.abs(updateRatio(layer({ tensors }))! - 0.001) < 1e-12);
  assert.equal(updateRatio(layer({ tensors: { "fc.bias": tensors["fc.bias"] } })), null);
});

test("a row counts NaN over all its tensors and has the newest step", () => {
  const row = rowOf(layer({ stats: { output: figures({ nan: 2, mean: "NaN" }) }, tensors: { "fc.bias": { param: figures({ nan: 3, inf: 1, step: 12 }) } } }), 0);
  assert.deepEqual([row.nan, row.inf, row.step, row.verdict.level], [5, 1, 12, "bad"]);
  assert.ok(Number.isNaN(row.mean));
  assert.match(row.verdict.findings[0]!.text, /fc \(Activation\) has 2 NaN and 0 Inf at step 10; fc.bias \(Weights\) has 3 NaN and 1 Inf at step 12/);
});

test("a layer that is not watched is not healthy", () => {
  const row = rowOf(layer(), 0);
  assert.deepEqual([row.verdict.level, row.nan, row.step], ["unknown", null, null]);
  assert.equal(row.verdict.findings.length, 0);
  assert.deepEqual(row.verdict.skipped.map((one) => one.rule), ["NaN or Inf", "Overflow", "Dead units", "Output standard deviation", "Gradient", "Update to weight"]);
});

const VERDICTS: [string, Parameters<typeof layer>[0], string, RegExp][] = [
  ["all zero", { stats: { output: figures({ zeros: 1, std: 1 }) } }, "bad", /100\.0 % of its outputs are zero/],
  ["a ReLU whose units are mostly dead", { type: "ReLU", parameter_shapes: {}, stats: { output: figures({ zeros: 0.95 }) } }, "warn", /95\.0 % .*, over 90 %/],
  ["a Linear with many zeros", { stats: { output: figures({ zeros: 0.95 }) } }, "ok", /95\.0 %/],
  ["flat outputs", { stats: { output: figures({ std: 1e-9 }) } }, "warn", /under 1e-8/],
  ["wide outputs", { stats: { output: figures({ std: 101 }) } }, "warn", /over 100/],
  ["a vanishing gradient", { tensors: { "fc.weight": { param_grad: figures({ l2: 3.9e-7 }) } } }, "warn", /9\.75e-8, under 1e-7: vanishing/],
  ["no gradient", { tensors: { "fc.weight": { param_grad: figures({ l2: 0 }) } } }, "warn", /exactly zero/],
  ["a gradient whose finite values are zero", { tensors: { "fc.weight": { param_grad: figures({ l2: 0, nan: 3 }) } } }, "bad", /3 of the gradient's 16 values are NaN or Inf/],
  ["a large gradient", { tensors: { "fc.weight": { param_grad: figures({ l2: 101 }) } } }, "warn", /over 100/],
  ["an exploding gradient", { tensors: { "fc.weight": { param_grad: figures({ l2: 1001 }) } } }, "bad", /over 1000/],
  ["too slow", { tensors: { "fc.weight": { update: figures({ l2: 0.9e-5 }), param: figures() } } }, "warn", /under 0.00001|under 1e-5/],
  ["too fast", { tensors: { "fc.weight": { update: figures({ l2: 0.11 }), param: figures() } } }, "bad", /over 0\.1/],
  ["near the end of float16", { dtype: "float16", stats: { output: figures({ absmax: 40000 }) } }, "warn", /65500|65504/],
  ["an infinity", { stats: { output: figures({ inf: 1 }) } }, "bad", /1 Inf/],
];
for (const [name, of, level, words] of VERDICTS) {
  test(`the health of ${name} is ${level}`, () => {
    const verdict = verdictOf(layer(of));
    assert.equal(verdict.level, level);
    assert.ok(verdict.findings.some((one) => one.level === level && words.test(one.text)), JSON.stringify(verdict.findings));
  });
}

test("sorting puts rows without a value last both ways, NaN as the largest, and keeps the network's order among equals", () => {
  const rows = [null, 2, NaN, 1, 2].map((std, index) => rowOf(layer({ name: `l${index}`, stats: std === null ? {} : { output: figures({ std: Number.isNaN(std) ? "NaN" : std }) } }), index));
  assert.deepEqual(sorted(rows, "std", false).map((row) => row.index), [3, 1, 4, 2, 0]);
  assert.deepEqual(sorted(rows, "std", true).map((row) => row.index), [2, 1, 4, 3, 0]);
});

test("names sort by their numbers", () => {
  const rows = ["fc10", "fc2", "fc1"].map((name, index) => rowOf(layer({ name }), index));
  assert.deepEqual(sorted(rows, "name", false).map((row) => row.name), ["fc1", "fc2", "fc10"]);
});

test("a filter is a glob if it has a wildcard, else a substring", () => {
  const names = ["conv1", "conv2", "fc", "block.conv1", "a+b"];
  const kept = (filter: string) => names.filter(matcher(filter));
  assert.deepEqual(kept("conv*"), ["conv1", "conv2"]);
  assert.deepEqual(kept("*conv[!2]"), ["conv1", "block.conv1"]);
  assert.deepEqual(kept("conv?, fc*"), ["conv1", "conv2", "fc"]);
  assert.deepEqual(kept("CONV"), ["conv1", "conv2", "block.conv1"]);
  assert.deepEqual(kept("a+b*"), ["a+b"]);
  assert.deepEqual(kept(""), names);
});
