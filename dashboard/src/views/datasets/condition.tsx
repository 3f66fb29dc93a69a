// The state of a dataset, and why it could not be read.
import type { Dataset } from "../../api/types";

const LOOKS: Record<Dataset["state"], readonly [kind: string, sign: string]> = { pending: ["busy", "…"], ready: ["good", "✓"], failed: ["bad", "✕"] };

export function DatasetState({ state }: { state: Dataset["state"] }) {
  const [kind, sign] = LOOKS[state];
  return <span class={`badge ${kind}`}><span aria-hidden="true">{sign}</span> {state}</span>;
}

/** In words; the reader names the line and the column. */
export const whatIsWrong = (problem: NonNullable<Dataset["problem"]>) => String(problem["detail"] ?? problem["code"] ?? "It could not be read.");
