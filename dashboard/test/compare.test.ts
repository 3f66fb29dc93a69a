import assert from "node:assert/strict";
import { test } from "node:test";

import { differing, flatten, groupsBy } from "../src/views/compare/differing";
import { places } from "../src/views/compare/parallel";
import { along, spread } from "../src/views/compare/spread";

const spec = (lr: number, seed: number, width = 4) => ({
  name: `job ${seed}`,
  seed,
  network: { layers: [{ name: "fc", type: "Linear", args: { out_features: width } }, { name: "out", type: "ReLU" }] },
  optimizer: { args: { lr } },
});

test("only keys that differ between jobs are listed, without names", () => {
  const found = differing([spec(0.1, 1), spec(0.1, 2), spec(0.2, 1)].map((one) => flatten(one)));
  assert.deepEqual(found, [
    { key: "seed", values: [1, 2, 1] },
    { key: "optimizer.args.lr", values: [0.1, 0.1, 0.2] },
  ]);
});

test("a layer is matched by name if another is inserted before it", () => {
  const longer = spec(0.1, 1);
  longer.network.layers.unshift({ name: "first", type: "Identity" } as never);
  const keys = differing([spec(0.1, 1), longer].map((one) => flatten(one))).map((one) => one.key);
  assert.deepEqual(keys, ["network.layers.first.name", "network.layers.first.type"]);
});

test("jobs with the same settings are one group", () => {
  const specs = [spec(0.1, 1), spec(0.2, 1), spec(0.1, 2)].map((one) => flatten(one));
  assert.deepEqual([...groupsBy(["optimizer.args.lr"], specs)], [["lr = 0.1", [0, 2]], ["lr = 0.2", [1]]]);
  assert.deepEqual([...groupsBy([], specs)], [["all", [0, 1, 2]]]);
});

test("a line is interpolated linearly between its steps and null outside of them", () => {
  assert.deepEqual(along({ xs: [2, 4, 8], ys: [1, null, 4] }, [0, 2, 4, 5, 8, 9]), [null, 1, 2, 2.5, 4, null]);
});

test("mean and standard deviation are over the lines with a value", () => {
  const found = spread([{ xs: [0, 1], ys: [1, 2] }, { xs: [0, 1, 2], ys: [3, 6, 7] }]);
  assert.deepEqual(found.xs, [0, 1, 2]);
  assert.deepEqual(found.mean, [2, 4, 7]);
  assert.deepEqual(found.std, [Math.SQRT2, Math.sqrt(8), 0]);
  assert.deepEqual(found.lines, [2, 2, 1]);
});

test("a NaN of one line is excluded", () => {
  assert.deepEqual(spread([{ xs: [0], ys: [NaN] }, { xs: [0], ys: [5] }]).mean, [5]);
});

test("numbers are to scale, logarithmic if they span a decade; names are evenly spaced", () => {
  assert.deepEqual(places([0, 5, 10, undefined]).at, [0, 0.5, 1, null]);
  const rates = places([0.001, 0.01, 0.1]).at.map((one) => Math.round((one ?? 0) * 1000) / 1000);
  assert.deepEqual(rates, [0, 0.5, 1]);
  assert.deepEqual(places(["b", "a", "c", "a"]).at, [0.5, 0, 1, 0]);
  assert.deepEqual(places([3, 3]).at, [0.5, 0.5]);
});
