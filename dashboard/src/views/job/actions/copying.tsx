// The spec of a job as a command to copy and run elsewhere.
import { useState } from "preact/hooks";

import { useLive } from "../../../api/live";
import type { Job } from "../../../api/types";
import type { Json } from "../../../spec/pointer";
import { snippet, type Tool, TOOLS } from "../../../spec/snippets";
import { Loading, ProblemBox } from "../../../ui/state";
import { notify } from "../../../ui/toast";
import { Dialog } from "./dialog";

export function Copying({ job, onClose }: { job: Job; onClose(): void }) {
  const [tool, setTool] = useState<Tool>("curl");
  const [resolved, setResolved] = useState(false);
  const spec = useLive<Json>(`jobs/${job.id}/spec${resolved ? "?resolved=true" : ""}`, Infinity);
  const text = spec.value === null ? null : snippet(tool, spec.value, location.origin);
  return (
    <Dialog title="Copy as a command" onClose={onClose}>
      <div class="row" role="group" aria-label="Format">
        {TOOLS.map((one) => <button key={one} aria-pressed={tool === one} onClick={() => setTool(one)}>{one}</button>)}
        <label class="row"><input type="checkbox" checked={resolved} onChange={(event) => setResolved(event.currentTarget.checked)} /> include defaults</label>
      </div>
      {spec.problem && <ProblemBox problem={spec.problem} />}
      {text === null ? <Loading what="Loading the spec" /> : <pre class="block" tabIndex={0} aria-label={`As ${tool}`}>{text}</pre>}
      <div class="row end">
        <button class="primary" disabled={text === null} onClick={() => notify(navigator.clipboard.writeText(text ?? ""), "Copied.")}>Copy</button>
      </div>
    </Dialog>
  );
}
