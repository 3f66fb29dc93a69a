// Who the job is, how far it is, on what, since when, and what watching it costs.
import { useLive } from "../../api/live";
import { ended, type Job, num, type Page } from "../../api/types";
import { ago, count, duration, figure } from "../../format";
import { StateBadge } from "../../ui/state";
import { lostAt } from "../jobs/finite";
import { Actions } from "./actions";
import { costText } from "./cost";

export function Header({ job }: { job: Job }) {
  const lost = lostAt(job.summary);
  return (
    <header class="head">
      <div class="spread">
        <div class="row">
          <h1>{job.name ?? job.id}</h1>
          <span role="status"><StateBadge state={job.state} /></span>
          {lost !== null && !job.error && <span class="badge bad">✕ loss not finite from step {count(lost)}</span>}
          {Object.entries(job.labels).map(([name, value]) => <a key={name} class="chip" href={`/jobs?label=${encodeURIComponent(`${name}:${value}`)}`}>{name}: {value}</a>)}
        </div>
        <Actions job={job} />
      </div>
      <Progress job={job} />
      <Reason job={job} />
      <Figures job={job} />
      {job.warnings.length > 0 && (
        <details class="note"><summary>{count(job.warnings.length)} {job.warnings.length === 1 ? "warning" : "warnings"} of the plan</summary>
          <ul>{job.warnings.map((one) => <li key={one.pointer + one.code}><code>{one.pointer}</code> {one.detail}</li>)}</ul>
        </details>
      )}
    </header>
  );
}

const field = (job: Job, name: string): number | null => {
  const value = job.progress?.[name];
  return typeof value === "number" || typeof value === "string" ? num(value as number) : null;
};

function Progress({ job }: { job: Job }) {
  const [step, total] = [field(job, "step"), field(job, "num_steps")];
  if (step === null) return null;
  const part = total ? Math.min(1, step / total) : null;
  const left = ended(job) ? null : field(job, "eta_s");
  const rate = field(job, "samples_per_s");
  return (
    <div class="row">
      {part !== null && <div class="progress" role="progressbar" aria-label="Progress" aria-valuenow={Math.round(part * 100)} aria-valuemin={0} aria-valuemax={100}><i style={{ width: `${part * 100}%` }} /></div>}
      <span class="nowrap">step {count(step)}{total ? ` of ${count(total)}` : ""}</span>
      {field(job, "epoch") !== null && <span class="nowrap">epoch {count(field(job, "epoch"))}</span>}
      {rate !== null && !ended(job) && <span class="nowrap">{figure(rate, 3)} samples/s</span>}
      {left !== null && <span class="nowrap">{duration(left)} left</span>}
    </div>
  );
}

/** Why it is in this state, where that is not plain. */
function Reason({ job }: { job: Job }) {
  const queue = useLive<Page<{ job: string; position: number; reason: string }>>(job.state === "queued" ? "queue" : null, 3).value;
  const waits = queue?.data.find((one) => one.job === job.id);
  if (job.not_before) return <p class="note">It is tried again at {new Date(job.not_before).toLocaleTimeString("en-GB")}: {job.state_reason}</p>;
  if (waits) return <p class="note">It waits: {waits.reason}.</p>;
  if (job.state === "paused") return <p class="note">Paused {ago(job.paused_at)}. It has its checkpoint and no device.</p>;
  return job.state_reason && !job.error ? <p class="note">{job.state_reason}</p> : null;
}

function Figures({ job }: { job: Job }) {
  const from = job.started_at ? Date.parse(job.started_at) : null;
  const to = job.ended_at ? Date.parse(job.ended_at) : Date.now();
  const cost = job.probe_overhead;
  return (
    <dl class="figures">
      <Figure name="id"><code>{job.id}</code></Figure>
      <Figure name="made"><span title={job.created_at}>{ago(job.created_at)}</span>{job.created_by && ` by ${job.created_by}`}</Figure>
      {from !== null && <Figure name={ended(job) ? "took" : "since its start"}>{duration((to - from) / 1000)}</Figure>}
      {job.paused_s > 0 && <Figure name="of that paused">{duration(job.paused_s)}</Figure>}
      <Figure name="attempt">{job.attempt || "none yet"}</Figure>
      {job.devices.length > 0 && <Figure name={job.devices.length === 1 ? "device" : "devices"}>{job.devices.map((one) => `${one.id} on ${one.worker}`).join(", ")}</Figure>}
      {job.priority !== 0 && <Figure name="priority">{job.priority}</Figure>}
      {job.parent && <Figure name="parent"><a href={`/jobs/${job.parent}`}>{job.parent}</a></Figure>}
      {cost && <Figure name="watching costs">{costText(num(cost.fraction), cost.budget, num(cost.unbudgeted ?? null))}</Figure>}
    </dl>
  );
}

function Figure({ name, children }: { name: string; children: preact.ComponentChildren }) {
  return <div><dt>{name}</dt><dd>{children}</dd></div>;
}
