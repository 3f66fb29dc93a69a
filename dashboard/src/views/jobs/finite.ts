// Whether a job's numbers are numbers, and what its best values are worth. Pure.
import { type Job, num } from "../../api/types";

type Summary = Job["summary"];

/** Whether a number of the job is none: a failure that says so, or a metric whose newest value is NaN or infinite. */
export function nonfinite(job: Job): boolean {
  if (job.error?.["category"] === "nonfinite") return true;
  return Object.values(job.summary).some((one) => typeof one["last"] === "string");
}

/** The first step whose loss was not finite, where the loss is still not; null where bad steps were left out. */
export function lostAt(summary: Summary): number | null {
  const loss = summary["loss"];
  if (typeof loss?.["last"] !== "string" || "skipped_steps" in summary) return null;
  return num(loss["first_nonfinite_step"]);
}

export interface Best {
  value: number | null;
  step: number | null;
  /** Whether the network that reached it had finite numbers. */
  counts: boolean;
}

/** Which value of a metric is its best, as the service says; the highest where it does not say. */
export function directionOf(job: Pick<Job, "directions">, name: string): "min" | "max" {
  return job.directions?.[name] ?? "max"; // a cached answer of an older service has no directions
}

/** The best value of a metric; accuracy 0 of a network of NaN is the best of nothing. */
export function bestOf(job: Pick<Job, "summary" | "directions">, name: string): Best {
  const figures = job.summary[name] ?? {};
  const direction = directionOf(job, name);
  const value = num(figures[direction]);
  const step = num(figures[`${direction}_step`]);
  const lost = lostAt(job.summary);
  return { value, step, counts: value !== null && (lost === null || step === null || step < lost) };
}
