// Drift of served traffic, as `serving.drift` of a serve job has it. Typed by hand: replace by the generated schema once it has it.
import type { Job, Number } from "../../../api/types";

export interface Series {
  of: "field" | "layer";
  name: string;
  measure: string;
  /** Population stability index of the last window against the training rows. */
  psi: Number;
  threshold: Number;
  drifted: boolean;
}

export interface Drift {
  model: string;
  version: number;
  state: "collecting" | "watching" | "unavailable";
  detail: string | null;
  /** Rows of the last complete window. */
  rows: number;
  at: string | null;
  series: Series[];
}

/** The drift of the versions that a job serves, of one model or of all; empty if the service does not report it. */
export function driftOf(serving: Job["serving"] | undefined, model: string | null = null): Drift[] {
  const all = (serving as { drift?: Drift[] | null } | null | undefined)?.drift ?? [];
  return all.filter((one) => model === null || one.model === model);
}

/** Drifted series first, then by psi relative to the threshold. */
export function worstFirst(series: readonly Series[]): Series[] {
  const weight = (one: Series) => +one.psi / (+one.threshold || 1);
  return [...series].sort((a, b) => +b.drifted - +a.drifted || weight(b) - weight(a));
}
