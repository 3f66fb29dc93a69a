// A new job that begins where a checkpoint of this one ends, with a merge patch on its spec.
import { useLocation } from "preact-iso";
import { useState } from "preact/hooks";

import { post, Problem } from "../../api/http";
import { useLive } from "../../api/live";
import type { Checkpoint, Job, Page } from "../../api/types";
import { count } from "../../format";
import { Loading, ProblemBox } from "../../ui/state";
import { say } from "../../ui/toast";
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
      say("Forked.");
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
      {!list.value && !list.problem && <Loading what="Reading the checkpoints" />}
      {list.value && !saved.length && <p>It has no checkpoint yet to begin with.</p>}
      <form onSubmit={send}>
        <label class="field"><span>From</span>
          <select value={checkpoint} onChange={(event) => setCheckpoint(event.currentTarget.value)}>
            <option value="">its newest checkpoint</option>
            {[...saved].reverse().map((one) => <option key={one.id} value={one.id} disabled={one.state === "damaged"}>step {count(one.step)}{one.final ? ", the last" : ""}{one.state === "damaged" ? ", damaged" : ""}</option>)}
          </select>
        </label>
        <label class="field"><span>Load</span>
          <select value={load} onChange={(event) => setLoad(event.currentTarget.value)}>
            <option value="">all, unless the patch changes network, data, seed or optimizer</option>
            <option value="all">all: go on with the run</option>
            <option value="model">the weights alone: begin with step 0</option>
          </select>
        </label>
        <label class="field"><span>What is other in its spec, a merge patch: null takes a default</span>
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
