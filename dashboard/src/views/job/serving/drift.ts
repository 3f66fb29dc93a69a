// Drift of served traffic, as `serving.drift` of a serve job has it.
import type { Job } from "../../../api/types";

export type Drift = NonNullable<Job["serving"]>["drift"][number];
export type Series = Drift["series"][number];

/** The drift of the versions that a job serves, of one model or of all; empty if the service does not report it. */
export function driftOf(serving: Job["serving"] | undefined, model: string | null = null): Drift[] {
  const all: Drift[] = serving?.drift ?? [];
  return all.filter((one) => model === null || one.model === model);
}

/** Drifted series first, then by psi relative to the threshold. */
export function worstFirst(series: readonly Series[]): Series[] {
  const weight = (one: Series) => one.psi / (one.threshold || 1);
  return [...series].sort((a, b) => +b.drifted - +a.drifted || weight(b) - weight(a));
}
