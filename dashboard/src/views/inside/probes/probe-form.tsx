// Attach or change a probe. The service estimates beforehand what it would match and cost.
import { useEffect, useRef, useState } from "preact/hooks";

import { ask, get, post, Problem } from "../../../api/http";
import { refresh } from "../../../api/live";
import type { components } from "../../../api/schema.gen";
import type { Job } from "../../../api/types";
import { bytes } from "../../../format";
import { Loading, ProblemBox } from "../../../ui/state";
import { toast } from "../../../ui/toast";
import { KIND_NAMES, KINDS } from "../kinds";
import { Matched } from "./matched";
import { bodyOf, cost, type Draft, FORMS, patchOf, type Probe } from "./probe";

type Estimate = components["schemas"]["EstimatedProbe"];
const PAUSE_MS = 500; // after the last keystroke, before the request

interface Props { job: Job; initial: Draft; probe?: Probe; onDone: () => void }

export function ProbeForm({ job, initial, probe, onDone }: Props) {
  const [draft, setDraft] = useState(initial);
  const [sending, setSending] = useState(false);
  const [problem, setProblem] = useState<Problem | null>(null);
  const estimate = useEstimate(job, draft);
  const form = useRef<HTMLFormElement>(null);
  useEffect(() => form.current!.querySelector("input")!.focus(), []);
  const put = (changes: Partial<Draft>) => {
    setDraft({ ...draft, ...changes });
    setProblem(null);
  };
  const send = async (event: Event) => {
    event.preventDefault();
    setSending(true);
    try {
      if (probe) await ask(`jobs/${job.id}/probes/${probe.id}`, { method: "PATCH", body: patchOf(draft) });
      else await post(`jobs/${job.id}/probes`, bodyOf(draft), { "Idempotency-Key": crypto.randomUUID() });
      toast(probe ? "Probe changed, from the next step." : "Probe attached. It takes its first sample at the next step that is due.");
      refresh(`jobs/${job.id}/probes`);
      onDone();
    } catch (error) {
      setProblem(error instanceof Problem ? error : new Problem(0, "unknown", String(error)));
    }
    setSending(false);
  };
  return (
    <form class="card stack" ref={form} onSubmit={send} onKeyDown={(event) => event.key === "Escape" && onDone()} aria-label={probe ? "Change a probe" : "Attach a probe"}>
      <h2>{probe ? `Change ${probe.id}` : "Attach a probe"}</h2>
      <Fields job={job} draft={draft} put={put} />
      <Estimated answer={estimate} />
      {problem && <ProblemBox problem={problem} />}
      <div class="row">
        <button class="primary" disabled={sending || !draft.kinds.length || !draft.want.length}>{probe ? "Save" : "Attach"}</button>
        <button type="button" onClick={onDone}>Close</button>
      </div>
    </form>
  );
}

