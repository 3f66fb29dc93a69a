import assert from "node:assert/strict";
import { test } from "node:test";

import { between, boxes, idOf, readers } from "../src/views/inside/graph/groups";
import { BOX, place, ranks } from "../src/views/inside/graph/layout";

const names = (num: number, name: (n: number) => string) => Array.from({ length: num }, (_, n) => name(n));

test("a small network is shown layer by layer", () => {
  assert.deepEqual(boxes(["a", "b_1", "b_2"], new Set()).map((box) => box.label), ["a", "b_1", "b_2"]);
});

test("a large one is grouped by name prefixes, and every layer is in one box", () => {
  const all = names(1000, (n) => `block${Math.floor(n / 100)}_fc${n}`);
  const shown = boxes(all, new Set());
  assert.deepEqual(shown.map((box) => box.label), names(10, (n) => `block${n}_*`));
  assert.deepEqual(shown.map((box) => [box.from, box.to]), names(10, () => "").map((_, n) => [n * 100, n * 100 + 100]));
});

test("an open group is replaced by its members, in place", () => {
  const all = names(1000, (n) => `block${Math.floor(n / 100)}_fc${n}`);
  const shown = boxes(all, new Set([idOf(100, 200)]));
  assert.equal(shown.length, 9 + 100);
  assert.deepEqual([shown[1]!.label, shown[100]!.label, shown[101]!.label], ["block1_fc100", "block1_fc199", "block2_*"]);
});

test("dots divide names as underscores do, and names without either are grouped by position", () => {
  const dotted = names(400, (n) => `encoder.layer${Math.floor(n / 4)}.part${n % 4}`);
  assert.equal(boxes(dotted, new Set()).length, 100);
  const plain = boxes(names(2000, (n) => `fc${n}`), new Set());
  assert.equal(plain.length, 40);
  assert.equal(plain[0]!.label, "fc0 … fc49");
  assert.equal(plain.reduce((sum, box) => sum + box.to - box.from, 0), 2000);
});

test("names with a common prefix that are not adjacent are not one group, so that groups have no cycles", () => {
  const all = names(300, (n) => (n % 2 ? `b_${n}` : `a_${n}`));
  const shown = boxes(all, new Set());
  const { edges } = readers(all.map((name, n) => ({ name, inputs: n ? [all[n - 1]!] : [] })));
  assert.ok(between(shown, edges).every(([from, to]) => from < to));
});

test("inputs are layers, leaves of layers, or fields of the data", () => {
  const { edges, fields } = readers([{ name: "lstm", inputs: ["words"] }, { name: "fc", inputs: ["lstm.1.0", "words"] }]);
  assert.deepEqual(edges, [[0, 1]]);
  assert.deepEqual([...fields], [["words", [0, 1]]]);
});

test("edges between groups are not duplicated, and there are none within a group", () => {
  const shown = [{ id: "", from: 0, to: 2, label: "" }, { id: "", from: 2, to: 4, label: "" }];
  assert.deepEqual(between(shown, [[0, 1], [0, 2], [1, 3], [2, 3]]), [[0, 1]]);
});

test("each layer is below all its inputs, and a source just above its first reader", () => {
  const edges: [number, number][] = [[0, 1], [1, 2], [2, 3], [0, 3], [4, 3]];
  assert.deepEqual(ranks(5, edges), [0, 1, 2, 3, 2]);
});

test("branches are side by side and no two boxes overlap", () => {
  const edges: [number, number][] = [];
  for (let branch = 1; branch <= 6; branch++) edges.push([0, branch], [branch, 7]);
  edges.push([0, 7], [7, 8]);
  const { nodes, routes, width, height } = place(9, edges);
  for (let a = 0; a < 9; a++) {
    for (let b = a + 1; b < 9; b++) {
      const apart = Math.abs(nodes[a]!.y - nodes[b]!.y) >= BOX.height || Math.abs(nodes[a]!.x - nodes[b]!.x) >= BOX.width;
      assert.ok(apart, `${a} and ${b} overlap`);
    }
    assert.ok(nodes[a]!.x >= BOX.width / 2 - 1 && nodes[a]!.x <= width - BOX.width / 2 + 1 && nodes[a]!.y <= height);
  }
  assert.equal(new Set(nodes.slice(1, 7).map((node) => node.y)).size, 1);
  const skip = routes[12]!;
  assert.equal(skip.length, 3);
  assert.ok(nodes.slice(1, 7).every((node) => Math.abs(node.x - skip[1]!.x) >= BOX.width / 2), "the edge that skips a row goes through a box");
});

test("a chain is one straight line", () => {
  const { nodes } = place(50, names(49, () => "").map((_, n): [number, number] => [n, n + 1]));
  assert.equal(new Set(nodes.map((node) => node.x)).size, 1);
  assert.deepEqual(nodes.map((node) => node.y), [...nodes.map((node) => node.y)].sort((a, b) => a - b));
});

test("600 boxes with edges that skip rows are laid out", () => {
  const edges = names(599, () => "").flatMap((_, n): [number, number][] => (n > 20 ? [[n, n + 1], [n - 20, n + 1]] : [[n, n + 1]]));
  const { nodes, routes } = place(600, edges);
  assert.equal(nodes.length, 600);
  assert.ok(routes.every((route) => route.every((point) => Number.isFinite(point.x) && Number.isFinite(point.y))));
});
