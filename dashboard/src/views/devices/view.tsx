// The devices by worker, the jobs that use them, and the queue.
import { post } from "../../api/http";
import { refresh, useLive } from "../../api/live";
import type { Device, Page, QueuedJob, Worker } from "../../api/types";
import { ago, bytes, count } from "../../format";
import { Confirm } from "../../ui/confirm";
import { Scroll } from "../../ui/scroll";
import { Empty, Loading, ProblemBox } from "../../ui/state";
import { notify } from "../../ui/toast";
import { factsOf } from "./facts";
import { grouped, type Group } from "./groups";

export default function View() {
  const devices = useLive<Page<Device>>("devices", 2);
  const workers = useLive<Page<Worker>>("workers", 5);
  const queue = useLive<Page<QueuedJob>>("queue", 2);
  const problem = devices.problem ?? workers.problem ?? queue.problem;
  const all = workers.value?.data ?? [];
  return (
    <div class="stack">
      <h1>Devices</h1>
      {problem && <ProblemBox problem={problem} />}
      {!workers.value || !devices.value ? <Loading /> : all.length === 0 && <Empty><p>No workers. Jobs stay queued until one starts.</p><code>glasshouse worker</code></Empty>}
      {all.map((one) => <WorkerCard key={one.id} worker={one} devices={(devices.value?.data ?? []).filter((device) => device.worker === one.id)} />)}
      <Queue jobs={queue.value?.data ?? null} />
    </div>
  );
}

const WORKER: Record<Worker["state"], readonly [kind: string, words: string]> = {
  active: ["good", "active"],
  draining: ["warn", "draining: accepts no new jobs"],
  stopped: ["", "stopped"],
  lost: ["bad", "lost: not responding"],
};

function WorkerCard({ worker, devices }: { worker: Worker; devices: Device[] }) {
  const [kind, words] = WORKER[worker.state];
  const { info } = worker;
  const drain = async () => {
    await notify(post(`workers/${encodeURIComponent(worker.id)}/drain`), `Draining ${worker.id}`);
    refresh("workers");
    refresh("devices");
  };
  return (
    <section class="card stack" aria-label={`Worker ${worker.id}`}>
      <div class="spread">
        <h2>{worker.id} <span class={`badge ${kind}`}>{words}</span></h2>
        {worker.state === "active" && <Confirm word="Drain" label={`Drain ${worker.id}`} question={`Drain ${worker.id}? Its running jobs continue. It accepts no new jobs until it is restarted.`} act={drain} />}
      </div>
      <dl class="facts">
        <dt>Host</dt><dd>{worker.host}</dd>
        <dt>Last heartbeat</dt><dd>{worker.last_seen_at ? ago(worker.last_seen_at) : "never"}</dd>
        <dt>Started</dt><dd>{ago(worker.started_at)}</dd>
        <dt>Version</dt><dd>{worker.version}{typeof info["torch"] === "string" && `, torch ${info["torch"]}`}{typeof info["python"] === "string" && `, Python ${info["python"]}`}</dd>
        {typeof info["memory_bytes"] === "number" && <><dt>Memory</dt><dd>{bytes(info["memory_bytes"])}</dd></>}
      </dl>
      <DeviceTable devices={devices} />
    </section>
  );
}

function DeviceTable({ devices }: { devices: Device[] }) {
  return (
    <Scroll label="Devices">
      <table>
        <caption class="only-readers">Devices</caption>
        <thead><tr><th>Device</th><th>Name</th><th class="number">Memory</th><th>State</th><th>Job</th><th>Facts</th></tr></thead>
        <tbody>{grouped(devices).map((group) => <DeviceLine key={group.ids} {...group} />)}</tbody>
      </table>
    </Scroll>
  );
}

const DEVICE: Record<Device["state"], string> = { free: "good", busy: "busy", unavailable: "bad" };

function DeviceLine({ ids, num, device }: Group) {
  return (
    <tr>
      <td class="mono">{ids}{num > 1 && <span class="muted"> ({num})</span>}</td>
      <td>{device.name}</td>
      <td class="number">{bytes(device.memory_bytes)}</td>
      <td><span class={`badge ${DEVICE[device.state]}`}>{device.state}</span>{device.reason && <span class="wrong"> {device.reason}</span>}</td>
      <td>{device.job ? <a href={`/jobs/${device.job}`}>{device.job}</a> : device.state === "busy" ? <span class="muted">another owner’s</span> : "–"}</td>
      <td>{factsOf(device).join(", ") || "–"}</td>
    </tr>
  );
}

const SHOWN = 200;

function Queue({ jobs }: { jobs: QueuedJob[] | null }) {
  return (
    <section class="card" aria-label="Queue">
      <h2>Queue</h2>
      {jobs === null ? <Loading /> : jobs.length === 0 ? <p class="muted">The queue is empty.</p> : (
        <Scroll label="Queue">
          <table>
            <caption class="only-readers">Queued jobs, in the order in which they start</caption>
            <thead><tr><th class="number">Jobs ahead</th><th>Job</th><th class="number">Priority</th><th>Queued</th><th>Reason</th></tr></thead>
            <tbody>
              {jobs.slice(0, SHOWN).map((one) => (
                <tr key={one.job}>
                  <td class="number">{count(one.position)}</td>
                  <td><a href={`/jobs/${one.job}`}>{one.name ?? one.job}</a></td>
                  <td class="number">{one.priority}</td>
                  <td class="nowrap">{ago(one.queued_at)}</td>
                  <td>{one.reason}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
      {jobs && jobs.length > SHOWN && <p class="muted">The first {SHOWN} of {count(jobs.length)}.</p>}
    </section>
  );
}
