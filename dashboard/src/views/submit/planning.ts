// The plan of a spec, requested shortly after the last change, one request at a time.
import { useEffect, useState } from "preact/hooks";

import { type FieldProblem, get, Problem } from "../../api/http";
import type { Plan } from "../../api/types";
import type { Json } from "../../spec/pointer";

const PAUSE_MS = 350;

export interface Planned {
  /** The newest plan; of an earlier spec while `isOld`. */
  plan: Plan | null;
  isOld: boolean;
  problems: readonly FieldProblem[];
  /** A problem that is not about a field: too many requests, no planner. */
  problem: Problem | null;
}

const NOTHING: Planned = { plan: null, isOld: true, problems: [], problem: null };

export function usePlan(spec: Json | null): Planned {
  const [planned, setPlanned] = useState<Planned>(NOTHING);
  useEffect(() => {
    if (spec === null) return;
    setPlanned((last) => ({ ...last, isOld: true }));
    const asking = new AbortController();
    const timer = setTimeout(async () => {
      const next = await ask(spec, asking.signal);
      if (next) setPlanned((last) => ({ plan: last.plan, isOld: true, problems: [], problem: null, ...next }));
    }, PAUSE_MS);
    return () => {
      clearTimeout(timer);
      asking.abort();
    };
  }, [spec]);
  return planned;
}

async function ask(spec: Json, signal: AbortSignal): Promise<Partial<Planned> | null> {
  try {
    return { plan: await get<Plan>("plan", { method: "POST", body: spec, signal }), isOld: false };
  } catch (error) {
    if (signal.aborted) return null;
    const problem = error instanceof Problem ? error : new Problem(0, "unreadable", String(error));
    return problem.errors.length ? { problems: problem.errors } : { problem };
  }
}
