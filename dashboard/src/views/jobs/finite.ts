// NaN and Inf in a job's metrics, and which best values count. Pure.
import { type Job, num } from "../../api/types";

type Summary = Job["summary"];

/** Whether a job has NaN or Inf: it failed because of one, or the newest value of a metric is one. */
export function nonfinite(job: Job): boolean {
  if (job.error?.["category"] === "nonfinite") return true;
  return Object.values(job.summary).some((one) => typeof one["last"] === "string");
}

/** The first step with a NaN or Inf loss, if the loss still is; null if bad steps were skipped. */
export function lostAt(summary: Summary): number | null {
  const loss = summary["loss"];
  if (typeof loss?.["last"] !== "string" || "skipped_steps" in summary) return null;
  return num(loss["first_nonfinite_step"]);
}

export interface Best {
  value: number | null;
  step: number | null;
  /** Whether it was measured before the loss became NaN or Inf. */
  counts: boolean;
}

/** The direction of a metric from the service; max if there is none. */
export function directionOf(job: Pick<Job, "directions">, name: string): "min" | "max" {
  return job.directions?.[name] ?? "max"; // a cached response of an older service has no directions
}

/** The best value of a metric; one measured after the loss became NaN or Inf does not count. */
export function bestOf(job: Pick<Job, "summary" | "directions">, name: string): Best {
  const figures = job.summary[name] ?? {};
  const direction = directionOf(job, name);
  const value = num(figures[direction]);
  const step = num(figures[`${direction}_step`]);
  const lost = lostAt(job.summary);
  return { value, step, counts: value !== null && (lost === null || step === null || step < lost) };
}
