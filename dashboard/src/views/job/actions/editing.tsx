// Edit the name, labels and priority of a job. The changes are sent as a merge patch.
import { useState } from "preact/hooks";

import { ask, Problem } from "../../../api/http";
import { refresh } from "../../../api/live";
import type { Job } from "../../../api/types";
import { ProblemBox } from "../../../ui/state";
import { toast } from "../../../ui/toast";
import { Dialog, Ending } from "./dialog";

export function Editing({ job, onClose }: { job: Job; onClose(): void }) {
  const [name, setName] = useState(job.name ?? "");
  const [labels, setLabels] = useState(labelText(job.labels));
  const [priority, setPriority] = useState(String(job.priority));
  const [problem, setProblem] = useState<Problem | null>(null);
  const send = async (event: Event) => {
    event.preventDefault();
    try {
      await ask(`jobs/${job.id}`, { method: "PATCH", body: patchOf(job, name, labels, priority) });
    } catch (error) {
      return setProblem(error instanceof Problem ? error : new Problem(0, "invalid", String(error instanceof Error ? error.message : error)));
    }
    toast("Saved.");
    refresh(`jobs/${job.id}`);
    onClose();
  };
  const wrong = (field: string) => problem?.errors.some((one) => one.pointer.startsWith(`/${field}`)) || undefined;
  return (
    <Dialog title="Edit the job" onClose={onClose}>
      <form onSubmit={send}>
        <label class="field"><span>Name</span><input value={name} aria-invalid={wrong("name")} onInput={(event) => setName(event.currentTarget.value)} /></label>
        <label class="field"><span>Labels (one “name: value” per line)</span>
          <textarea class="code" value={labels} aria-invalid={wrong("labels")} onInput={(event) => setLabels(event.currentTarget.value)} />
        </label>
        <label class="field"><span>Priority (−1000 to 1000; higher runs earlier)</span>
          <input type="number" value={priority} aria-invalid={wrong("priority")} onInput={(event) => setPriority(event.currentTarget.value)} />
        </label>
        {problem && <ProblemBox problem={problem} />}
        <Ending does="Save" busy={false} onClose={onClose} />
      </form>
    </Dialog>
  );
}

function labelText(labels: Job["labels"]): string {
  return Object.entries(labels).map(([key, value]) => `${key}: ${value}`).join("\n");
}

/** Removed labels are sent as null. */
function patchOf(job: Job, name: string, labels: string, priority: string): Record<string, unknown> {
  const kept: Record<string, string | null> = Object.fromEntries(Object.keys(job.labels).map((key) => [key, null]));
  for (const line of labels.split("\n").map((one) => one.trim()).filter(Boolean)) {
    const colon = line.indexOf(":");
    if (colon < 1) throw new Error(`The label “${line}” is not of the form “name: value”.`);
    kept[line.slice(0, colon).trim()] = line.slice(colon + 1).trim();
  }
  return { name: name.trim() || null, labels: kept, priority: Number(priority) };
}
