import assert from "node:assert/strict";
import { test } from "node:test";

import { escaped, filtersOf, parametersOf, searchText } from "../src/views/job/logs/filters";

const of = (query: string) => filtersOf(new URLSearchParams(query));

test("a text is searched as it is", () => {
  const text = "a.b|c*[1]{2}(x)+?^$\\ ü";
  assert.match(`before ${text} after`, new RegExp(escaped(text)));
  assert.doesNotMatch("axb|c", new RegExp(escaped("a.b")));
  assert.equal(parametersOf(of(`text=${encodeURIComponent("a.b")}`)).grep, "a\\.b");
});

test("the address of the page has all filters", () => {
  const filters = of("rank=3&level=warning&since=10m&grep=a|b");
  assert.deepEqual(filters, { rank: "3", level: "warning", since: "10m", search: "a|b", isPattern: true });
  assert.deepEqual(parametersOf(filters), { rank: "3", level: "warning", since: "10m", grep: "a|b" });
  assert.equal(searchText(filters), " that match “a|b”");
  assert.deepEqual(parametersOf(of("")), { rank: null, level: null, since: null, grep: "" });
  assert.equal(searchText(of("")), "");
});

test("a text counts before a pattern", () => {
  assert.deepEqual([of("text=a&grep=b").search, of("text=a&grep=b").isPattern], ["a", false]);
});
