// Why a job failed: the error, its location, what to change, and the last lines of the log.
import type { Job } from "../../../api/types";
import { count } from "../../../format";
import { layerHref } from "../charts/chart";
import { type Logged, useEventsAs } from "../data";

const CATEGORIES: Record<string, string> = {
  spec: "Spec", data: "Data", nonfinite: "NaN or Inf", out_of_memory: "Out of memory", user_code: "User code",
  device: "Device", distributed: "Distributed training", worker_lost: "Worker lost", timeout: "Timeout", storage: "Storage", internal: "Internal error",
};

export function Failure({ job }: { job: Job }) {
  const error = job.error;
  if (!error) return <Findings job={job} />;
  const text = (name: string) => (typeof error[name] === "string" ? (error[name] as string) : null);
  const [layer, step, rank] = [text("layer"), error["step"], error["rank"]];
  const [code, tail] = [text("code"), text("log_tail")];
  return (
    <section class="problem" aria-label="Why the job failed">
      <p><strong>{CATEGORIES[text("category") ?? ""] ?? "Failed"}</strong></p>
      <p>{text("message")}</p>
      <dl class="facts">
        {layer && <><dt>layer</dt><dd>{layer === "loss" ? "loss" : <a href={layerHref(job.id, layer, step)}>{layer}</a>}</dd></>}
        {typeof step === "number" && <><dt>step</dt><dd>{step > 0 ? <a href={`/jobs/${job.id}?from=${Math.max(0, step - 50)}&to=${step}`}>{count(step)}</a> : count(step)}</dd></>}
        {typeof rank === "number" && <><dt>rank</dt><dd><a href={`/jobs/${job.id}/logs?rank=${rank}`}>{rank}</a></dd></>}
        {code && <><dt>code</dt><dd><a href={`/errors/${code}`} target="_blank" rel="noreferrer">{code}</a></dd></>}
        {error["retryable"] === true && <><dt>retry</dt><dd>The same job may succeed if you retry it.</dd></>}
      </dl>
      <Causes job={job} />
      {text("hint") && <p style={{ marginTop: ".5rem" }}>{text("hint")}</p>}
      {tail && <details><summary>Last lines of the log</summary><pre class="block" tabIndex={0}>{tail}</pre></details>}
    </section>
  );
}

/** The likely causes in the first finding, most likely first. */
function Causes({ job }: { job: Job }) {
  const [found] = useEventsAs<Found>(job, "finding", 0, (first) => [{ first, times: 1 }], together).items;
  const causes = (found?.first["causes"] ?? []) as unknown[];
  if (!causes.length) return null;
  return (
    <>
      <p><strong>{causes.length === 1 ? "Likely cause" : "Likely causes"}</strong></p>
      <ul class="causes">{causes.map((one) => <li key={String(one)}>{String(one)}</li>)}</ul>
    </>
  );
}

interface Found { first: Logged; times: number }

/** The first finding, and how many there are: a guard that lets a job continue may find something in each step. */
function together(found: Found[]): Found[] {
  return !found.length ? [] : [{ first: found[0]!.first, times: found.reduce((sum, one) => sum + one.times, 0) }];
}

/** The findings of a job that did not fail. */
function Findings({ job }: { job: Job }) {
  const [found] = useEventsAs<Found>(job, "finding", 0, (first) => [{ first, times: 1 }], together).items;
  if (!found) return null;
  const { first, times } = found;
  const layer = first["layer"];
  return (
    <section class="problem" aria-label="Findings">
      <p><strong>{times === 1 ? "Finding" : `${count(times)} findings. The first:`}</strong></p>
      <p>{String(first["message"] ?? "")}</p>
      <Causes job={job} />
      <p class="row">
        {typeof layer === "string" && layer !== "loss" && <a href={layerHref(job.id, layer, first["step"])}>Inspect {layer}</a>}
        <a href={`/jobs/${job.id}/events?types=finding`}>All findings</a>
      </p>
    </section>
  );
}
