// Create a job from a checkpoint of this one, with a merge patch on its spec.
import { useLocation } from "preact-iso";
import { useState } from "preact/hooks";

import { post, Problem } from "../../../api/http";
import { useLive } from "../../../api/live";
import type { Checkpoint, Job, Page } from "../../../api/types";
import { count } from "../../../format";
import { Loading, ProblemBox } from "../../../ui/state";
import { toast } from "../../../ui/toast";
import { Dialog, Ending } from "./dialog";

const EXAMPLE = '{\n  "optimizer": {"args": {"lr": 0.001}}\n}';

export function Fork({ job, from, onClose }: { job: Job; from?: string; onClose(): void }) {
  const { route } = useLocation();
  const list = useLive<Page<Checkpoint>>(`jobs/${job.id}/checkpoints`, 5);
  const [checkpoint, setCheckpoint] = useState(from ?? "");
  const [load, setLoad] = useState("");
  const [patch, setPatch] = useState(EXAMPLE);
  const [problem, setProblem] = useState<Problem | null>(null);
  const [busy, setBusy] = useState(false);
  const send = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setProblem(null);
    try {
      const made = await post<Job>(`jobs/${job.id}/fork`, { spec: objectOf(patch), ...(checkpoint && { checkpoint }), ...(load && { load }) });
      toast("Forked.");
      onClose();
      route(`/jobs/${made.id}`);
    } catch (error) {
      setProblem(error instanceof Problem ? error : new Problem(0, "not_json", (error as Error).message));
      setBusy(false);
    }
  };
  const saved = list.value?.data ?? [];
  return (
    <Dialog title="Fork the job" onClose={onClose}>
      {!list.value && !list.problem && <Loading what="Loading the checkpoints" />}
      {list.value && !saved.length && <p>This job has no checkpoint to fork from yet.</p>}
      <form onSubmit={send}>
        <label class="field"><span>From</span>
          <select value={checkpoint} onChange={(event) => setCheckpoint(event.currentTarget.value)}>
            <option value="">newest checkpoint</option>
            {[...saved].reverse().map((one) => <option key={one.id} value={one.id} disabled={one.state === "damaged"}>step {count(one.step)}{one.final ? ", final" : ""}{one.state === "damaged" ? ", damaged" : ""}</option>)}
          </select>
        </label>
        <label class="field"><span>Load</span>
          <select value={load} onChange={(event) => setLoad(event.currentTarget.value)}>
            <option value="">default</option>
            <option value="all">all: continue the run</option>
            <option value="model">weights only: start at step 0</option>
          </select>
        </label>
        <p class="muted small">The default is all, or weights only if the patch changes the network, the training data, the seed or the optimizer type.</p>
        <label class="field"><span>Changes to the spec (JSON merge patch; null resets a field to its default)</span>
          <textarea class="code" spellcheck={false} value={patch} aria-invalid={problem?.errors.length ? true : undefined} onInput={(event) => setPatch(event.currentTarget.value)} />
        </label>
        {problem && <ProblemBox problem={problem} />}
        <Ending does="Fork" busy={busy || !saved.length} onClose={onClose} />
      </form>
    </Dialog>
  );
}

function objectOf(text: string): Record<string, unknown> {
  const value: unknown = text.trim() ? JSON.parse(text) : {};
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error("The patch must be a JSON object.");
  return value as Record<string, unknown>;
}
