import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";

import type { Json } from "../src/spec/pointer";
import { literal, quoted, snippet } from "../src/spec/snippets";

const NASTY: Json = { name: "it's $HOME `id` \\ \"x\" é 😀 \u0000\u007f\u2028", "a/b": [true, false, null, 1e-7, 12345678901234, -0.5, []], labels: {}, long: Array.from({ length: 40 }, (_, at) => `layer${at}`), nested: { a: { b: [{ c: "JSON" }] } } };

test("Python parses the same value", () => {
  const read = execFileSync("python3", ["-c", `import json; print(json.dumps(${literal(NASTY)}))`], { encoding: "utf8" });
  assert.deepEqual(JSON.parse(read), NASTY);
});

test("a shell passes the same value, without expansion", () => {
  const curl = snippet("curl", NASTY, "http://127.0.0.1:8420").replace(/^curl [^]*?-d @-/, "cat");
  assert.deepEqual(JSON.parse(execFileSync("sh", ["-c", curl], { encoding: "utf8" })), NASTY);
  const cli = snippet("CLI", NASTY, "http://127.0.0.1:8420").replace(/^GLASSHOUSE_URL=\S+ glasshouse submit - --watch/, "cat");
  assert.deepEqual(JSON.parse(execFileSync("sh", ["-c", cli], { encoding: "utf8" })), NASTY);
});

test("a URL is one shell word, whatever its characters", () => {
  for (const address of ["http://127.0.0.1:8420", "http://[::1]:8420/a b", "it's", "$(id)"]) {
    assert.equal(execFileSync("sh", ["-c", `printf %s ${quoted(address)}`], { encoding: "utf8" }), address);
  }
});

test("no snippet contains a key, only its environment variable", () => {
  assert.match(snippet("curl", {}, "http://x"), /Bearer \$GLASSHOUSE_API_KEY"/);
  for (const tool of ["curl", "Python", "CLI"] as const) assert.doesNotMatch(snippet(tool, {}, "http://x"), /gh_/);
});

test("short Python literals are on one line, long ones have one item per line", () => {
  assert.equal(literal({ a: [1, 2] }), '{"a": [1, 2]}');
  assert.match(literal(NASTY), /\n {4}"labels": \{\},\n/);
});
