// Try a model: a form for one row, and random rows of a dataset beside their true values.
import { useMemo, useState } from "preact/hooks";

import { Problem } from "../../api/http";
import { useLive } from "../../api/live";
import type { CheckpointNetwork, Model, ModelVersion, ServedBy } from "../../api/types";
import { partsOf, type JsonObject } from "../../spec/pointer";
import { Loading, ProblemBox } from "../../ui/state";
import { type Answer, predict } from "./answers";
import { EntryField, type Entered } from "./entry";
import { entriesOf, type Fields, type Loss, neededFields, type Network, type Target, targetsOf, topK, valueOf } from "./inputs";
import { RandomRows } from "./random";
import { Results } from "./results";
import { Failed, NotAnswering, ServePrompt } from "./serve";
import type { SourceSpec } from "./sources";

/** What is known of a version. */
export interface Known {
  reference: string;
  network: Network;
  fields: Fields;
  needed: string[];
  targets: Target[];
  topK: number | null;
}

export interface TrainingSpec {
  loss?: Loss | Loss[];
  data?: { train?: SourceSpec; validation?: SourceSpec | Record<string, SourceSpec> | null; windows?: unknown };
}

export function Try({ model, spec, version, served, onReference }: { model: Model; spec: TrainingSpec | null; version: ModelVersion; served: ServedBy | null; onReference(reference: string): void }) {
  const found = useLive<CheckpointNetwork>(`checkpoints/${version.checkpoint}/network`, Infinity);
  const reference = served?.reference ?? null;
  const references = [...new Set(model.served_by.map((one) => one.reference))];
  const network = found.value?.network as unknown as Network | undefined;
  const fields = found.value?.fields as unknown as Fields | undefined;
  const known = useMemo((): Known | null => {
    if (!network || !fields) return null;
    const losses = spec?.loss ? [spec.loss].flat() : [];
    const targets = targetsOf(network, fields, losses);
    return { reference: reference ?? model.name, network, fields, needed: neededFields(network, fields), targets, topK: topK(network, targets) };
  }, [network, fields, spec, reference]);
  return (
    <section class="card stack" aria-label="Try it">
      <div class="spread">
        <h2>Try it</h2>
        {(references.length > 1 || (references.length === 1 && reference === null)) && (
          <label class="row"><span class="muted">reference</span>
            <select value={reference ?? ""} onChange={(event) => onReference(event.currentTarget.value)}>{reference === null && <option value="">–</option>}{references.map((one) => <option key={one} value={one}>{one}</option>)}</select>
          </label>
        )}
      </div>
      {served === null && <ServePrompt model={model} version={version} />}
      {served?.version === null && <NotAnswering model={model} served={served} />}
      {found.problem && !found.value && <ProblemBox problem={found.problem} />}
      {known === null && !found.problem && <Loading what="Loading the inputs of the model" />}
      {known && reference !== null && (
        <>
          <OneRow key={`${reference} ${version.version}`} known={known} />
          {spec?.data?.train && !spec.data.windows && <RandomRows key={reference} known={known} data={spec.data} />}
        </>
      )}
    </section>
  );
}

/** The problems of a request that belong to a column of its only row. */
function problemsOf(problem: Problem | null, column: string) {
  return (problem?.errors ?? []).filter((one) => {
    const [rows, , name] = partsOf(one.pointer);
    return rows === "rows" && name === column;
  });
}

function OneRow({ known }: { known: Known }) {
  const entries = useMemo(() => entriesOf(known.needed, known.fields), [known]);
  const [values, setValues] = useState<Record<string, Entered>>({});
  const [answer, setAnswer] = useState<Answer | null>(null);
  const [problem, setProblem] = useState<Problem | null>(null);
  const [busy, setBusy] = useState(false);
  const send = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    const row: JsonObject = {};
    for (const entry of entries) {
      const value = values[entry.column] ?? "";
      const sent = typeof value === "string" ? valueOf(entry, value) : { image: { base64: value.url.slice(value.url.indexOf(",") + 1) } };
      if (sent !== undefined) row[entry.column] = sent;
    }
    try {
      setAnswer(await predict(known.reference, [row], known.topK));
      setProblem(null);
    } catch (error) {
      setAnswer(null);
      setProblem(error instanceof Problem ? error : new Problem(0, "unreadable", String(error)));
    }
    setBusy(false);
  };
  const beside = entries.some((entry) => problemsOf(problem, entry.column).length > 0);
  return (
    <form class="try" onSubmit={send}>
      <div class="stack">
        <div class="fields">
          {entries.map((entry) => (
            <EntryField key={entry.column} entry={entry} value={values[entry.column] ?? ""} problems={problemsOf(problem, entry.column)}
              onValue={(value) => setValues((before) => ({ ...before, [entry.column]: value }))} />
          ))}
        </div>
        <div class="row"><button class="primary" disabled={busy}>Predict</button>{busy && <span class="muted" role="status">Waiting for the answer …</span>}</div>
      </div>
      <div>
        {problem && (beside ? <p class="wrong" role="alert">The model cannot take these values: see the fields.</p> : <Failed problem={problem} />)}
        {answer && <Results answer={answer} />}
      </div>
    </form>
  );
}
