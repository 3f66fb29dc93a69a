// Empty, loading and error states of a view, and the badge of a job's state.
import type { ComponentChildren } from "preact";

import type { Problem } from "../api/http";
import type { JobState } from "../api/types";

export function Empty({ children }: { children: ComponentChildren }) {
  return <div class="card empty">{children}</div>;
}

export function Loading({ what = "Loading" }: { what?: string }) {
  return <p class="muted" role="status">{what} …</p>;
}

/** A problem from the service: what happened, what to change, and a link to its explanation. */
export function ProblemBox({ problem }: { problem: Problem }) {
  return (
    <div class="problem" role="alert">
      <p><strong>{problem.message}</strong></p>
      {problem.hint && <p>{problem.hint}</p>}
      {problem.errors.length > 0 && (
        <ul>{problem.errors.map((one) => <li key={one.pointer + one.code}><code>{one.pointer || "/"}</code> {one.detail}</li>)}</ul>
      )}
      {problem.page?.startsWith("/errors/") && <p><a href={problem.page} target="_blank" rel="noreferrer">What “{problem.code}” means</a></p>}
    </div>
  );
}

type Badge = readonly [kind: string, path: string];
const DOT = "M8 3a5 5 0 1 0 0 10A5 5 0 0 0 8 3z";
const BADGES: Record<JobState, Badge> = {
  queued: ["", "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2zm0 2v4l3 2"],
  starting: ["busy", DOT],
  running: ["busy", "M5 3l8 5-8 5z"],
  pausing: ["warn", "M4 3h3v10H4zM9 3h3v10H9z"],
  paused: ["warn", "M4 3h3v10H4zM9 3h3v10H9z"],
  cancelling: ["", "M3 3h10v10H3z"],
  succeeded: ["good", "M2 8l4 4 8-8"],
  failed: ["bad", "M3 3l10 10M13 3L3 13"],
  cancelled: ["", "M3 3h10v10H3z"],
};
const FILLED = new Set<JobState>(["starting", "running", "pausing", "paused", "cancelling", "cancelled"]);

/** The state as a word with an icon: never by color alone. */
export function StateBadge({ state }: { state: JobState }) {
  const [kind, path] = BADGES[state];
  return (
    <span class={`badge ${kind}`}>
      <svg viewBox="0 0 16 16" aria-hidden="true" fill={FILLED.has(state) ? "currentColor" : "none"} stroke="currentColor" stroke-width="2"><path d={path} /></svg>
      {state}
    </span>
  );
}
