// What a serve job serves, and its requests.
import { ended, type Job } from "../../../api/types";
import { figure } from "../../../format";
import { Scroll } from "../../../ui/scroll";
import { Empty } from "../../../ui/state";
import { driftOf } from "./drift";
import { DriftTables } from "./drift-tables";
import { Failure } from "../logs/failure";

type State = NonNullable<Job["serving"]>;

export function Serving({ job }: { job: Job }) {
  const serving = job.serving;
  return (
    <div class="stack">
      <Failure job={job} />
      {serving ? <><Models serving={serving} /><Requests serving={serving} /><DriftTables found={driftOf(serving)} /></> : <Empty><p>{ended(job) ? "It never served a model." : "It serves its models when it runs."}</p></Empty>}
    </div>
  );
}

function Models({ serving }: { serving: State }) {
  return (
    <section class="card" aria-label="Models">
      <h2>Models</h2>
      {serving.models.length === 0 && <p class="muted">No process listens now.</p>}
      <Scroll label="Models"><table>
        <caption class="only-readers">What is served</caption>
        <thead><tr><th>Reference</th><th>Version</th><th class="number">Answered</th><th class="number">Failed</th></tr></thead>
        <tbody>
          {serving.models.map((one) => {
            const version = `${one.model}:${one.version}`;
            return <tr key={one.reference}><td>{one.reference}</td><td><a href={`/models/${one.model}`}>{version}</a></td><td class="number">{serving.answered[version] ?? 0}</td><td class="number">{serving.failed[version] ?? 0}</td></tr>;
          })}
        </tbody>
      </table></Scroll>
    </section>
  );
}

function Requests({ serving }: { serving: State }) {
  const rows: [string, string][] = [
    ["Requests", `${serving.requests}, now ${figure(serving.requests_per_s)} per second`],
    ["In the queue", String(serving.waiting)],
    ["Latency", times(serving.latency_ms)],
    ["Time in the queue", times(serving.queue_ms)],
    ...Object.entries(serving.refused).map(([code, count]): [string, string] => [`Refused: ${code}`, String(count)]),
    ...Object.entries(serving.shadows).map(([version, one]): [string, string] => [`Shadow ${version}`, `${one.requests} requests, ${one.same_classes} with the same classes, largest difference ${one.max_difference}`]),
  ];
  return (
    <section class="card" aria-label="Requests">
      <h2>Requests</h2>
      <Scroll label="Requests"><table><caption class="only-readers">Requests since the process started</caption><tbody>{rows.map(([name, value]) => <tr key={name}><th>{name}</th><td>{value}</td></tr>)}</tbody></table></Scroll>
    </section>
  );
}

function times(found: State["latency_ms"]): string {
  return found ? `p50 ${figure(found.p50)} ms, p99 ${figure(found.p99)} ms` : "–";
}
