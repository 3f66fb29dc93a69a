// What to do when a model does not answer: start a serve job, resume it, or try again.
import { useState } from "preact/hooks";

import { post, type Problem } from "../../api/http";
import { refresh } from "../../api/live";
import { onceKey } from "../../api/once_key";
import type { Job, Model, ModelVersion, ServedBy } from "../../api/types";
import { ProblemBox, StateBadge } from "../../ui/state";
import { notify } from "../../ui/toast";
import { referenceTo } from "./references";

/** The serve job of a model does not answer now; a paused one is resumed. */
export function NotAnswering({ model, served }: { model: Model; served: ServedBy }) {
  const resume = async () => {
    await notify(post(`jobs/${served.job}/resume`), "Queued to resume.");
    refresh(`models/${model.name}`);
  };
  const isPaused = served.state === "paused" || served.state === "pausing";
  return (
    <div class="note row">
      <span role="status">The job that serves it does not answer now: <a href={`/jobs/${served.job}`}>{served.reference}</a> <StateBadge state={served.state} /></span>
      {isPaused && <button type="button" class="small" onClick={resume}>Resume</button>}
    </div>
  );
}

/** Why a prediction failed. */
export function Failed({ problem }: { problem: Problem }) {
  return (
    <div class="stack">
      <ProblemBox problem={problem} />
      {problem.status === 429 && <p class="muted">The queue of the model is full. Try again in a moment; more replicas or a larger <code>max_queue</code> avoid it.</p>}
    </div>
  );
}

export function ServePrompt({ model, version }: { model: Model; version: ModelVersion }) {
  const [busy, setBusy] = useState(false);
  const reference = referenceTo(model, version);
  const serve = async () => {
    setBusy(true);
    await notify(post<Job>("jobs", { kind: "serve", models: [reference] }, onceKey()), `Serving ${reference}. It answers when the job runs.`);
    refresh(`models/${model.name}`);
    setBusy(false);
  };
  return (
    <div class="stack">
      <p>No job serves version {version.version}. A serve job keeps it in memory, uses a device, and answers requests until you cancel it.</p>
      <div class="row"><button class="primary" disabled={busy} onClick={serve}>Serve {reference}</button></div>
      <pre class="code" tabIndex={0} aria-label="As a command">glasshouse serve {reference}</pre>
    </div>
  );
}
