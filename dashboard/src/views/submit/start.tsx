// Start a spec from a dataset: its fields, splits and target.
import { useState } from "preact/hooks";

import { get, post, type Problem } from "../../api/http";
import type { Dataset, DatasetStats } from "../../api/types";
import { ProblemBox } from "../../ui/state";
import { isObject, type Json, type JsonObject, setAt } from "../../spec/pointer";
import { firstSpec, outputOf, suggestData, type Suggestion, type Table, type TableStats, withDims, withTarget } from "../../spec/suggest";
import type { Known } from "./known";

/** The built-in digits: the existing dataset, or a new one. */
export async function digits(there: Dataset[]): Promise<Dataset> {
  const known = there.find((one) => one.format === "builtin:digits" && one.state === "ready");
  if (known) return known;
  const made = await post<Dataset>("datasets", { builtin: "digits" });
  return get<Dataset>(`datasets/${made.id}`, { headers: { Prefer: "wait=30" } });
}

export async function suggestionFor(dataset: Dataset, batch?: Json): Promise<Suggestion> {
  const stats = (await get<DatasetStats>(`datasets/${dataset.id}/stats`)).splits as unknown as TableStats;
  const suggestion = suggestData(dataset as Table, stats, batch);
  return { ...suggestion, data: withDims(suggestion.data, stats) };
}

/** The spec with another dataset: network and settings stay, fields and target come from the dataset. */
export async function onDataset(spec: Json, dataset: Dataset, known: Known): Promise<Json> {
  const old = isObject(spec) && isObject(spec["data"]) ? spec["data"] : {};
  const suggestion = await suggestionFor(dataset, old["batch_size"]);
  if (!isObject(spec) || !isObject(spec["network"])) return firstSpec(suggestion, presetFor(suggestion, known));
  const changed = setAt(spec, "/data", suggestion.data) as JsonObject;
  return withTarget(changed, suggestion, outputOf(changed, known.presets));
}

function presetFor(suggestion: Suggestion, known: Known) {
  const types = Object.values(suggestion.data["fields"] as JsonObject).map((field) => isObject(field) && field["type"]);
  const name = types[0] === "integer_sequence" ? "lstm_classifier" : "mlp";
  return known.presets.find((one) => one.name === name) ?? known.presets[0]!;
}

interface Starting { datasets: Dataset[]; chosen: string; choose(dataset: Dataset): Promise<void> }

export function Start({ datasets, chosen, choose }: Starting) {
  const [problem, setProblem] = useState<Problem | null>(null);
  const [busy, setBusy] = useState(false);
  const ready = datasets.filter((one) => one.state === "ready");
  const begin = async (what: () => Promise<Dataset>) => {
    setBusy(true);
    setProblem(null);
    await what().then(choose).catch((error: Problem) => setProblem(error));
    setBusy(false);
  };
  const hasDigits = ready.some((one) => one.format === "builtin:digits");
  return (
    <div class="stack" style={{ gap: ".6rem" }}>
      {ready.length === 0 && <p>No datasets yet. <a href="/datasets">Upload one</a>, or use the built-in 1,797 handwritten digits.</p>}
      <div class="row">
        {ready.length > 0 && (
          <label class="field">
            <span>Dataset</span>
            <select value={chosen} disabled={busy} onChange={(event) => begin(async () => ready.find((one) => one.id === event.currentTarget.value)!)}>
              {!ready.some((one) => one.id === chosen) && <option value={chosen}>{chosen || "select …"}</option>}
              {ready.map((one) => <option key={one.id} value={one.id}>{one.name} · {rows(one)} rows</option>)}
            </select>
          </label>
        )}
        {!hasDigits && <button type="button" class={ready.length ? "" : "primary"} style={{ alignSelf: "end" }} disabled={busy} onClick={() => begin(() => digits(datasets))}>Use the built-in digits</button>}
        {busy && <span class="muted" role="status">loading …</span>}
      </div>
      {problem && <ProblemBox problem={problem} />}
    </div>
  );
}

const rows = (dataset: Dataset) => Object.values(dataset.splits).reduce((sum, one) => sum + one, 0).toLocaleString("en-US");
