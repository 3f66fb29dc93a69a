import assert from "node:assert/strict";
import { test } from "node:test";

import { colorOf, INFINITE, NAN, sequential } from "../src/charts/palette";
import { powersAround } from "../src/charts/powers";
import { flowOf, gradientTrend } from "../src/views/inside/layers/flow";
import { layersAt, stepsOf } from "../src/views/inside/layers/history";
import { find, selected, tensorNames } from "../src/views/inside/kinds";
import { BadFile, readNpy } from "../src/views/inside/tensors/npy";
import { bodyOf, cost, draftFrom, draftOf, patchOf, type Probe, recordsRank, whenText } from "../src/views/inside/probes/probe";
import { atMost, axisOf, borders, columnAt, densities, placeOfStep } from "../src/views/inside/statistics/histogram-axis";
import { selectedAxes, indexText, rangeOf, sliceOf, tilesOf } from "../src/views/inside/tensors/tiles";
import { valueRows } from "../src/views/inside/tensors/value-rows";
import { figures, layer } from "./inside-layers";

/** What numpy.lib.format writes. */
function npy(descr: string, shape: number[], bytes: Uint8Array): ArrayBuffer {
  const text = `{'descr': '${descr}', 'fortran_order': False, 'shape': (${shape.join(", ")}${shape.length === 1 ? "," : ""}), }`;
  const head = new TextEncoder().encode(text.padEnd(Math.ceil((text.length + 11) / 64) * 64 - 11, " ") + "\n");
  const whole = new Uint8Array(10 + head.length + bytes.length);
  whole.set([0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59, 1, 0, head.length & 255, head.length >> 8]);
  whole.set(head, 10);
  whole.set(bytes, 10 + head.length);
  return whole.buffer;
}
const raw = (typed: ArrayBufferView) => new Uint8Array(typed.buffer, typed.byteOffset, typed.byteLength);

const FILES: [string, Uint8Array, number[]][] = [
  ["<f4", raw(new Float32Array([1.5, NaN, -Infinity])), [1.5, NaN, -Infinity]],
  ["<f8", raw(new Float64Array([Math.PI, -0, 1e300])), [Math.PI, -0, 1e300]],
  ["<f2", raw(new Uint16Array([0x3c00, 0xc001, 0x0001, 0x7c00, 0x7e00, 0x7bff])), [1, -2.001953125, 2 ** -24, Infinity, NaN, 65504]],
  ["<i8", raw(new BigInt64Array([-5n, 2n ** 40n])), [-5, 2 ** 40]],
  ["|u1", new Uint8Array([0, 255]), [0, 255]],
  ["|b1", new Uint8Array([0, 1]), [0, 1]],
  ["<c8", raw(new Float32Array([3, 4])), [5]],
];
for (const [descr, bytes, values] of FILES) {
  test(`a .npy file of ${descr} is read`, () => {
    const tensor = readNpy(npy(descr, [values.length], bytes));
    assert.deepEqual([...tensor.values], values);
    assert.deepEqual(tensor.shape, [values.length]);
  });
}

test("the shape of a .npy file is read, of a scalar too", () => {
  assert.deepEqual(readNpy(npy("<f4", [1, 2, 3], raw(new Float32Array(6)))).shape, [1, 2, 3]);
  const scalar = readNpy(npy("<f4", [], raw(new Float32Array([7]))));
  assert.deepEqual([scalar.shape, [...scalar.values]], [[], [7]]);
});

test("a file that is not .npy, or truncated, is rejected", () => {
  assert.throws(() => readNpy(new TextEncoder().encode("{\"a\": 1, \"b\": 2}").buffer as ArrayBuffer), BadFile);
  assert.throws(() => readNpy(npy("<f4", [3], new Uint8Array(8))), BadFile);
  assert.throws(() => readNpy(npy("|O", [1], new Uint8Array(8))), BadFile);
});

