// What the list of devices says about a device.
import assert from "node:assert/strict";
import { test } from "node:test";

import type { Device } from "../src/api/types";
import { factsOf } from "../src/views/devices/facts";

const NONE = {
  memory_used_bytes: null, utilization_percent: null, temperature_celsius: null, power_watts: null, processes: null,
  compute_capability: null, mig: null, numa_node: null, interconnect: null,
} as unknown as Device;

test("a CPU core has no facts", () => {
  assert.deepEqual(factsOf(NONE), []);
});

test("facts that are zero are shown, and those that are null are not", () => {
  const device: Device = { ...NONE, memory_used_bytes: 0, utilization_percent: 0, processes: [], numa_node: 0, mig: "instance" };
  assert.deepEqual(factsOf(device), ["0 B used", "0 % busy", "processes: 0", "MIG instance", "NUMA node 0"]);
});
