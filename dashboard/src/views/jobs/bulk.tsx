// What is done with several jobs at once.
import { ask, post } from "../../api/http";
import { deleting, refresh } from "../../api/live";
import { ended, type Job } from "../../api/types";
import { say } from "../../ui/toast";

export function Bulk({ jobs, clear }: { jobs: Job[]; clear(): void }) {
  const open = jobs.filter((job) => !ended(job) && job.state !== "cancelling");
  const done = jobs.filter(ended);
  const each = async (wanted: Job[], word: string, act: (job: Job) => Promise<unknown>) => {
    const told = await Promise.allSettled(wanted.map(act));
    const failed = told.filter((one) => one.status === "rejected");
    const reason = failed[0]?.status === "rejected" ? `: ${String(failed[0].reason.message)}` : "";
    say(`${word} ${told.length - failed.length} of ${told.length}${reason}`, failed.length > 0);
    clear();
    refresh("jobs?"); // the list; not what is asked of each job, which may be gone
  };
  const remove = () => {
    if (confirm(`Delete ${done.length} ended jobs with all their events, captures and checkpoints?`))
      void each(done, "Deleted", ({ id }) => deleting(`jobs/${id}`, () => ask(`jobs/${id}`, { method: "DELETE" })));
  };
  const compared = jobs.slice(0, 20).map((job) => job.id).join(",");
  const none = jobs.length === 0;
  return ( // always there: a row that is ticked must not move, or the next click hits another
    <div class="card row" role="region" aria-label="Selected jobs">
      <strong>{jobs.length} selected</strong>
      {none ? <button disabled>Compare</button> : <a class="button" href={`/compare?jobs=${compared}`}>Compare{jobs.length > 20 ? " the first 20" : ""}</a>}
      <button disabled={!open.length} onClick={() => each(open, "Cancelling", (job) => post(`jobs/${job.id}/cancel`))}>Cancel {open.length || ""}</button>
      <button class="danger" disabled={!done.length} onClick={remove}>Delete {done.length || ""}</button>
      <button class="small" disabled={none} onClick={clear}>Clear</button>
    </div>
  );
}
