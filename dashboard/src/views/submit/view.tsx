// A new job: the spec as form and JSON, its plan, and the submit button.
import { useLocation } from "preact-iso";
import { useEffect, useMemo, useState } from "preact/hooks";

import { get, post, Problem, withQuery } from "../../api/http";
import { useLive } from "../../api/live";
import { onceKey } from "../../api/once_key";
import type { Dataset, Job, Page } from "../../api/types";
import { getAt, type Json } from "../../spec/pointer";
import { outputOf } from "../../spec/suggest";
import { Loading, ProblemBox } from "../../ui/state";
import { toast } from "../../ui/toast";
import { Copying } from "./copying";
import { Draft, forget, kept } from "./draft";
import { jumpTo } from "./jump";
import { type Known, known as load } from "./known";
import { PlanPane } from "./plan";
import { usePlan } from "./planning";
import { SpecForm } from "./spec_form";
import { onDataset, Start } from "./start";
import { withPreset } from "./network";

interface Initial { known: Known; spec: Json; datasets: Dataset[] }

export default function View() {
  const { query } = useLocation();
  const [initial, setInitial] = useState<Initial | null>(null);
  const [problem, setProblem] = useState<Problem | null>(null);
  const from = query["from"] ?? "";
  useEffect(() => {
    setInitial(null);
    begin(from, query["dataset"] ?? "").then(setInitial, setProblem);
  }, [from]);
  if (problem) return <ProblemBox problem={problem} />;
  return initial ? <Editor key={from} {...initial} from={from} /> : <Loading what="Loading the catalog" />;
}

async function begin(from: string, dataset: string): Promise<Initial> {
  const [known, list] = await Promise.all([load(), get<Page<Dataset>>("datasets?limit=200")]);
  const spec = from ? await get<Json>(`jobs/${from}/spec?resolved=false`) : dataset ? null : kept();
  if (spec !== null) return { known, spec, datasets: list.data };
  const first = list.data.find((one) => one.state === "ready" && (!dataset || one.id === dataset));
  return { known, spec: first ? await onDataset({}, first, known) : {}, datasets: list.data };
}

function Editor({ known, spec: first, datasets: earlier, from }: Initial & { from: string }) {
  const { path, query, route } = useLocation();
  const draft = useMemo(() => new Draft(first), [first]);
  const spec = draft.spec.value;
  const isEmpty = Object.keys(spec ?? {}).length === 0;
  const planned = usePlan(isEmpty || draft.wrong.value ? null : spec);
  const datasets = useLive<Page<Dataset>>("datasets?limit=200", 10).value?.data ?? earlier;
  const isText = query["view"] === "json";
  const viewed = (view: string | null) => withQuery(path, { ...query, view });
  const choosePreset = (name: string) => draft.replace(withPreset(spec, known, name, outputOf(spec, known.presets)));
  const jump = (pointer: string) => {
    if (isText) route(viewed(null), true);
    jumpTo(pointer);
  };
  const reset = () => {
    forget();
    draft.replace({});
  };
  return (
    <div class="stack">
      <div class="spread">
        <h1>New job{from && <> <span class="muted">from <a href={`/jobs/${from}`}>{from}</a></span></>}</h1>
        <div class="row">
          {planned.problems.length > 0 && <button type="button" class="danger" onClick={() => jump(planned.problems[0]!.pointer)}>{planned.problems.length} {planned.problems.length === 1 ? "error" : "errors"}</button>}
          <button type="button" onClick={reset}>Reset</button>
          <SubmitButton spec={spec} disabled={isEmpty || draft.wrong.value !== null} />
        </div>
      </div>
      <div class="submit">
        <div class="stack">
          <section class="card"><Start datasets={datasets} chosen={String(getAt(spec, "/data/train/dataset") ?? "")} choose={async (one) => draft.replace(await onDataset(draft.spec.value, one, known))} /></section>
          <nav class="tabs" aria-label="Spec views">
            <a href={viewed(null)} aria-current={isText ? undefined : "page"}>Form</a>
            <a href={viewed("json")} aria-current={isText ? "page" : undefined}>JSON</a>
          </nav>
          {isText ? <Text draft={draft} /> : isEmpty ? <p class="muted">Select a dataset, or paste a spec under <a href={viewed("json")}>JSON</a>.</p> : <SpecForm {...{ draft, known, planned, datasets, choosePreset }} />}
        </div>
        <div class="stack beside">
          {!isEmpty && <PlanPane planned={planned} jump={jump} />}
          {!isEmpty && <Copying spec={spec} />}
        </div>
      </div>
    </div>
  );
}

function Text({ draft }: { draft: Draft }) {
  return (
    <div>
      <label class="field">
        <span>Spec as JSON. Paste one or edit it here; the form shows the same.</span>
        <textarea class="mono" spellcheck={false} autocomplete="off" value={draft.text.value} aria-invalid={draft.wrong.value !== null} onInput={(event) => draft.write(event.currentTarget.value)} />
      </label>
      {draft.wrong.value && <p class="wrong" role="alert">Invalid JSON: {draft.wrong.value}</p>}
    </div>
  );
}

/** One idempotency key per spec: a second click or a retry does not create a second job. */
function SubmitButton({ spec, disabled }: { spec: Json; disabled: boolean }) {
  const { route } = useLocation();
  const [busy, setBusy] = useState(false);
  const key = useMemo(onceKey, [spec]);
  const submit = async () => {
    setBusy(true);
    try {
      const job = await post<Job>("jobs", spec, key);
      forget();
      toast("Submitted");
      route(`/jobs/${job.id}`);
    } catch (error) {
      toast(error instanceof Problem ? [error.message, error.hint].filter(Boolean).join(" ") : String(error), true);
      setBusy(false);
    }
  };
  return <button type="button" class="primary" disabled={disabled || busy} onClick={submit}>{busy ? "Submitting …" : "Submit"}</button>;
}