test("a slice is one example of a batch, all filters, and every n-th value of a large tensor", () => {
  assert.equal(selectedAxes([50, 8, 8, 8], "output"), 1);
  assert.deepEqual(sliceOf([50, 8, 8, 8], "output", [7]), { slice: "7", stride: 1 });
  assert.deepEqual(sliceOf([50, 8, 8, 8], "output", [99]), { slice: "49", stride: 1 });
  assert.deepEqual(sliceOf([50, 10], "output", []), { slice: null, stride: 1 });
  assert.deepEqual(sliceOf([8, 1, 3, 3], "param", []), { slice: null, stride: 1 });
  assert.deepEqual(sliceOf([8, 4, 3, 3, 3], "param", [2]), { slice: "2", stride: 1 });
  assert.deepEqual(sliceOf([2000, 2000], "param", []), { slice: "::2,::2", stride: 2 });
  assert.deepEqual(sliceOf([4, 64, 512, 512], "output", [1]), { slice: "1,:,::5,::5", stride: 5 });
});

test("tiles are maps, filters with their inputs, a matrix, or a strip", () => {
  const of = (shape: number[]) => tilesOf({ shape, values: new Float64Array(shape.reduce((a, b) => a * b, 1)) });
  const maps = of([8, 4, 5]);
  assert.deepEqual([maps.starts.length, maps.height, maps.width, maps.starts[3]], [8, 4, 5, 60]);
  const filters = of([6, 3, 2, 2]);
  assert.deepEqual([filters.starts.length, filters.columns, filters.labels[4]], [18, 3, "1, 1"]);
  assert.deepEqual([of([7]).height, of([7]).width, of([]).starts.length, of([600, 2, 2]).starts.length, of([600, 2, 2]).total], [1, 7, 1, 512, 600]);
});

test("an index includes the selected axes and the stride", () => {
  assert.equal(indexText([8, 4, 5], 27, [7], 2), "7, 1, 2, 4");
  assert.equal(indexText([3], 2, [], 1), "2");
});

test("a range with negative values is symmetric around zero, and NaN and Inf are counted", () => {
  assert.deepEqual(rangeOf(new Float64Array([-1, 3, NaN, Infinity])), { low: -3, high: 3, nan: 1, inf: 1 });
  assert.deepEqual(rangeOf(new Float64Array([2, 5])), { low: 2, high: 5, nan: 0, inf: 0 });
  assert.deepEqual(rangeOf(new Float64Array([NaN])), { low: 0, high: 0, nan: 1, inf: 0 });
});

test("colors begin and end as viridis does; NaN and Inf have their own", () => {
  assert.ok(sequential(0).every((channel, n) => Math.abs(channel - [68, 1, 84][n]!) < 8), String(sequential(0)));
  assert.ok(sequential(1).every((channel, n) => Math.abs(channel - [253, 231, 37][n]!) < 12), String(sequential(1)));
  assert.deepEqual([colorOf(NaN, 0, 1), colorOf(-Infinity, 0, 1)], [NAN, INFINITE]);
  assert.ok(colorOf(0, -2, 2).every((channel) => channel > 235));
});

test("densities have mean one over the axis, linear or logarithmic, however fine the cells are", () => {
  const edges = [-8, -1, -0.1, 0, 0.2, 1, 4];
  const counts = [1, 5, 20, 30, 6, 2];
  for (const scale of ["linear", "log"] as const) {
    const axis = axisOf(edges, scale);
    for (const cells of [3, 60, 1000]) {
      const sum = densities(counts, edges, axis, cells).reduce((all, one) => all + one / cells, 0);
      assert.ok(Math.abs(sum - 1) < 1e-9);
    }
    assert.deepEqual([axis.place(-8), axis.place(4)], [0, 1]);
    assert.ok(axis.ticks.includes(0) && axis.ticks.every((tick) => tick >= -8 && tick <= 4));
  }
});

test("bins narrower than a cell are added up: a uniform distribution is uniform in every cell", () => {
  const edges = [0, ...Array.from({ length: 40 }, (_, power) => 2 ** (power - 39))]; // as bins of floats lie
  const counts = edges.slice(1).map((edge, bar) => (edge - edges[bar]!) * 2 ** 39);
  for (const one of densities(counts, edges, axisOf(edges, "linear"), 20)) assert.ok(Math.abs(one - 1) < 1e-9);
});

test("columns of a heat map are at their steps, also if the interval was widened", () => {
  const edges = borders([0, 10, 20, 40, 80]);
  assert.deepEqual(edges, [-5, 5, 15, 30, 60, 100]);
  assert.deepEqual([-9, 0, 14.9, 15, 59, 61, 500].map((x) => columnAt(edges, x)), [0, 0, 1, 2, 3, 4, 4]);
  assert.deepEqual(borders([7]), [6.5, 7.5]);
});

