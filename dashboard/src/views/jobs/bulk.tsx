// Actions on several jobs.
import { ask, post } from "../../api/http";
import { deleting, refresh } from "../../api/live";
import { ended, type Job } from "../../api/types";
import { toast } from "../../ui/toast";

export function Bulk({ jobs, clear }: { jobs: Job[]; clear(): void }) {
  const open = jobs.filter((job) => !ended(job) && job.state !== "cancelling");
  const done = jobs.filter(ended);
  const each = async (selected: Job[], word: string, act: (job: Job) => Promise<unknown>) => {
    const results = await Promise.allSettled(selected.map(act));
    const failed = results.filter((one) => one.status === "rejected");
    const reason = failed[0]?.status === "rejected" ? `: ${String(failed[0].reason.message)}` : "";
    toast(`${word} ${results.length - failed.length} of ${results.length}${reason}`, failed.length > 0);
    clear();
    refresh("jobs?"); // only the list: a deleted job's own requests would fail
  };
  const remove = () => {
    if (confirm(`Delete ${done.length} ended ${done.length === 1 ? "job" : "jobs"} and all events, captures and checkpoints?`))
      void each(done, "Deleted", ({ id }) => deleting(`jobs/${id}`, () => ask(`jobs/${id}`, { method: "DELETE" })));
  };
  const compared = jobs.slice(0, 20).map((job) => job.id).join(",");
  const none = jobs.length === 0;
  return ( // always shown: rows must not move when one is selected, or the next click hits another row
    <div class="card row" role="region" aria-label="Selected jobs">
      <strong>{jobs.length} selected</strong>
      {none ? <button disabled>Compare</button> : <a class="button" href={`/compare?jobs=${compared}`}>Compare{jobs.length > 20 ? " the first 20" : ""}</a>}
      <button disabled={!open.length} onClick={() => each(open, "Canceling", (job) => post(`jobs/${job.id}/cancel`))}>Cancel {open.length || ""}</button>
      <button class="danger" disabled={!done.length} onClick={remove}>Delete {done.length || ""}</button>
      <button class="small" disabled={none} onClick={clear}>Clear</button>
    </div>
  );
}
