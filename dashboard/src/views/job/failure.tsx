// Why a job failed: what happened, where, what to change, and the last lines that it wrote.
import type { Job } from "../../api/types";
import { count } from "../../format";
import { layerHref } from "./chart";
import { type Logged, useEventsAs } from "./data";

const CATEGORIES: Record<string, string> = {
  spec: "The spec cannot be run", data: "The data", nonfinite: "Numbers that are not finite", out_of_memory: "Out of memory", user_code: "The job's own code",
  device: "The device", distributed: "Between the processes", worker_lost: "The worker was lost", timeout: "It took too long", storage: "Files", internal: "A mistake of the service",
};

export function Failure({ job }: { job: Job }) {
  const error = job.error;
  if (!error) return <Findings job={job} />;
  const text = (name: string) => (typeof error[name] === "string" ? (error[name] as string) : null);
  const [layer, step, rank] = [text("layer"), error["step"], error["rank"]];
  const [code, tail] = [text("code"), text("log_tail")];
  return (
    <section class="problem" aria-label="Why it failed">
      <p><strong>{CATEGORIES[text("category") ?? ""] ?? "It failed"}</strong></p>
      <p>{text("message")}</p>
      <dl class="facts">
        {layer && <><dt>layer</dt><dd>{layer === "loss" ? "loss" : <a href={layerHref(job.id, layer, step)}>{layer}</a>}</dd></>}
        {typeof step === "number" && <><dt>step</dt><dd><a href={`/jobs/${job.id}?from=${Math.max(0, step - 50)}&to=${step + 10}`}>{count(step)}</a></dd></>}
        {typeof rank === "number" && <><dt>rank</dt><dd><a href={`/jobs/${job.id}/logs?rank=${rank}`}>{rank}</a></dd></>}
        {code && <><dt>code</dt><dd><a href={`/errors/${code}`} target="_blank" rel="noreferrer">{code}</a></dd></>}
        {error["retryable"] === true && <><dt>again</dt><dd>The same may succeed another time.</dd></>}
      </dl>
      {text("hint") && <p style={{ marginTop: ".5rem" }}>{text("hint")}</p>}
      {tail && <details><summary>Last lines of its log</summary><pre class="block" tabIndex={0}>{tail}</pre></details>}
    </section>
  );
}

interface Found { first: Logged; times: number }

/** A guard that lets a job go on may find something in each of its steps. */
function together(found: Found[]): Found[] {
  return [{ first: found[0]!.first, times: found.reduce((sum, one) => sum + one.times, 0) }];
}

/** What the guard found in a job that went on. */
function Findings({ job }: { job: Job }) {
  const [found] = useEventsAs<Found>(job, "finding", 0, (first) => [{ first, times: 1 }], together).items;
  if (!found) return null;
  const { first, times } = found;
  const layer = first["layer"];
  return (
    <section class="problem" aria-label="Findings">
      <p><strong>{times === 1 ? "Something was found" : `${count(times)} findings, the first:`}</strong></p>
      <p>{String(first["message"] ?? "")}</p>
      <p class="row">
        {typeof layer === "string" && layer !== "loss" && <a href={layerHref(job.id, layer, first["step"])}>Look into {layer}</a>}
        <a href={`/jobs/${job.id}/events?types=finding`}>All findings</a>
      </p>
    </section>
  );
}
