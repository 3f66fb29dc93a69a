// The checkpoints of a job: their metrics, weights to download, and forks from one.
import { useState } from "preact/hooks";

import { ask } from "../../api/http";
import { useLive } from "../../api/live";
import { type Checkpoint, type Job, num, type Number, type Page } from "../../api/types";
import { ago, bytes, count, figure } from "../../format";
import { Empty, Loading, ProblemBox } from "../../ui/state";
import { notify } from "../../ui/toast";
import { pollEvery } from "./data";
import { Dialog, Ending } from "./actions/dialog";
import { Fork } from "./actions/fork";

const COLUMNS = 4; // the most metrics shown per checkpoint

export function Checkpoints({ job }: { job: Job }) {
  const list = useLive<Page<Checkpoint>>(`jobs/${job.id}/checkpoints`, pollEvery(job, 3));
  const [forked, setForked] = useState<string | null>(null);
  const [toDelete, setToDelete] = useState<Checkpoint | null>(null);
  if (!list.value) return list.problem ? <ProblemBox problem={list.problem} /> : <Loading what="Loading the checkpoints" />;
  const saved = [...list.value.data].reverse();
  if (!saved.length) return <Empty><p>No checkpoints yet.{job.kind === "train" && " The spec's checkpoint field sets when they are saved; “Checkpoint now” saves one."}</p></Empty>;
  const names = [...new Set(saved.flatMap((one) => Object.keys(one.metrics)))].filter((name) => name !== "lr").slice(0, COLUMNS);
  return (
    <div class="table">
      <table>
        <caption class="only-readers">Checkpoints, newest first</caption>
        <thead>
          <tr><th scope="col" class="number">step</th><th scope="col" class="number">epoch</th>{names.map((name) => <th key={name} scope="col" class="number">{name}</th>)}
            <th scope="col" class="number">size</th><th scope="col">saved</th><th scope="col">actions</th></tr>
        </thead>
        <tbody>
          {saved.map((one) => (
            <tr key={one.id}>
              <th scope="row" class="number">{count(one.step)}{one.final && <div class="muted">final</div>}{one.best && <div class="badge good" title={one.reason ?? ""}>best</div>}{one.state === "damaged" && <div class="badge bad">✕ damaged</div>}</th>
              <td class="number">{count(one.epoch)}</td>
              {names.map((name) => <td key={name} class="number">{figure(num(one.metrics[name] as Number))}</td>)}
              <td class="number nowrap">{bytes(one.size_bytes)}</td>
              <td class="nowrap" title={one.created_at}>{ago(one.created_at)}</td>
              <td>
                <span class="row" style={{ flexWrap: "nowrap" }}>
                  <a class="button" href={one.links["weights"]!} download>Weights</a>
                  {one.links["data"] && <a class="button" href={one.links["data"]} download>Data</a>}
                  {one.state === "complete" && <button onClick={() => setForked(one.id)}>Fork from here</button>}
                  <button class="danger" onClick={() => setToDelete(one)}>Delete</button>
                </span>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {forked && <Fork job={job} from={forked} onClose={() => setForked(null)} />}
      {toDelete && <Deleting checkpoint={toDelete} onClose={() => setToDelete(null)} onGone={list.reload} />}
    </div>
  );
}

function Deleting({ checkpoint, onClose, onGone }: { checkpoint: Checkpoint; onClose(): void; onGone(): void }) {
  const send = async (event: Event) => {
    event.preventDefault();
    await notify(ask(`checkpoints/${checkpoint.id}`, { method: "DELETE" }), "Checkpoint deleted.");
    onGone();
    onClose();
  };
  return (
    <Dialog title={`Delete the checkpoint of step ${count(checkpoint.step)}`} onClose={onClose}>
      <form onSubmit={send}>
        <p>This deletes its weights and training state. It cannot be undone.</p>
        <Ending does="Delete permanently" danger busy={false} onClose={onClose} />
      </form>
    </Dialog>
  );
}
