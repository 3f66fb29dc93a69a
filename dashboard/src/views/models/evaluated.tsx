// The newest evaluation of a version: its metrics and confusion matrix; without one, a button that submits an evaluation.
import { useEffect, useState } from "preact/hooks";

import { get, post, withQuery } from "../../api/http";
import { refresh, useLive } from "../../api/live";
import { onceKey } from "../../api/once_key";
import { type Dataset, ended, type Job, type ModelVersion, num, type Page } from "../../api/types";
import { ago, count, figure } from "../../format";
import { Confusion, type Result } from "../job/evaluation";
import { StateBadge } from "../../ui/state";
import { notify } from "../../ui/toast";
import { type DataSpec, evaluationSources, nameOf, type SourceSpec, textOf } from "./sources";

const SEARCHED = 20; // the newest evaluations: the API has no filter by checkpoint
const SEARCH_S = 30;

export function Evaluated({ version, data }: { version: ModelVersion; data: DataSpec | null }) {
  const found = useEvaluation(version.checkpoint);
  const name = `${version.model}:${version.version}`;
  const job = useLive<Job>(found?.job ? `jobs/${found.job.id}` : null, found?.job && ended(found.job) ? Infinity : 1).value ?? found?.job ?? null;
  const result = job?.result as Result | null | undefined;
  const called = (id: number) => String(result?.classes?.[id] ?? id);
  return (
    <>
      <section class="card stack" aria-label={`Evaluation of ${name}`}>
        <h2>Evaluation of {name}</h2>
        {job && <Summary job={job} result={result ?? null} />}
        {found && !found.job && <p class="muted">This version has no evaluation. An evaluation computes the metrics over rows of a dataset, and the confusion matrix.</p>}
        {found && (!job || ended(job)) && data?.train && <Submit version={version} data={data} again={job !== null} />}
        {found && !found.job && !data?.train && <pre class="code" tabIndex={0} aria-label="As a command">{`glasshouse evaluate ${name} --data DATASET --split test`}</pre>}
      </section>
      {result?.confusion && <Confusion counts={result.confusion} called={called} areas={[]} />}
    </>
  );
}

interface Resolved { checkpoint?: string | null; job?: string | null }
interface Found { checkpoint: string; job: Job | null }

const evaluated = new Map<string, string | null>(); // by job: the checkpoint of an evaluation never changes

/** The newest evaluation of a checkpoint that has not failed; null while it is searched. */
function useEvaluation(checkpoint: string): Found | null {
  const path = withQuery("jobs", { kind: "evaluate", state: "queued,starting,running,succeeded", limit: SEARCHED });
  const jobs = useLive<Page<Job>>(path, SEARCH_S).value?.data;
  const [found, setFound] = useState<Found | null>(null);
  useEffect(() => {
    if (!jobs) return;
    const asked = new AbortController();
    newestOf(jobs, checkpoint, asked.signal)
      .then((job) => asked.signal.aborted || setFound({ checkpoint, job }))
      .catch(() => undefined); // requested again with the next list
    return () => asked.abort();
  }, [jobs, checkpoint]);
  return found?.checkpoint === checkpoint ? found : null;
}

async function newestOf(jobs: readonly Job[], checkpoint: string, signal: AbortSignal): Promise<Job | null> {
  for (const job of jobs) {
    if (!evaluated.has(job.id)) evaluated.set(job.id, (await get<Resolved>(`jobs/${job.id}/spec?resolved=true`, { signal })).checkpoint ?? null);
    if (evaluated.get(job.id) === checkpoint) return job;
  }
  return null;
}

function Summary({ job, result }: { job: Job; result: Result | null }) {
  const spec = useLive<{ data?: SourceSpec }>(`jobs/${job.id}/spec`, Infinity).value;
  return (
    <>
      <p class="row"><a href={`/jobs/${job.id}`}>{job.name ?? job.id}</a> <StateBadge state={job.state} /> <span class="muted">{ago(job.ended_at ?? job.created_at)}{spec?.data && `, split ${nameOf(spec.data)}`}{result && `, ${count(result.rows)} rows`}</span></p>
      {result && <dl class="facts">{Object.entries(result.metrics).flatMap(([name, value]) => [<dt key={name}>{name}</dt>, <dd key={`${name} is`}>{figure(num(value))}</dd>])}</dl>}
    </>
  );
}

function Submit({ version, data, again }: { version: ModelVersion; data: DataSpec; again: boolean }) {
  const dataset = useLive<Dataset>(data.train ? `datasets/${data.train.dataset}` : null, Infinity).value;
  const sources = evaluationSources(data, Object.keys(dataset?.splits ?? {}));
  const [selected, setSelected] = useState<string | null>(null);
  const [busy, setBusy] = useState(false);
  const source = sources.find((one) => textOf(one) === selected) ?? sources[0];
  if (!source) return null;
  const submit = async () => {
    setBusy(true);
    const { dataset: id, split, fraction } = source;
    const rows = { dataset: id, split, ...(fraction ? { fraction } : {}) };
    await notify(post<Job>("jobs", { kind: "evaluate", checkpoint: `${version.model}:${version.version}`, data: rows }, onceKey()), "Evaluation submitted.");
    refresh("jobs?");
    setBusy(false);
  };
  return (
    <div class="row">
      <label class="field"><span>Rows</span>
        <select value={textOf(source)} onChange={(event) => setSelected(event.currentTarget.value)}>{sources.map((one) => <option key={textOf(one)} value={textOf(one)}>{nameOf(one)}</option>)}</select>
      </label>
      <button class={again ? "" : "primary"} disabled={busy} onClick={submit}>{again ? "Evaluate again" : "Evaluate"}</button>
    </div>
  );
}
