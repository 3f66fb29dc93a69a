// One job in the list.
import { post } from "../../api/http";
import { refresh } from "../../api/live";
import { type Job, num } from "../../api/types";
import { MetricSpark } from "../../charts/spark";
import { ago, count, duration, figure } from "../../format";
import { metricOf, sourcesOf } from "../../sources";
import { StateBadge } from "../../ui/state";
import { notify } from "../../ui/toast";
import { bestOf, nonfinite } from "./finite";

interface Props {
  job: Job;
  selected: boolean;
  select(id: string, on: boolean): void;
}

export function JobRow({ job, selected, select }: Props) {
  const name = job.name ?? job.id;
  return (
    <tr data-job={job.id}>
      <td class="of-check"><input type="checkbox" aria-label={`Select ${name}`} checked={selected} onChange={(event) => select(job.id, event.currentTarget.checked)} /></td>
      <td>
        <a href={`/jobs/${job.id}`}>{name}</a>{" "}
        {job.kind !== "train" && <span class="badge">{job.kind}</span>} <Labels labels={job.labels} />
      </td>
      <td class="of-state"><div class="row nowrap"><StateBadge state={job.state} /><Nonfinite job={job} /></div></td>
      <td><Progress job={job} /></td>
      <td class="number of-loss">{figure(num(job.summary["loss"]?.last))}</td>
      <td>{job.summary["loss"] && <MetricSpark job={job.id} name="loss" live={job.state === "running"} />}</td>
      <td class="wide-only"><Best job={job} /></td>
      <td class="wide-only">{job.devices.map((one) => one.id).join(", ") || "–"}</td>
      <td class="wide-only nowrap" title={job.created_at}>{ago(job.created_at)}</td>
      <td class="nowrap of-actions"><Actions job={job} /></td>
    </tr>
  );
}

function Labels({ labels }: { labels: Record<string, string> }) {
  const pairs = Object.entries(labels).map(([key, value]) => `${key}:${value}`);
  return <>{pairs.map((pair) => <a key={pair} class="badge" href={`/jobs?label=${encodeURIComponent(pair)}`}>{pair}</a>)}</>;
}

function Nonfinite({ job }: { job: Job }) {
  if (!nonfinite(job)) return null;
  const at = job.error?.["layer"];
  return <span class="badge bad" title={at ? `first in ${String(at)}` : "a metric is NaN or Inf"}>NaN{at ? ` · ${String(at)}` : ""}</span>;
}

interface Steps { step?: number; num_steps?: number | null; eta_s?: number | null }

function Progress({ job }: { job: Job }) {
  const { step, num_steps: total, eta_s: left } = (job.progress ?? {}) as Steps;
  if (step === undefined) return <span class="muted">{job.state === "queued" ? "queued" : "–"}</span>;
  const words = `${count(step)}${total ? ` of ${count(total)}` : ""} steps`;
  return (
    <div title={words}>
      {total ? <div class="progress" role="progressbar" aria-label={words} aria-valuenow={step} aria-valuemin={0} aria-valuemax={total}><i style={{ width: `${(100 * step) / total}%` }} /></div> : null}
      <span class="muted nowrap">{words}{job.state === "running" && left ? `, ${duration(left)} left` : ""}</span>
    </div>
  );
}

/** The best value of the first validation metric other than the loss; without one, the lowest validation loss of the first source. */
function Best({ job }: { job: Job }) {
  const names = Object.keys(job.summary).filter((name) => name.startsWith("validation/"));
  const sources = sourcesOf(names);
  const name = names.find((one) => metricOf(one, sources) !== "loss") ?? names[0];
  if (!name) return <span class="muted">–</span>;
  const { value, step, counts } = bestOf(job, name);
  const words = `${name.replace("validation/", "")} ${figure(value)}`;
  if (!counts) return <span class="muted nowrap" title={value === null ? "all values are NaN or Inf" : `${words} at step ${step} was measured after the loss became NaN or Inf`}>none before NaN</span>;
  return <span class="nowrap" title={`at step ${step ?? "–"}`}>{words}</span>;
}

function Actions({ job }: { job: Job }) {
  const name = job.name ?? job.id;
  const act = async (verb: string, done: string) => {
    await notify(post(`jobs/${job.id}/${verb}`), done);
    refresh("jobs?");
  };
  return (
    <div class="row" style={{ flexWrap: "nowrap" }}>
      {job.state === "running" && <button class="small" onClick={() => act("pause", `${name}: pausing`)}>Pause</button>}
      {job.state === "paused" && <button class="small" onClick={() => act("resume", `${name}: resuming`)}>Resume</button>}
      {["queued", "starting", "running", "paused"].includes(job.state) && <button class="small" onClick={() => act("cancel", `${name}: canceling`)}>Cancel</button>}
    </div>
  );
}
