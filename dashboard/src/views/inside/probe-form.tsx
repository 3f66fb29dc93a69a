// Attaches a probe, or changes one: what it would match and cost is told before, by the service.
import { useEffect, useRef, useState } from "preact/hooks";

import { ask, get, post, Problem } from "../../api/http";
import { refresh } from "../../api/live";
import type { components } from "../../api/schema.gen";
import type { Job } from "../../api/types";
import { bytes } from "../../format";
import { Loading, ProblemBox } from "../../ui/state";
import { say } from "../../ui/toast";
import { Matched } from "./matched";
import { bodyOf, cost, type Draft, FORMS, KINDS, patchOf, type Probe } from "./probe";

type Estimate = components["schemas"]["EstimatedProbe"];
const PAUSE_MS = 500; // after the last key, before the service is asked

interface Props { job: Job; initial: Draft; probe?: Probe; onDone: () => void }

export function ProbeForm({ job, initial, probe, onDone }: Props) {
  const [draft, setDraft] = useState(initial);
  const [sending, setSending] = useState(false);
  const [problem, setProblem] = useState<Problem | null>(null);
  const told = useEstimate(job, draft);
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
      say(probe ? "The change holds from the next step." : "Attached: it looks from the next step that is due.");
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
      <Fields draft={draft} put={put} />
      <Told told={told} />
      {problem && <ProblemBox problem={problem} />}
      <div class="row">
        <button class="primary" disabled={sending || !draft.kinds.length || !draft.want.length}>{probe ? "Change it" : "Attach"}</button>
        <button type="button" onClick={onDone}>Close</button>
      </div>
    </form>
  );
}

function Fields({ draft, put }: { draft: Draft; put: (changes: Partial<Draft>) => void }) {
  const text = (name: keyof Draft, label: string, hint: string, mode: "text" | "numeric" = "numeric") => (
    <label class="field"><span>{label}</span>
      <input name={name} value={draft[name] as string} placeholder={hint} inputMode={mode} onInput={(event) => put({ [name]: event.currentTarget.value })} />
    </label>
  );
  return (
    <div class="probe-form">
      <label class="field wide"><span>Layers or parameters: names or globs</span>
        <input name="layers" value={draft.layers} required placeholder="conv*, fc.weight" onInput={(event) => put({ layers: event.currentTarget.value })} />
      </label>
      <Checks legend="Kinds" all={KINDS.map((kind) => [kind, kind])} chosen={draft.kinds} onChoose={(kinds) => put({ kinds })} />
      <Checks legend="Keep" all={FORMS} chosen={draft.want} onChoose={(want) => put({ want })} />
      <label class="field"><span>When</span>
        <select value={draft.when} onChange={(event) => put({ when: event.currentTarget.value as Draft["when"] })}>
          <option value="every">every so many steps</option>
          <option value="at">at named steps</option>
          <option value="nonfinite">when something is not finite</option>
        </select>
      </label>
      {draft.when === "every" && text("every", "Every … steps", "10")}
      {draft.when === "at" && text("at", "Steps", "100, 200", "text")}
      {draft.when !== "at" && draft.phase === "train" && text("overhead", "Budget, % of a step", "none")}
      {draft.want.includes("full") && text("slice", "Part of the tensor", "all; 0:4,:,::2", "text")}
      {(draft.want.includes("full") || draft.want.includes("sample")) && text("maxBytes", "Bytes of a tensor at most", "as usual")}
      {draft.when !== "nonfinite" && (
        <label class="field"><span>Of</span>
          <select value={draft.phase} onChange={(event) => put({ phase: event.currentTarget.value as Draft["phase"] })}>
            <option value="train">training</option>
            <option value="evaluate">evaluations</option>
          </select>
        </label>
      )}
      {draft.kinds.includes("param_grad") && (
        <label class="field"><span>Gradients of parameters</span>
          <select value={draft.point} onChange={(event) => put({ point: event.currentTarget.value as Draft["point"] })}>
            <option value="raw">before clipping</option>
            <option value="clipped">after clipping</option>
          </select>
        </label>
      )}
      {text("start", "From step", "0")}
      {text("stop", "Before step", "no end")}
    </div>
  );
}

function Checks({ legend, all, chosen, onChoose }: { legend: string; all: readonly (readonly [string, string])[]; chosen: readonly string[]; onChoose: (chosen: string[]) => void }) {
  return (
    <fieldset>
      <legend>{legend}</legend>
      {all.map(([key, name]) => (
        <label key={key} class="row"><input type="checkbox" value={key} checked={chosen.includes(key)}
          onChange={(event) => onChoose(all.map(([one]) => one).filter((one) => (one === key ? event.currentTarget.checked : chosen.includes(one))))} /> {name}</label>
      ))}
    </fieldset>
  );
}

type Answer = { estimate: Estimate } | { problem: Problem } | null;

/** What the service says of the draft, without attaching it; asked a moment after the last change. */
function useEstimate(job: Job, draft: Draft): Answer {
  const [answer, setAnswer] = useState<Answer>(null);
  const body = JSON.stringify(bodyOf(draft));
  useEffect(() => {
    setAnswer(null);
    if (!draft.kinds.length || !draft.want.length || !draft.layers.trim()) return;
    const stopped = new AbortController();
    const timer = setTimeout(() => {
      const asked = { method: "POST", body: JSON.parse(body) as unknown, signal: stopped.signal } as const;
      get<Estimate>(`jobs/${job.id}/probes?dry_run=true`, asked).then(
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

function Told({ told }: { told: Answer }) {
  if (!told) return <Loading what="Asking what it would match" />;
  if ("problem" in told) return <ProblemBox problem={told.problem} />;
  const { matched, bytes_per_step, estimated_cost_s } = told.estimate;
  return (
    <div class="note" role="status" data-of="estimate">
      <p>It would look at {matched.length} {matched.length === 1 ? "name" : "names"}, {bytes(bytes_per_step)} a look, for about <b>{cost(estimated_cost_s)}</b> (estimated; the cost is measured once it looks).</p>
      <Matched names={matched} />
    </div>
  );
}
