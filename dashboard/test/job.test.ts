import assert from "node:assert/strict";
import { test } from "node:test";

import type { Checkpoint } from "../src/api/types";
import { confusion, worstFirst } from "../src/views/job/predictions/confusion";
import { differences } from "../src/views/job/spec/diff";
import { grouped } from "../src/views/job/charts/groups";
import { bestOf, directionOf, lostAt } from "../src/views/jobs/finite";
import { ownTime, rankRows, spread, straggler } from "../src/views/job/ranks";
import { fewer, type Mark, markOf, marksOf } from "../src/views/job/charts/marks";

test("a metric and its validation are one chart, loss comes first and system metrics last", () => {
  const groups = grouped(["accuracy", "grad_norm", "loss", "lr", "lr/sparse", "system/memory_bytes", "time/step", "time/forward", "validation/accuracy", "validation/loss", "throughput/samples_per_s"]);
  assert.deepEqual(groups.map((one) => one.key), ["loss", "accuracy", "grad_norm", "lr", "throughput/samples_per_s", "system/memory_bytes", "time"]);
  assert.deepEqual(groups[0]!.names, ["loss", "validation/loss"]);
  assert.deepEqual(groups.find((one) => one.key === "lr")!.names, ["lr", "lr/sparse"]);
});

test("a metric that only evaluations have is shown under its own name", () => {
  const groups = grouped(["system/disk_read_bytes_per_s", "throughput/flops_fraction", "throughput/flops_per_s", "system/threads", "system/cpu_percent", "my/own_bytes"]);
  assert.deepEqual(groups.map((one) => one.title), ["my/own_bytes", "MFU (model FLOPs utilization)", "flops (per second)", "cpu (%)", "disk read (bytes/s)", "threads"]);
  assert.deepEqual(grouped(["validation/f1"]), [{ key: "f1", title: "f1", names: ["validation/f1"] }]);
});

test("a metric of several validation sources is one chart", () => {
  const names = ["loss", "validation/noisy/loss", "validation/clean/loss", "validation/clean/F1/3", "validation/noisy/F1/3"];
  assert.deepEqual(grouped(names).map((one) => [one.key, one.names]), [
    ["loss", ["loss", "validation/clean/loss", "validation/noisy/loss"]],
    ["F1/3", ["validation/clean/F1/3", "validation/noisy/F1/3"]],
  ]);
  assert.deepEqual(grouped(["validation/loss", "validation/clean/loss"]).map((one) => one.key), ["loss", "clean/loss"]);
});

test("the spread of the processes is a chart for each part, and those of one process are none", () => {
  const groups = grouped(["system/ranks/data_min_s", "system/ranks/data_max_s", "system/ranks/data_median_s", "system/ranks/0/data_s", "system/ranks/slowest"]);
  assert.deepEqual(groups.map((one) => [one.title, one.names.length]), [["data time of the processes (s)", 3], ["rank of the slowest process", 1]]);
});

const times = (rank: number, seconds: Record<string, number>) => Object.entries(seconds).map(([part, last]) => ({ name: `system/ranks/${rank}/${part}_s`, last }));

test("the process that keeps the others waiting takes longer for its own part of a step", () => {
  const others = [0, 2, 10].flatMap((rank) => times(rank, { data: 0.1, compute: 0.9, collective: 2, step: 3.2 }));
  const rows = rankRows([...others, ...times(1, { data: 0.1, compute: 2.9, collective: 0, step: 3.2 }), { name: "loss", last: 1 }]);
  assert.deepEqual(rows.map((one) => one.rank), [0, 1, 2, 10]);
  assert.equal(ownTime(rows[1]!), 3);
  assert.deepEqual(straggler(rows), { rank: 1, share: 2 / 3.2 });
});

test("processes that differ a little, and a single one, have no straggler", () => {
  assert.equal(straggler(rankRows([...times(0, { data: 0, compute: 1, step: 2 }), ...times(1, { data: 0, compute: 1.3, step: 2 })])), null);
  assert.equal(straggler(rankRows([...times(0, { data: 0, compute: 1, step: 20 }), ...times(1, { data: 0, compute: 3, step: 20 })])), null);
  assert.equal(straggler(rankRows(times(0, { data: 0, compute: 1 }))), null);
  assert.deepEqual(spread([3, 1, 2, 10]), { min: 1, median: 2.5, max: 10 });
});

test("differences of two specs are listed by leaf, and layers are matched by name", () => {
  const layers = (size: number) => [{ name: "fc", args: { out_features: size } }, { name: "relu" }];
  const before = { seed: 1, network: { layers: layers(10) }, stop: { epochs: 2 } };
  const after = { seed: 1, network: { layers: layers(20).reverse() }, stop: { steps: 5 } };
  assert.deepEqual(differences(before, after), [
    { path: "network.layers.fc.args.out_features", before: 10, after: 20 },
    { path: "stop.epochs", before: 2, after: undefined },
    { path: "stop.steps", before: undefined, after: 5 },
  ]);
});

test("a list without names differs as a whole", () => {
  assert.deepEqual(differences({ a: [1, 2] }, { a: [1, 3] }), [{ path: "a", before: [1, 2], after: [1, 3] }]);
  assert.deepEqual(differences({ a: [1, 2] }, { a: [1, 2] }), []);
});

