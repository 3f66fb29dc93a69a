// The requests of the Inside views: one for all layers, one for all trends.
import { useMemo } from "preact/hooks";

import type { Problem } from "../../../api/http";
import { withQuery } from "../../../api/http";
import { useLive } from "../../../api/live";
import { ended, type Job, type Layer, type Page } from "../../../api/types";
import { layersAt, type MeasureName, type Series, stepsOf } from "./history";
import { type Row, rowOf } from "./rows";

const MANY = 200;
const NUMBERS = 60_000; // about as many as one response with trends may have

export interface Network {
  /** With the newest statistics. */
  readonly newest: readonly Layer[];
  /** As shown: at the selected step, or the newest. */
  readonly layers: readonly Layer[];
  readonly rows: readonly Row[];
}

export function useNetwork(job: Job, step: number | null): { network: Network | null; problem: Problem | null } {
  const often = ended(job) ? Infinity : 2;
  const live = useLive<Page<Layer>>(`jobs/${job.id}/layers`, often);
  const past = useLive<Page<Series>>(step === null ? null : withQuery(`jobs/${job.id}/stats`, { from_step: step, to_step: step }), Infinity);
  const network = useMemo(() => {
    const newest = live.value?.data;
    if (!newest || (step !== null && !past.value)) return null;
    const layers = step === null || !past.value ? newest : layersAt(newest, past.value.data, step);
    return { newest, layers, rows: layers.map(rowOf) };
  }, [live.value, past.value, step]);
  return { network, problem: live.problem ?? past.problem };
}

export interface Lines { readonly byName: ReadonlyMap<string, Series>; readonly steps: readonly number[] }

/** One statistic of every layer over the steps, thinned so that all of them together stay small. */
export function useLines(job: Job, layers: number, measure: MeasureName | null): Lines | null {
  const [kind, stat] = (measure ?? "/").split("/");
  const points = Math.max(8, Math.min(120, Math.floor(NUMBERS / Math.max(1, layers))));
  const path = measure && layers ? withQuery(`jobs/${job.id}/stats`, { kind, stat, phase: "train", max_points: points }) : null;
  const { value } = useLive<Page<Series>>(path, ended(job) ? Infinity : layers > MANY ? 20 : 5);
  return useMemo(() => value && { byName: new Map(value.data.map((one) => [one.layer, one])), steps: stepsOf(value.data) }, [value]);
}
