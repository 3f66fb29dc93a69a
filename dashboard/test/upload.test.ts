import assert from "node:assert/strict";
import { test } from "node:test";

import { formatOf } from "../src/views/datasets/formats";

const FORMATS = [{ name: "idx.zip", suffixes: [".idx.zip", ".zip"] }, { name: "images.zip", suffixes: [".images.zip"] }, { name: "idx", suffixes: [".idx", "-ubyte"] }, { name: "none" }];

test("the longest suffix in the catalog decides the format of a file", () => {
  assert.equal(formatOf("clothes.IMAGES.zip", FORMATS), "images.zip");
  assert.equal(formatOf("mnist.zip", FORMATS), "idx.zip");
  assert.equal(formatOf("train-labels-idx1-ubyte", FORMATS), "idx");
  assert.equal(formatOf("rows.csv", FORMATS), "");
});
