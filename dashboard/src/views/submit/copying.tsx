// The spec as curl, Python or a command line, to copy.
import { useState } from "preact/hooks";

import type { Json } from "../../spec/pointer";
import { snippet, type Tool, TOOLS } from "../../spec/snippets";
import { copy } from "../../ui/once";

export function Copying({ spec }: { spec: Json }) {
  const [tool, setTool] = useState<Tool | null>(null);
  const text = tool && snippet(tool, spec, location.origin);
  return (
    <section class="card stack" aria-label="Copy as">
      <div class="row">
        <h2>Copy as</h2>
        {TOOLS.map((one) => <button type="button" key={one} aria-pressed={tool === one} onClick={() => setTool(one)}>{one}</button>)}
      </div>
      {text && (
        <>
          <p class="muted">It uses the key in <code>$GLASSHOUSE_API_KEY</code>. Create one under <a href="/settings">Settings</a>.</p>
          <pre class="code" tabIndex={0} aria-label={`As ${tool}`}>{text}</pre>
          <div><button type="button" class="primary" onClick={() => copy(text)}>Copy</button></div>
        </>
      )}
    </section>
  );
}