test("a confusion matrix counts rows by true and predicted class", () => {
  const matrix = confusion([2, 0, 2, 2], [2, 2, 0, 2]);
  assert.deepEqual(matrix, { classes: [0, 2], counts: [[0, 1], [1, 2]], right: 2, total: 4 });
});

test("the most confident mistakes come first, then the least confident correct rows", () => {
  assert.deepEqual(worstFirst([0, 1, 1, 0], [1, 1, 0, 0], [0.6, 0.9, 0.8, 0.7]), [2, 0, 3, 1]);
  assert.deepEqual(worstFirst(null, [1, 1, 0], [0.6, 0.9, 0.5]), [2, 0, 1]);
});

const NAN = "NaN" as const;
const LOST = { last: NAN, min: 2.3, min_step: 0, first_nonfinite_step: 4 };

test("a best value counts if the loss was finite until then", () => {
  const summary = { loss: LOST, accuracy: { last: 0, max: 0.2, max_step: 3 }, "validation/accuracy": { last: 0, max: 0, max_step: 4 }, "validation/loss": { last: NAN, first_nonfinite_step: 4 } };
  const job = { summary, directions: { loss: "min", accuracy: "max", "validation/accuracy": "max", "validation/loss": "min" } as const };
  assert.equal(lostAt(summary), 4);
  assert.deepEqual(bestOf(job, "accuracy"), { value: 0.2, step: 3, counts: true });
  assert.deepEqual(bestOf(job, "loss"), { value: 2.3, step: 0, counts: true });
  assert.deepEqual(bestOf(job, "validation/accuracy"), { value: 0, step: 4, counts: false });
  assert.deepEqual(bestOf(job, "validation/loss"), { value: null, step: null, counts: false });
});

test("a loss that recovered, and one whose bad steps were skipped, invalidates nothing", () => {
  const after = { accuracy: { last: 1, max: 1, max_step: 9 } };
  for (const summary of [{ loss: { ...LOST, last: 0.1 }, ...after }, { loss: LOST, skipped_steps: { last: 1 }, ...after }]) {
    assert.equal(lostAt(summary), null);
    assert.equal(bestOf({ summary, directions: { accuracy: "max" } }, "accuracy").counts, true);
  }
});

test("the best value follows the metric's direction, not its name", () => {
  const figures = { last: 0.2, min: 0.1, min_step: 3, max: 0.9, max_step: 1 };
  const summary = { "validation/BinaryEER": figures, "validation/quality": figures };
  const job = { summary, directions: { "validation/BinaryEER": "min" } as const };
  assert.deepEqual(bestOf(job, "validation/BinaryEER"), { value: 0.1, step: 3, counts: true });
  assert.deepEqual(bestOf(job, "validation/quality"), { value: 0.9, step: 1, counts: true });
  assert.equal(directionOf({} as typeof job, "loss"), "max");
});

const marked = (kind: Mark["kind"], steps: number[]): Mark[] => steps.map((step) => ({ step, kind, name: `${kind} ${step}` }));
const upTo = (number: number) => Array.from({ length: number }, (_, step) => step);

test("a mark has the step and the name of an event", () => {
  const logged = { job: "job_1", seq: 7, attempt: 1, at: "2026-01-01T00:00:00Z", type: "command", step: 30, do: "checkpoint", digest: "x".repeat(64) };
  assert.deepEqual(markOf(logged), [{ step: 30, kind: "command", name: "checkpoint" }]);
  assert.deepEqual(markOf({ ...logged, type: "command", step: null, do: "evaluate" }), []);
});

test("existing checkpoints are marked, not those of the log", () => {
  assert.deepEqual(markOf({ job: "job_1", seq: 7, attempt: 1, at: "2026-01-01T00:00:00Z", type: "checkpoint", step: 30 }), []);
  const best = { step: 20, best: true, reason: "lowest validation/loss" } as Checkpoint;
  assert.deepEqual(marksOf([best, { step: 30, best: false, reason: null } as Checkpoint]), [
    { step: 20, kind: "checkpoint", name: "checkpoint of step 20, lowest validation/loss" },
    { step: 30, kind: "checkpoint", name: "checkpoint of step 30" },
  ]);
});

test("marks are kept if there is room for all", () => {
  const marks = marked("checkpoint", upTo(1000));
  assert.equal(fewer(marks), marks);
});

test("of a hundred thousand checkpoints some of each interval are kept, all of the newest, and every command", () => {
  let marks: Mark[] = [];
  for (let page = 0; page < 100; page++) {
    const steps = upTo(1000).map((place) => page * 1000 + place);
    marks = fewer([...marks, ...marked("checkpoint", steps), ...marked("command", [page * 1000 + 1000])]);
    assert.ok(marks.length <= 1000, String(marks.length));
  }
  assert.equal(marks.filter((one) => one.kind === "command").length, 100);
  assert.deepEqual(marks.slice(-400).map((one) => one.step), [...upTo(399).map((place) => 99_601 + place), 100_000]);
  assert.ok(marks.every((one, place) => place === 0 || marks[place - 1]!.step <= one.step));
  const gaps = marks.slice(1).map((one, place) => one.step - marks[place]!.step);
  assert.ok(Math.max(...gaps) <= 1000, String(Math.max(...gaps)));
});

test("if all marks are commands, the newest are kept", () => {
  assert.deepEqual(fewer(marked("command", upTo(1200))).map((one) => one.step), upTo(1000).map((place) => place + 200));
});
