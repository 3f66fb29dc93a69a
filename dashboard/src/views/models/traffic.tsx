// The requests of a model, by the serve jobs that answer them; a line shows the values since the page was opened.
import type { Live } from "../../api/live";
import type { Job, ServedBy } from "../../api/types";
import { Spark } from "../../charts/spark";
import { count, figure } from "../../format";
import { Scroll } from "../../ui/scroll";
import { ProblemBox, StateBadge } from "../../ui/state";
import { useHistory } from "./history";

type State = NonNullable<Job["serving"]>;

export function Traffic({ name, servedBy, jobs }: { name: string; servedBy: readonly ServedBy[]; jobs: readonly Live<Job>[] }) {
  const isShared = jobs.some((one) => one.value?.serving?.models.some((other) => other.model !== name));
  return (
    <section class="card stack" aria-label="Traffic">
      <h2>Traffic and latency</h2>
      {servedBy.length === 0 && <p class="muted">No job serves this model.</p>}
      {servedBy.length > 0 && (
        <Scroll label="Traffic">
          <table class="traffic">
            <caption class="only-readers">Serve jobs and their requests since each process started</caption>
            <thead><tr><th scope="col">Job</th><th scope="col">Serves</th><th scope="col">Answered</th><th scope="col" class="number">Requests</th><th scope="col">Requests/s</th><th scope="col">Latency, ms</th><th scope="col">In the queue, ms</th><th scope="col" class="number">Waiting</th><th scope="col">Refused</th></tr></thead>
            <tbody>{jobs.map((one, place) => <Line key={one.value?.id ?? place} name={name} live={one} served={servedBy.filter((each) => each.job === one.value?.id)} />)}</tbody>
          </table>
        </Scroll>
      )}
      {jobs.map((one, place) => one.problem && !one.value && <ProblemBox key={place} problem={one.problem} />)}
      {isShared && <p class="muted">Requests, latency and refusals count all models of a job; “answered” counts this one.</p>}
    </section>
  );
}

function Line({ name, live, served }: { name: string; live: Live<Job>; served: readonly ServedBy[] }) {
  const job = live.value;
  const serving = job?.serving ?? null;
  const rates = useHistory(serving?.requests_per_s ?? null);
  const latencies = useHistory(serving?.latency_ms?.p50 ?? null);
  if (!job) return null;
  return (
    <tr>
      <th scope="row"><a href={`/jobs/${job.id}`}>{job.name ?? job.id}</a> <StateBadge state={job.state} /></th>
      <td>{served.map((one) => <div key={one.reference}>{one.reference}{one.version !== null && <span class="muted"> version {one.version}</span>}</div>)}</td>
      <td>{serving ? <Answered serving={serving} name={name} /> : "–"}</td>
      <td class="number">{count(serving?.requests)}</td>
      <td><div>{figure(serving?.requests_per_s ?? null, 3)}</div><History values={rates} what="requests per second" /></td>
      <td>{times(serving?.latency_ms)}<History values={latencies} what="median latency in ms" /></td>
      <td>{times(serving?.queue_ms)}</td>
      <td class="number">{count(serving?.waiting)}</td>
      <td>{serving && Object.keys(serving.refused).length ? Object.entries(serving.refused).map(([code, times]) => <div key={code}>{code} {count(times)}</div>) : "none"}</td>
    </tr>
  );
}

/** A sparkline, once there are two values. */
function History({ values, what }: { values: readonly (number | null)[]; what: string }) {
  return values.filter((one) => one !== null).length > 1 ? <Spark values={[...values]} what={what} /> : null;
}

/** The answers of each version, with those that failed. */
function Answered({ serving, name }: { serving: State; name: string }) {
  const versions = [...new Set([...Object.keys(serving.answered), ...Object.keys(serving.failed)])].filter((one) => one.startsWith(`${name}:`));
  if (!versions.length) return <>none yet</>;
  return <>{versions.map((one) => <div key={one}>{one}: {count(serving.answered[one] ?? 0)}{serving.failed[one] ? <span class="bad-value">, {count(serving.failed[one])} failed</span> : null}</div>)}</>;
}

const times = (found: State["latency_ms"] | undefined) => (found ? <div class="nowrap">p50 {figure(found.p50, 3)}, p99 {figure(found.p99, 3)}</div> : <div>–</div>);