test("a thinned list includes the first and the last", () => {
  assert.deepEqual(atMost(3, 5), [0, 1, 2]);
  assert.deepEqual(atMost(11, 3), [0, 5, 10]);
});

test("a requested step selects the newest one that is not after it", () => {
  assert.deepEqual([placeOfStep([0, 5, 10], 7), placeOfStep([0, 5, 10], null), placeOfStep([5, 10], 1)], [1, 2, 0]);
});

test("gradient flow has the gradient of all parameters of a layer together, with its mark", () => {
  const grads = (l2: number, of = {}) => ({ "fc.weight": { param_grad: figures({ l2, absmax: l2, ...of }) } });
  const layers = [layer({ name: "a", tensors: grads(1e-9) }), layer({ name: "r", parameter_shapes: {} }), layer({ name: "b", tensors: grads(3) }), layer({ name: "c", tensors: grads(200) }), layer({ name: "d", tensors: grads(1, { nan: 1 }) }), layer({ name: "e" })];
  const points = flowOf(layers, "l2", "param_grad");
  assert.deepEqual(points.map((point) => [point.name, point.place, point.value, point.mark]), [["a", 0, 1e-9, "vanishing"], ["b", 2, 3, null], ["c", 3, 200, "exploding"], ["d", 4, NaN, "nonfinite"], ["e", 5, null, null]]);
  assert.equal(flowOf(layers, "rms", "param_grad")[1]!.value, Math.sqrt(9 / 16));
  assert.deepEqual(gradientTrend(points), { ratio: 1e-9 / 200, mark: "vanishing" });
  assert.equal(gradientTrend(points.slice(1, 3))!.mark, null);
  assert.equal(gradientTrend([...points.slice(2, 3), { ...points[1]!, value: 1 }])!.mark, "exploding");
});

test("bars have the powers of ten around their values", () => {
  assert.deepEqual(powersAround([0.02, 5, null, NaN, 0]), [-2, 1]);
  assert.deepEqual(powersAround([1e-60, 1]), [-20, 0]);
  assert.deepEqual(powersAround([null, 0]), [-1, 1]);
});

test("the layers at a step have its statistics and no others", () => {
  const newest = layer({ stats: { output: figures({ step: 20, mean: 9 }) }, tensors: { "fc.weight": { param: figures({ step: 20 }) } } });
  const values = { mean: [0.5], std: [1], min: [0], max: [1], l2: [2], absmax: [1], zeros: [0], nan: [0], inf: [0] };
  const series = [{ layer: "fc", kind: "output", phase: "train", rank: null, step: [10], values }, { layer: "fc", kind: "output", phase: "evaluate", rank: null, step: [10], values: { ...values, mean: [7] } }, { layer: "fc.bias", kind: "param_grad", phase: "train", rank: null, step: [10], values }];
  const [at] = layersAt([newest], series, 10);
  assert.deepEqual([at!.stats["output"]!.mean, at!.stats["output"]!.step, Object.keys(at!.tensors)], [0.5, 10, ["fc.bias"]]);
  assert.deepEqual(stepsOf([{ step: [0, 10] }, { step: [5, 10] }]), [0, 5, 10]);
});

test("a layer has the kinds that apply to it, and the name of a tensor finds its layer", () => {
  const conv = layer({ name: "conv", output_shapes: { conv: [1] }, parameter_shapes: { "conv.weight": [1] }, input_names: ["conv"], state_names: ["exp_avg"] });
  assert.deepEqual(tensorNames(conv).map(([kind]) => kind), ["output", "output_grad", "input", "param", "param_grad", "update", "optim_state"]);
  assert.deepEqual(tensorNames(conv).at(-1)![1], ["conv.weight.exp_avg"]);
  assert.equal(find([layer(), conv], "conv.weight")!.place, 1);
  assert.equal(find([conv], "nothing"), null);
  assert.equal(find([conv], "loss.rows")!.tensor, "loss.rows");
  assert.deepEqual(selected(conv, null, "conv.weight"), { kind: "param", tensor: "conv.weight" });
  assert.deepEqual(selected(conv, "param_grad", "gone"), { kind: "param_grad", tensor: "conv.weight" });
  assert.deepEqual(selected({ ...conv, tensors: { "conv.weight": { update: figures() } } }, null, null), { kind: "update", tensor: "conv.weight" });
});

