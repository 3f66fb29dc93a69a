import assert from "node:assert/strict";
import { test } from "node:test";

import type { Json } from "../src/spec/pointer";
import { readList, readLoose, readNumber, writeList, writeLoose } from "../src/spec/loose";

test("a value in one line is parsed as intended", () => {
  const cases: [string, Json | undefined][] = [["0.01", 0.01], ["same", "same"], ["3, 3", [3, 3]], ["(1, 2)", [1, 2]], ["[3]", [3]], ["3,", [3]], ["true", true], ["null", null], ["", undefined], ["  ", undefined], ['"3"', "3"], ["a, b", "a, b"], ["{\"a\": 1}", { a: 1 }], ["1, x", "1, x"]];
  for (const [text, value] of cases) assert.deepEqual(readLoose(text), value, text);
});

test("every value survives a round trip", () => {
  for (const value of [0, -1.5, 1e-7, "same", "3", "true", "3, 3", "", null, true, [3, 3], [3], [], [[1, 2], [3]], { a: [null] }, "a \"b\""] as Json[]) assert.deepEqual(readLoose(writeLoose(value)), value, writeLoose(value));
});

test("text that is not a number is kept, so that the service can report it", () => {
  assert.equal(readNumber("1e-3"), 0.001);
  assert.equal(readNumber("fast"), "fast");
  assert.equal(readNumber(" "), undefined);
  assert.equal(readNumber("Infinity"), "Infinity");
});

test("lists are written with commas, of names or of numbers", () => {
  assert.deepEqual(readList("fc, label", false), ["fc", "label"]);
  assert.deepEqual(readList("64, 32,", true), [64, 32]);
  assert.deepEqual(readList("64, x", true), [64, "x"]);
  assert.deepEqual(readList("10", false), ["10"]);
  assert.equal(readList(" , ", false), undefined);
  assert.equal(writeList(["fc", 3]), "fc, 3");
});
