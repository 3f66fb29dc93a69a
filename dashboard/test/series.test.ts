import assert from "node:assert/strict";
import { test } from "node:test";

import { align, between, clusters, csv, envelope, epochLadder, floorOf, ladder, nonfinitePoints, readAt, rows, sentence, smooth, weights } from "../src/charts/series";

test("smoothing is the weighted mean with weights w^k that add up to one", () => {
  const ys = [2, 1, 4, 3];
  const w = 0.6;
  const expected = ys.map((_, n) => {
    const weights = ys.slice(0, n + 1).map((_y, k) => w ** (n - k));
    return ys.slice(0, n + 1).reduce((sum, y, k) => sum + y * weights[k]!, 0) / weights.reduce((a, b) => a + b);
  });
  smooth(ys, w).forEach((y, n) => assert.ok(Math.abs(y! - expected[n]!) < 1e-12));
});

test("smoothing with weight 0 changes nothing, and a constant is unchanged from the first point", () => {
  assert.deepEqual(smooth([3, 1, 2], 0), [3, 1, 2]);
  for (const y of smooth([7, 7, 7, 7], 0.99)) assert.ok(Math.abs(y! - 7) < 1e-9);
});

test("smoothing skips NaN and Inf", () => {
  const [first, gap, last] = smooth([4, NaN, 8], 0.5);
  assert.equal(first, 4);
  assert.equal(gap, null);
  assert.ok(Math.abs(last! - (0.5 * 4 + 8) / 1.5) < 1e-12);
});

test("series are smoothed over the same range of x, independent of their density", () => {
  const xs = Array.from({ length: 101 }, (_, step) => step);
  const [dense, sparse] = weights([{ xs }, { xs: xs.filter((step) => step % 10 === 0) }], 0.9);
  assert.equal(dense, 0.9);
  assert.ok(Math.abs(sparse! - 0.9 ** 10) < 1e-12);
  assert.deepEqual(weights([{ xs: [3] }, { xs: [] }], 0.9), [0.9, 0.9]);
});

test("the envelope of a thinned series has a window of three for every two points, and contains all of them", () => {
  const band = envelope({ xs: [0, 3, 10, 12, 20], ys: [5, 1, 4, 2, 9] });
  assert.deepEqual(band.low, [1, 2]);
  assert.deepEqual(band.high, [5, 9]);
  assert.deepEqual(band.xs, [5, 15]);
  assert.deepEqual(band.ys, [3, 5.5]);
  const even = envelope({ xs: [0, 1, 2, 3], ys: [5, 1, 4, 9] });
  assert.deepEqual([even.xs, even.low, even.high], [[1, 2], [1, 1], [5, 9]]);
  assert.deepEqual(envelope({ xs: [2, 4], ys: [5, 1] }), { xs: [3], ys: [3], low: [1], high: [5] });
  assert.deepEqual(envelope({ xs: [], ys: [] }).xs, []);
});

test("the middle of a thinned series is unaffected by an interval with one or three points", () => {
  // The min of each interval is 0 and its max 1, in any order: the middle is always 0.5.
  const stretch = (n: number) => ((n * n) % 7 < 3 ? [0, 1] : [1, 0]);
  const half = (from: number) => Array.from({ length: 40 }, (_, n) => stretch(from + n)).flat();
  for (const more of [[], [0.5], [0], [1], [0, 0.5, 1]]) {
    for (const first of [[], [0.3]]) {
      const ys = [...first, ...half(0), ...more, ...half(40)];
      const band = envelope({ xs: ys.map((_, x) => x), ys });
      const joint = first.length + 80 + more.length / 2;
      const away = <T>(column: readonly T[]) => new Set(column.filter((_, place) => Math.abs(band.xs[place]! - joint) > 4));
      assert.deepEqual([away(band.ys), away(band.low), away(band.high)], [new Set([0.5]), new Set([0]), new Set([1])]);
    }
  }
});

test("an envelope keeps NaN and Inf in place, separate from their neighbors", () => {
  const band = envelope({ xs: [0, 1, 2, 3, 4], ys: [5, NaN, 1, 3, Infinity] });
  assert.deepEqual(band.xs, [0, 1, 2.5, 4]);
  assert.ok(Number.isNaN(band.ys[1]!));
  assert.equal(band.ys[3], Infinity);
  assert.deepEqual(band.low.filter(Number.isFinite), [5, 1]);
});

