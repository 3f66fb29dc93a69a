import assert from "node:assert/strict";
import { test } from "node:test";

import { costText } from "../src/views/job/cost";

test("the overhead of watching is compared with the budget of the probes that have one", () => {
  assert.equal(costText(0.0125, 0.03, 0), "1.3 % of a step, budget 3.0 %");
  assert.equal(costText(0.072, 0.03, 0.06), "7.2 % of a step: 1.2 % of a 3.0 % budget, 6.0 % by probes without a budget");
  assert.equal(costText(0.072, null, 0.072), "7.2 % of a step, no budget set");
  assert.equal(costText(null, 0.03, null), "– of a step");
});
