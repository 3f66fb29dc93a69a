// The state of a dataset, and why its file could not be read.
import type { Dataset } from "../../api/types";

const BADGES: Record<Dataset["state"], readonly [kind: string, sign: string]> = { pending: ["busy", "…"], ready: ["good", "✓"], failed: ["bad", "✕"] };

export function DatasetState({ state }: { state: Dataset["state"] }) {
  const [kind, sign] = BADGES[state];
  return <span class={`badge ${kind}`}><span aria-hidden="true">{sign}</span> {state}</span>;
}

/** The problem as text; it includes the line and the column. */
export const problemText = (problem: NonNullable<Dataset["problem"]>) => String(problem["detail"] ?? problem["code"] ?? "The file could not be read.");