test("series with different steps share one x: undefined if one has no point, null if it is NaN or Inf", () => {
  const joined = align([
    { xs: [0, 2, 4], columns: [[1, NaN, 3], [0.5, null, 2]] },
    { xs: [1, 4], columns: [[10, Infinity]] },
  ]);
  assert.deepEqual(joined.xs, [0, 1, 2, 4]);
  assert.deepEqual(joined.columns[0], [1, undefined, null, 3]);
  assert.deepEqual(joined.columns[1], [0.5, undefined, null, 2]);
  assert.deepEqual(joined.columns[2], [undefined, 10, undefined, null]);
});

test("NaN and Inf are found with their series and step", () => {
  const odd = nonfinitePoints([
    { label: "b", xs: [0, 7], ys: [1, -Infinity] },
    { label: "a", xs: [0, 3], ys: [1, NaN] },
  ]);
  assert.deepEqual(odd.map(({ x, label }) => [x, label]), [[3, "a"], [7, "b"]]);
});

test("marks closer than the gap are one", () => {
  const found = clusters([50, 10, 12, 11, 90], (x) => x, 5);
  assert.deepEqual(found.map(({ marks }) => marks), [[10, 11, 12], [50], [90]]);
});

test("the description has the trend, the range and the count of NaN and Inf", () => {
  const xs = Array.from({ length: 4001 }, (_, step) => step);
  const ys = xs.map((step) => 2.1 - (1.79 * step) / 4000);
  ys[3120] = ys[3121] = NaN;
  assert.equal(sentence([{ label: "loss", xs, ys }], "step"), "loss fell from 2.1 to 0.31 over 4,000 steps, 2 NaN");
  assert.equal(sentence([{ label: "accuracy", xs: [0, 2], ys: [0.5, 0.9] }], "epoch"), "accuracy rose from 0.5 to 0.9 over 2 epochs");
  assert.equal(sentence([{ label: "loss", xs: [3], ys: [Infinity] }], "step"), "loss has no finite value, 1 Inf");
  assert.equal(sentence([{ label: "lr", xs: [0, 1], ys: [0.1, 0.1] }], "step"), "lr stayed at 0.1 over 1 step");
  assert.equal(sentence([], "step"), "No values yet");
});

test("a step is interpolated between two anchors and extrapolated beyond them", () => {
  assert.equal(between([0, 10, 20], [100, 200, 400], 15), 300);
  assert.equal(between([0, 10, 20], [100, 200, 400], 25), 500);
  assert.equal(between([0, 10, 20], [100, 200, 400], -5), 50);
});

test("a ladder drops points that do not ascend", () => {
  assert.deepEqual(ladder([[5, 9], [0, 1], [3, 4], [4, 4], [5, 8]]), [[0, 3, 5], [1, 4, 8]]);
});

test("epochs begin as in the columns; the last has the mean length, or the planned one if it is the only one", () => {
  assert.deepEqual(epochLadder([0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2], null), [[0, 2, 4, 6], [0, 1, 2, 3]]);
  assert.deepEqual(epochLadder([0, 1], [0, 0], 10), [[0, 10], [0, 1]]);
  assert.equal(between(...epochLadder([0, 1, 2, 3], [0, 0, 1, 1], null), 3), 1.5);
});

test("the table has the original values, and the CSV every digit", () => {
  const series = [
    { label: "loss", xs: [0, 1], ys: [0.1 + 0.2, NaN] },
    { label: 'a "b", c', xs: [1], ys: [5] },
  ];
  assert.deepEqual(rows(series), [{ x: 0, values: [0.30000000000000004, undefined] }, { x: 1, values: [NaN, 5] }]);
  assert.equal(csv(series, "step"), 'step,loss,"a ""b"", c"\n0,0.30000000000000004,\n1,NaN,5\n');
});

test("a value at the cursor is the newest before it, never a later one", () => {
  const validation = { xs: [99, 199, 299], ys: [0.5, 0.7, 0.9] };
  assert.equal(readAt(validation, 98), null);
  assert.deepEqual([99, 150, 198, 199, 1000].map((x) => readAt(validation, x)), [
    { x: 99, y: 0.5 }, { x: 99, y: 0.5 }, { x: 99, y: 0.5 }, { x: 199, y: 0.7 }, { x: 299, y: 0.9 },
  ]);
});

test("a band that reaches below 0 is clipped at the bottom of a logarithmic axis", () => {
  assert.equal(floorOf([{ label: "loss", xs: [0, 1], ys: [0.5, 0.03], low: [0.2, -0.4], high: [0.8, 0.46] }]), 0.01);
  assert.equal(floorOf([{ label: "lr", xs: [0], ys: [0.001] }]), 0.001);
  assert.equal(floorOf([{ label: "none", xs: [0, 1], ys: [-1, NaN] }]), -Infinity);
});
