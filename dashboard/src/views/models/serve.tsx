// Start a serve job for a model that none serves.
import { useState } from "preact/hooks";

import { post } from "../../api/http";
import { refresh } from "../../api/live";
import { onceKey } from "../../api/once_key";
import type { Job, Model, ModelVersion } from "../../api/types";
import { notify } from "../../ui/toast";
import { referenceTo } from "./references";

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
