// The captured steps of a tensor, read page by page and refreshed while the view is open.
import { useEffect, useState } from "preact/hooks";

import { get, Problem, withQuery } from "../../../api/http";
import type { components } from "../../../api/schema.gen";
import { ended, type Job, type Page } from "../../../api/types";
import type { Capture } from "../kinds";

export type Summary = components["schemas"]["Tensor"];

const AGAIN_MS = 3000;
const MOST = 20_000;

interface Kept { of: string; rows: Capture[]; problem: Problem | null; isRead: boolean }

export function useCaptures(job: Job, layer: string, kind: string, rank: number | null): Kept {
  const of = `${job.id} ${layer} ${kind} ${rank}`;
  const [kept, setKept] = useState<Kept>({ of, rows: [], problem: null, isRead: false });
  const over = ended(job);
  useEffect(() => {
    let rows: Capture[] = [];
    let timer = 0;
    const stopped = new AbortController();
    const read = async () => {
      try {
        let page: Page<Capture>;
        do {
          page = await get<Page<Capture>>(withQuery(`jobs/${job.id}/captures`, { layer, kind, rank, limit: 1000, after: rows.at(-1)?.id }), { signal: stopped.signal });
          rows = [...rows, ...page.data];
        } while (page.has_more && rows.length < MOST);
        setKept((before) => (before.of === of && before.isRead && before.rows.length === rows.length ? before : { of, rows, problem: null, isRead: true }));
      } catch (problem) {
        if (stopped.signal.aborted) return;
        if (problem instanceof Problem) setKept({ of, rows, problem, isRead: true });
      }
      if (!over) timer = window.setTimeout(() => (document.hidden ? (timer = window.setTimeout(read, AGAIN_MS * 5)) : void read()), AGAIN_MS);
    };
    void read();
    return () => {
      stopped.abort();
      clearTimeout(timer);
    };
  }, [of, over]);
  return kept.of === of ? kept : { of, rows: [], problem: null, isRead: false };
}

/** The path of a captured tensor. */
export function pathOf(capture: Capture, query: Record<string, string | number | null>): string {
  return withQuery(`jobs/${capture.job}/layers/${encodeURIComponent(capture.layer)}/${capture.kind}`, { step: capture.step, phase: capture.phase, rank: capture.rank, ...query });
}
