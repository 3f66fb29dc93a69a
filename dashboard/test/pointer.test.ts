import assert from "node:assert/strict";
import { test } from "node:test";

import { above, getAt, partsOf, same, setAt, under } from "../src/spec/pointer";

const SPEC = { network: { layers: [{ name: "a" }, { name: "b", args: { "x/y~z": 1 } }] }, later: null };

test("a pointer resolves to its value, or to undefined", () => {
  assert.equal(getAt(SPEC, "/network/layers/1/name"), "b");
  assert.equal(getAt(SPEC, "/network/layers/1/args/x~1y~0z"), 1);
  assert.equal(getAt(SPEC, "/later"), null);
  assert.equal(getAt(SPEC, ""), SPEC);
  for (const nothing of ["/network/layers/2", "/network/layers/-1", "/network/layers/length", "/later/x", "/toString"]) assert.equal(getAt(SPEC, nothing), undefined);
});

test("names with slashes and tildes survive a round trip", () => {
  for (const name of ["a", "x/y~z", "~1", "", "0"]) assert.deepEqual(partsOf(under("", name)), [name]);
  assert.equal(above("/a/b"), "/a");
  assert.equal(above("/a"), "");
  assert.equal(above(""), null);
});

test("a change does not modify the original value or other values", () => {
  const before = structuredClone(SPEC);
  const after = setAt(SPEC, "/network/layers/0/name", "c");
  assert.deepEqual(SPEC, before);
  assert.equal(getAt(after, "/network/layers/0/name"), "c");
  assert.equal(getAt(after, "/network/layers/1"), SPEC.network.layers[1]);
});

test("undefined removes a key or an item of a list", () => {
  assert.deepEqual(setAt({ a: 1, b: 2 }, "/a", undefined), { b: 2 });
  assert.deepEqual(setAt([1, 2, 3], "/1", undefined), [1, 3]);
  assert.deepEqual(setAt({ a: { b: 1 } }, "/a/c", undefined), { a: { b: 1 } });
});

test("missing parents are created, and the order of keys is kept", () => {
  assert.deepEqual(setAt({}, "/data/fields/image/type", "dense"), { data: { fields: { image: { type: "dense" } } } });
  assert.equal(JSON.stringify(setAt({ a: 1, b: 2, c: 3 }, "/b", 4)), '{"a":1,"b":4,"c":3}');
  assert.deepEqual(setAt([1], "/5", 2), [1, 2]);
});

test("the name __proto__ is an ordinary name", () => {
  const made = setAt({}, "/__proto__/x", 1);
  assert.equal(({} as Record<string, unknown>)["x"], undefined);
  assert.equal(getAt(made, "/__proto__/x"), 1);
});

test("equality ignores the order of keys", () => {
  assert.ok(same({ a: [1, { b: null }], c: "x" }, { c: "x", a: [1, { b: null }] }));
  for (const [a, b] of [[{ a: 1 }, { a: 1, b: 2 }], [[1], [1, 2]], [[], {}], [0, "0"], [null, undefined], [{ a: 1 }, { b: 1 }]] as const) assert.ok(!same(a as never, b as never));
});