function Fields({ job, draft, put }: { job: Job; draft: Draft; put: (changes: Partial<Draft>) => void }) {
  const text = (name: keyof Draft, label: string, hint: string, mode: "text" | "numeric" = "numeric") => (
    <label class="field"><span>{label}</span>
      <input name={name} value={draft[name] as string} placeholder={hint} inputMode={mode} onInput={(event) => put({ [name]: event.currentTarget.value })} />
    </label>
  );
  return (
    <div class="probe-form">
      <label class="field wide"><span>Layers or parameters (names or globs)</span>
        <input name="layers" value={draft.layers} required placeholder="conv*, fc.weight" onInput={(event) => put({ layers: event.currentTarget.value })} />
      </label>
      <Checks legend="Tensors" all={KINDS.map((kind) => [kind, KIND_NAMES[kind]])} selected={draft.kinds} onSelect={(kinds) => put({ kinds })} />
      <Checks legend="Record" all={FORMS} selected={draft.want} onSelect={(want) => put({ want })} />
      <label class="field"><span>When</span>
        <select value={draft.when} onChange={(event) => put({ when: event.currentTarget.value as Draft["when"] })}>
          <option value="every">every n steps</option>
          <option value="at">at these steps</option>
          <option value="nonfinite">on NaN or Inf</option>
        </select>
      </label>
      {draft.when === "every" && text("every", "Interval (steps)", "10")}
      {draft.when === "at" && text("at", "Steps", "100, 200", "text")}
      {draft.when !== "at" && draft.phase === "train" && text("overhead", "Budget (% of a step)", "none")}
      {draft.want.includes("full") && text("slice", "Slice (NumPy syntax)", "all; 0:4,:,::2", "text")}
      {(draft.want.includes("full") || draft.want.includes("sample")) && text("maxBytes", "Max bytes per tensor", "default")}
      {draft.when !== "nonfinite" && (
        <label class="field"><span>Phase</span>
          <select value={draft.phase} onChange={(event) => put({ phase: event.currentTarget.value as Draft["phase"] })}>
            <option value="train">training</option>
            <option value="evaluate">evaluation</option>
          </select>
        </label>
      )}
      {draft.kinds.includes("param_grad") && (
        <label class="field"><span>Weight gradient</span>
          <select value={draft.point} onChange={(event) => put({ point: event.currentTarget.value as Draft["point"] })}>
            <option value="raw">before clipping</option>
            <option value="clipped">after clipping</option>
          </select>
        </label>
      )}
      {(job.ranks.length > 1 || draft.ranks) && text("ranks", "Also of single processes", "none; all; 0, 1", "text")}
      {text("start", "Start step", "0")}
      {text("stop", "Stop before step", "none")}
    </div>
  );
}

function Checks({ legend, all, selected, onSelect }: { legend: string; all: readonly (readonly [string, string])[]; selected: readonly string[]; onSelect: (selected: string[]) => void }) {
  return (
    <fieldset>
      <legend>{legend}</legend>
      {all.map(([key, name]) => (
        <label key={key} class="row"><input type="checkbox" value={key} checked={selected.includes(key)}
          onChange={(event) => onSelect(all.map(([one]) => one).filter((one) => (one === key ? event.currentTarget.checked : selected.includes(one))))} /> {name}</label>
      ))}
    </fieldset>
  );
}

type Answer = { estimate: Estimate } | { problem: Problem } | null;

/** The service's estimate of the draft (a dry run), requested shortly after the last change. */
function useEstimate(job: Job, draft: Draft): Answer {
  const [answer, setAnswer] = useState<Answer>(null);
  const body = JSON.stringify(bodyOf(draft));
  useEffect(() => {
    setAnswer(null);
    if (!draft.kinds.length || !draft.want.length || !draft.layers.trim()) return;
    const stopped = new AbortController();
    const timer = setTimeout(() => {
      const request = { method: "POST", body: JSON.parse(body) as unknown, signal: stopped.signal } as const;
      get<Estimate>(`jobs/${job.id}/probes?dry_run=true`, request).then(
        (estimate) => setAnswer({ estimate }),
        (problem) => problem instanceof Problem && setAnswer({ problem }),
      );
    }, PAUSE_MS);
    return () => {
      clearTimeout(timer);
      stopped.abort();
    };
  }, [body, job.id]);
  return answer;
}

function Estimated({ answer }: { answer: Answer }) {
  if (!answer) return <Loading what="Estimating" />;
  if ("problem" in answer) return <ProblemBox problem={answer.problem} />;
  const { matched, bytes_per_step, estimated_cost_s } = answer.estimate;
  return (
    <div class="note" role="status" data-of="estimate">
      <p>Matches {matched.length} {matched.length === 1 ? "name" : "names"}: {bytes(bytes_per_step)} and about <b>{cost(estimated_cost_s)}</b> per sample (an estimate; the cost is measured while the probe runs).</p>
      <Matched names={matched} />
    </div>
  );
}
