// The checkpoints of a job: what they measured, their weights to download, and forks that begin with one.
import { useState } from "preact/hooks";

import { ask } from "../../api/http";
import { useLive } from "../../api/live";
import { type Checkpoint, type Job, num, type Number, type Page } from "../../api/types";
import { ago, bytes, count, figure } from "../../format";
import { Empty, Loading, ProblemBox } from "../../ui/state";
import { tell } from "../../ui/toast";
import { pace } from "./data";
import { Dialog, Ending } from "./dialog";
import { Fork } from "./fork";

const COLUMNS = 4; // so many metrics stand beside a checkpoint

export function Checkpoints({ job }: { job: Job }) {
  const list = useLive<Page<Checkpoint>>(`jobs/${job.id}/checkpoints`, pace(job, 3));
  const [forked, setForked] = useState<string | null>(null);
  const [doomed, setDoomed] = useState<Checkpoint | null>(null);
  if (!list.value) return list.problem ? <ProblemBox problem={list.problem} /> : <Loading what="Reading the checkpoints" />;
  const saved = [...list.value.data].reverse();
  if (!saved.length) return <Empty><p>No checkpoint was saved yet{job.kind === "train" ? ": the spec's checkpoint says when, and “Checkpoint now” saves one." : "."}</p></Empty>;
  const names = [...new Set(saved.flatMap((one) => Object.keys(one.metrics)))].filter((name) => name !== "lr").slice(0, COLUMNS);
  return (
    <div class="table">
      <table>
        <caption class="only-readers">Checkpoints, the newest first</caption>
        <thead>
          <tr><th scope="col" class="number">step</th><th scope="col" class="number">epoch</th>{names.map((name) => <th key={name} scope="col" class="number">{name}</th>)}
            <th scope="col" class="number">size</th><th scope="col">saved</th><th scope="col">actions</th></tr>
        </thead>
        <tbody>
          {saved.map((one) => (
            <tr key={one.id}>
              <th scope="row" class="number">{count(one.step)}{one.final && <div class="muted">the last</div>}{one.best && <div class="badge good" title={one.reason ?? ""}>best</div>}{one.state === "damaged" && <div class="badge bad">✕ damaged</div>}</th>
              <td class="number">{count(one.epoch)}</td>
              {names.map((name) => <td key={name} class="number">{figure(num(one.metrics[name] as Number))}</td>)}
              <td class="number nowrap">{bytes(one.size_bytes)}</td>
              <td class="nowrap" title={one.created_at}>{ago(one.created_at)}</td>
              <td>
                <span class="row">
                  <a class="button" href={one.links["weights"]!} download>Weights</a>
                  {one.links["data"] && <a class="button" href={one.links["data"]} download>Data</a>}
                  {one.state === "complete" && <button onClick={() => setForked(one.id)}>Fork from here</button>}
                  <button class="danger" onClick={() => setDoomed(one)}>Delete</button>
                </span>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {forked && <Fork job={job} from={forked} onClose={() => setForked(null)} />}
      {doomed && <Deleting checkpoint={doomed} onClose={() => setDoomed(null)} onGone={list.reload} />}
    </div>
  );
}

function Deleting({ checkpoint, onClose, onGone }: { checkpoint: Checkpoint; onClose(): void; onGone(): void }) {
  const send = async (event: Event) => {
    event.preventDefault();
    await tell(ask(`checkpoints/${checkpoint.id}`, { method: "DELETE" }), "The checkpoint is deleted.");
    onGone();
    onClose();
  };
  return (
    <Dialog title={`Delete the checkpoint of step ${count(checkpoint.step)}`} onClose={onClose}>
      <form onSubmit={send}>
        <p>Its weights and its state are deleted. That cannot be undone.</p>
        <Ending does="Delete it for good" danger busy={false} onClose={onClose} />
      </form>
    </Dialog>
  );
}