test("a draft becomes a request body with only the fields that apply", () => {
  const draft = { ...draftOf("conv*, fc", ["output"]), want: ["stats", "full"], slice: "0:4", maxBytes: "100", overhead: "0.5" };
  assert.deepEqual(bodyOf(draft), { layers: ["conv*", "fc"], kinds: ["output"], want: ["stats", "full"], phase: "train", point: "raw", start: 0, every: 10, slice: "0:4", max_bytes: 100, max_overhead: 0.005 });
  const at = bodyOf({ ...draft, when: "at", at: "3, 4", want: ["stats"] });
  assert.deepEqual([at["at"], "every" in at, "slice" in at, "max_bytes" in at, "max_overhead" in at], [[3, 4], false, false, false, false]);
  assert.equal(bodyOf({ ...draft, overhead: "" })["max_overhead"], null);
  assert.equal(bodyOf({ ...draft, every: "often" })["every"], "often");
  const patch = patchOf({ ...draft, when: "nonfinite", want: ["stats"] });
  assert.deepEqual([patch["on"], patch["every"], patch["at"], patch["slice"]], ["nonfinite", null, null, null]);
});

test("a probe passes through the form unchanged, and its interval is shown", () => {
  const probe = { layers: ["fc"], kinds: ["output"], every: 5, at: null, on: null, want: ["stats"], slice: null, max_bytes: null, max_overhead: 0.03, phase: "train", point: "raw", start: 2, stop: 90, ranks: "merged", every_now: 20 } as unknown as Probe;
  assert.deepEqual(bodyOf(draftFrom(probe)), { layers: ["fc"], kinds: ["output"], want: ["stats"], phase: "train", point: "raw", start: 2, every: 5, stop: 90, max_overhead: 0.03 });
  assert.equal(whenText(probe), "every 20 steps (requested 5, widened by its budget)");
  assert.equal(whenText({ ...probe, every: 1, every_now: 1 }), "every step");
  assert.equal(whenText({ ...probe, every: null, every_now: null, at: [3, 4] }), "at steps 3, 4");
});

test("the ranks of a probe pass through the form, and empty ones are the default", () => {
  const probe = (ranks: Probe["ranks"]) => ({ layers: ["fc"], kinds: ["output"], every: 5, at: null, on: null, want: ["stats"], slice: null, max_bytes: null, max_overhead: null, phase: "train", point: "raw", start: 0, stop: null, ranks }) as unknown as Probe;
  for (const ranks of ["all", [0, 3]] as const) assert.deepEqual(bodyOf(draftFrom(probe(ranks as Probe["ranks"])))["ranks"], ranks);
  assert.equal("ranks" in bodyOf(draftFrom(probe("merged"))), false);
  assert.equal(patchOf(draftFrom(probe("merged")))["ranks"], null);
  assert.deepEqual(bodyOf({ ...draftOf("fc", ["output"], "1"), ranks: "0 x" })["ranks"], [0, "x"]);
  assert.deepEqual([[probe("all"), 7], [probe([0, 3]), 3], [probe([0, 3]), 1], [probe("merged"), 0]].map(([one, rank]) => recordsRank(one as Probe, rank as number)), [true, true, false, false]);
});

test("costs have a suitable unit", () => {
  assert.deepEqual([cost(2.1e-5), cost(5.3e-3), cost(0.04), cost(2)], ["21 µs", "5.30 ms", "40.0 ms", "2.0 s"]);
});

test("rows of values follow the last axis; truncated values keep their indices", () => {
  assert.deepEqual(valueRows([[1, 2], [3, 4]], [2, 2], false), { rows: [{ index: "0", values: [1, 2] }, { index: "1", values: [3, 4] }], width: 2 });
  assert.deepEqual(valueRows([[[1, 2]], [["NaN", 4]]], [2, 1, 2], false).rows[1], { index: "1, 0", values: ["NaN", 4] });
  assert.deepEqual(valueRows([1, 2, 3, 4], [50, 2], true).rows[1], { index: "1", values: [3, 4] });
  assert.deepEqual(valueRows(5, [], false).rows, [{ index: "0", values: [5] }]);
  assert.deepEqual(valueRows([[1, 2], [3, 4]], [2], false).rows[0]!.values, [[1, 2], [3, 4]]);
});
