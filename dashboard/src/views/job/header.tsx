// The header of a job: name, state, actions, progress, devices, times and watching overhead.
import { useLive } from "../../api/live";
import { ended, type Job, num, type Page } from "../../api/types";
import { ago, count, duration, figure } from "../../format";
import { StateBadge } from "../../ui/state";
import { lostAt } from "../jobs/finite";
import { Actions } from "./actions/actions";
import { costText } from "./cost";

export function Header({ job }: { job: Job }) {
  const lost = lostAt(job.summary);
  return (
    <header class="head">
      <div class="spread">
        <div class="row">
          <h1>{job.name ?? job.id}</h1>
          <span role="status"><StateBadge state={job.state} /></span>
          {lost !== null && !job.error && <span class="badge bad">✕ loss is NaN or Inf from step {count(lost)}</span>}
          {Object.entries(job.labels).map(([name, value]) => <a key={name} class="chip" href={`/jobs?label=${encodeURIComponent(`${name}:${value}`)}`}>{name}: {value}</a>)}
        </div>
        <Actions job={job} />
      </div>
      <Progress job={job} />
      <Reason job={job} />
      <Facts job={job} />
      {job.warnings.length > 0 && (
        <details class="note"><summary>{count(job.warnings.length)} plan {job.warnings.length === 1 ? "warning" : "warnings"}</summary>
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

const IDLE = "no request came for idle_s"; // as in `glasshouse/spec/jobs/serve_job.py`

/** Why the job is in its state, if that is not obvious. */
function Reason({ job }: { job: Job }) {
  const queue = useLive<Page<{ job: string; position: number; reason: string }>>(job.state === "queued" ? "queue" : null, 3).value;
  const waits = queue?.data.find((one) => one.job === job.id);
  if (job.not_before) return <p class="note">Retry at {new Date(job.not_before).toLocaleTimeString("en-GB")}: {job.state_reason}</p>;
  if (waits) return <p class="note">Waiting: {waits.reason}.</p>;
  if (job.state === "paused" && job.kind === "serve") return <p class="note">Paused {ago(job.paused_at)}: {job.state_reason}. It holds no device{job.state_reason === IDLE ? "; the next request resumes it." : " and answers no requests."}</p>;
  if (job.state === "paused") return <p class="note">Paused {ago(job.paused_at)}. Its checkpoint is saved, and it holds no device.</p>;
  return job.state_reason && !job.error ? <p class="note">{job.state_reason}</p> : null;
}

function Facts({ job }: { job: Job }) {
  const from = job.started_at ? Date.parse(job.started_at) : null;
  const to = job.ended_at ? Date.parse(job.ended_at) : Date.now();
  const cost = job.probe_overhead;
  const threads = job.ranks[0]?.threads ?? null;
  return (
    <dl class="figures">
      <Fact name="id"><code>{job.id}</code></Fact>
      <Fact name="created"><span title={job.created_at}>{ago(job.created_at)}</span>{job.created_by && ` by ${job.created_by}`}</Fact>
      {from !== null && <Fact name={ended(job) ? "duration" : "elapsed"}>{duration((to - from) / 1000)}</Fact>}
      {job.paused_s > 0 && <Fact name="of which paused">{duration(job.paused_s)}</Fact>}
      <Fact name="attempt">{job.attempt || "none yet"}</Fact>
      {job.devices.length > 0 && <Fact name={job.devices.length === 1 ? "device" : "devices"}>{job.devices.map((one) => `${one.id} on ${one.worker}`).join(", ")}</Fact>}
      {job.ranks.length > 1 && <Fact name="processes">{job.ranks.length}</Fact>}
      {threads !== null && <Fact name={job.ranks.length > 1 ? "threads per process" : "threads"}>{threads}</Fact>}
      {job.priority !== 0 && <Fact name="priority">{job.priority}</Fact>}
      {job.parent && <Fact name="parent"><a href={`/jobs/${job.parent}`}>{job.parent}</a></Fact>}
      {cost && <Fact name="watching overhead">{costText(num(cost.fraction), cost.budget, num(cost.unbudgeted ?? null))}</Fact>}
    </dl>
  );
}

function Fact({ name, children }: { name: string; children: preact.ComponentChildren }) {
  return <div><dt>{name}</dt><dd>{children}</dd></div>;
}
