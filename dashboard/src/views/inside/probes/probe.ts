// A probe as a form draft and as the API takes it. Pure.
import type { components } from "../../../api/schema.gen";
import { duration } from "../../../format";

export type Probe = components["schemas"]["AttachedProbe"];
export const FORMS: readonly [form: string, words: string][] = [
  ["stats", "statistics"], ["histogram", "histogram"], ["quantiles", "quantiles"], ["full", "whole tensor"], ["sample", "sample of rows"],
];

export interface Draft {
  layers: string;
  kinds: readonly string[];
  when: "every" | "at" | "nonfinite";
  every: string;
  at: string;
  want: readonly string[];
  slice: string;
  maxBytes: string;
  /** Percent; empty: no budget, the interval stays fixed. */
  overhead: string;
  phase: "train" | "evaluate";
  point: "raw" | "clipped";
  start: string;
  stop: string;
  /** The processes whose own values are recorded: `all`, or ranks. Empty: none. */
  ranks: string;
}

export function draftOf(layers: string, kinds: readonly string[], ranks = ""): Draft {
  return { layers, kinds, when: "every", every: "10", at: "", want: ["stats"], slice: "", maxBytes: "", overhead: "3", phase: "train", point: "raw", start: "", stop: "", ranks };
}

export function draftFrom(probe: Probe): Draft {
  return {
    layers: probe.layers.join(", "),
    kinds: probe.kinds,
    when: probe.on ? "nonfinite" : probe.at ? "at" : "every",
    every: probe.every === null ? "10" : String(probe.every),
    at: probe.at?.join(", ") ?? "",
    want: probe.want,
    slice: probe.slice ?? "",
    maxBytes: probe.max_bytes === null ? "" : String(probe.max_bytes),
    overhead: probe.max_overhead === null ? "" : String(+(probe.max_overhead * 100).toPrecision(6)),
    phase: probe.phase,
    point: probe.point,
    start: probe.start ? String(probe.start) : "",
    stop: probe.stop === null ? "" : String(probe.stop),
    ranks: probe.ranks === "merged" ? "" : probe.ranks === "all" ? "all" : probe.ranks.join(", "),
  };
}

/** The request body: every field of the form, so that a change removes what was cleared. Text that is not a number is sent as is; the service rejects it. */
export function bodyOf(draft: Draft): Record<string, unknown> {
  const governed = draft.when !== "at" && draft.phase === "train";
  const keeps = draft.want.includes("full") || draft.want.includes("sample");
  const body: Record<string, unknown> = {
    layers: listOf(draft.layers),
    kinds: draft.kinds,
    want: draft.want,
    phase: draft.phase,
    point: draft.point,
    start: draft.start.trim() ? numeral(draft.start) : 0,
  };
  if (draft.when === "every") body["every"] = numeral(draft.every);
  if (draft.when === "at") body["at"] = listOf(draft.at).map(numeral);
  if (draft.when === "nonfinite") body["on"] = "nonfinite";
  if (draft.stop.trim()) body["stop"] = numeral(draft.stop);
  if (draft.slice.trim() && draft.want.includes("full")) body["slice"] = draft.slice.trim();
  if (draft.maxBytes.trim() && keeps) body["max_bytes"] = numeral(draft.maxBytes);
  const ranks = draft.ranks.trim();
  if (ranks) body["ranks"] = ranks === "all" || ranks === "merged" ? ranks : listOf(ranks).map(numeral);
  if (governed) body["max_overhead"] = draft.overhead.trim() ? percentOf(draft.overhead) : null;
  return body;
}

const CHOSEN = ["every", "at", "on", "stop", "slice", "max_bytes", "ranks"];

/** The same as a merge patch: what was removed is null. */
export function patchOf(draft: Draft): Record<string, unknown> {
  const body = bodyOf(draft);
  for (const name of CHOSEN) body[name] ??= null;
  return body;
}

function listOf(text: string): string[] {
  return text.split(/[\s,]+/).filter(Boolean);
}

function numeral(text: string): number | string {
  const value = Number(text);
  return text.trim() && Number.isFinite(value) ? value : text;
}

function percentOf(text: string): number | string {
  const value = Number(text);
  return Number.isFinite(value) ? +(value / 100).toPrecision(12) : text;
}

/** The current interval, in words. */
export function whenText(probe: Probe): string {
  const unit = probe.phase === "evaluate" ? "evaluation" : "step";
  if (probe.on) return `checks for NaN or Inf every ${probe.every_now === 1 || probe.every_now === null ? "step" : `${probe.every_now} steps`}`;
  if (probe.at) return probe.at.length > 8 ? `at ${probe.at.length} ${unit}s` : `at ${unit}${probe.at.length > 1 ? "s" : ""} ${probe.at.join(", ")}`;
  const now = probe.every_now ?? probe.every;
  const widened = probe.every_now !== null && probe.every_now !== probe.every ? ` (requested ${probe.every}, widened by its budget)` : "";
  return `every ${now === 1 ? unit : `${now} ${unit}s`}${widened}`;
}

/** Whether a probe records the own values of a process. */
export function recordsRank(probe: Probe, rank: number): boolean {
  return probe.ranks === "all" || (probe.ranks !== "merged" && probe.ranks.includes(rank));
}

export function cost(seconds: number): string {
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  return seconds < 1 ? `${(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : 1)} ms` : duration(seconds);
}
