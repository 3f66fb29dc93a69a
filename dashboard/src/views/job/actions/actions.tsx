// The actions that a job's state allows: each is an API request whose result is shown.
import { useLocation } from "preact-iso";
import { useState } from "preact/hooks";

import { ask, post } from "../../../api/http";
import { deleting, refresh } from "../../../api/live";
import { ended, type Job, type JobState } from "../../../api/types";
import { notify } from "../../../ui/toast";
import { Copying } from "./copying";
import { Dialog, Ending } from "./dialog";
import { Editing } from "./editing";
import { Fork } from "./fork";
import { Settings } from "./settings";

type Open = "cancel" | "delete" | "fork" | "edit" | "set" | "copy";

/** The kinds that can be paused while they run; others only while they are queued. */
const KINDS: readonly Job["kind"][] = ["train", "infer", "serve"];
const PAUSABLE: readonly JobState[] = ["queued", "starting", "running"];
const STOPS: Partial<Record<Job["kind"], string>> = {
  train: "The job stops at its next step boundary. Its results are kept, and you can fork it from its checkpoints.",
  serve: "Requests in the queue are still answered. Later ones are refused, unless another job serves the model.",
};
const CANCELLED: readonly JobState[] = ["cancelling", "succeeded", "failed", "cancelled"];

export function Actions({ job }: { job: Job }) {
  const [open, setOpen] = useState<Open | null>(null);
  const { route } = useLocation();
  const close = () => setOpen(null);
  const trains = job.kind === "train";
  const over = ended(job);
  const act = async (path: string, done: string) => {
    await notify(post(`jobs/${job.id}/${path}`), done);
    refresh(`jobs/${job.id}`);
  };
  const retry = async () => {
    const made = await notify(post<Job>(`jobs/${job.id}/retry`), "Created a new job with the same spec.");
    if (made) route(`/jobs/${made.id}`);
  };
  return (
    <div class="row" role="group" aria-label="Actions">
      {PAUSABLE.includes(job.state) && (KINDS.includes(job.kind) || job.state === "queued") && <button onClick={() => act("pause", job.kind === "serve" ? "Pausing. Requests in the queue are still answered." : "Pausing at the next step boundary.")}>Pause</button>}
      {(job.state === "paused" || job.state === "pausing") && <button class="primary" onClick={() => act("resume", "Queued to resume.")}>Resume</button>}
      {trains && !over && <button onClick={() => setOpen("set")}>Change settings</button>}
      {trains && !over && <ImmediateCommands job={job} />}
      {trains && <button onClick={() => setOpen("fork")}>Fork</button>}
      {over && <button onClick={retry}>Retry</button>}
      <button onClick={() => setOpen("edit")}>Edit</button>
      <button onClick={() => setOpen("copy")}>Copy as …</button>
      {(!CANCELLED.includes(job.state) || job.state === "cancelling") && <button class="danger" onClick={() => setOpen("cancel")}>Cancel job</button>}
      {over && <button class="danger" onClick={() => setOpen("delete")}>Delete</button>}
      {open === "cancel" && <Cancelling job={job} onClose={close} />}
      {open === "delete" && <Deleting job={job} onClose={close} />}
      {open === "fork" && <Fork job={job} onClose={close} />}
      {open === "edit" && <Editing job={job} onClose={close} />}
      {open === "set" && <Settings job={job} onClose={close} />}
      {open === "copy" && <Copying job={job} onClose={close} />}
    </div>
  );
}

function ImmediateCommands({ job }: { job: Job }) {
  const request = async (what: "checkpoint" | "evaluate", done: string) => {
    await notify(post(`jobs/${job.id}/commands`, { do: what }), done);
    refresh(`jobs/${job.id}`);
  };
  return (
    <>
      <button onClick={() => request("checkpoint", "A checkpoint is saved after the current step.")}>Checkpoint now</button>
      <button onClick={() => request("evaluate", "The job evaluates after the current step.")}>Evaluate now</button>
    </>
  );
}

function Cancelling({ job, onClose }: { job: Job; onClose(): void }) {
  const [force, setForce] = useState(false);
  const [busy, setBusy] = useState(false);
  const send = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    const sent = await notify(post(`jobs/${job.id}/cancel${force ? "?force=true" : ""}`), "Cancellation requested.");
    setBusy(false);
    refresh(`jobs/${job.id}`);
    if (sent) onClose();
  };
  return (
    <Dialog title="Cancel the job" onClose={onClose}>
      <form onSubmit={send}>
        <p>{STOPS[job.kind] ?? "The job stops at its next step boundary. Its results are kept."}</p>
        <label class="row"><input type="checkbox" checked={force} onChange={(event) => setForce(event.currentTarget.checked)} /> {job.kind === "serve" ? "Do not wait for requests in the queue" : "Do not wait for a step boundary"}</label>
        <Ending does={force ? "Cancel now" : "Cancel job"} dismiss="Keep job" danger busy={busy} onClose={onClose} />
      </form>
    </Dialog>
  );
}

function Deleting({ job, onClose }: { job: Job; onClose(): void }) {
  const { route } = useLocation();
  const [busy, setBusy] = useState(false);
  const send = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    route("/jobs");
    const path = `jobs/${job.id}`;
    await notify(deleting(path, () => ask(path, { method: "DELETE" })), "Job deleted.");
    refresh("jobs?"); // the lists
  };
  return (
    <Dialog title="Delete the job" onClose={onClose}>
      <form onSubmit={send}>
        <p>This also deletes its events, metrics, statistics, captures and checkpoints. It cannot be undone.</p>
        <Ending does="Delete permanently" danger busy={busy} onClose={onClose} />
      </form>
    </Dialog>
  );
}
