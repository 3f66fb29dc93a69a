// Upload a file: its format, progress and errors.
import { useRef, useState } from "preact/hooks";

import { refresh, useLive } from "../../api/live";
import { BASE, post, Problem, withQuery } from "../../api/http";
import type { Dataset } from "../../api/types";
import { bytes, percent } from "../../format";
import { ProblemBox } from "../../ui/state";
import { notify, toast } from "../../ui/toast";
import { formatOf, type Known } from "./formats";

interface Sending { name: string; sent: number; size: number; stop(): void }

export function Upload() {
  const known = useLive<{ entries: Known[] }>("catalog/datasets", Infinity).value?.entries ?? [];
  const formats = known.filter((one) => one.kind === "format");
  const [file, setFile] = useState<File | null>(null);
  const [format, setFormat] = useState("");
  const [resize, setResize] = useState("");
  const [header, setHeader] = useState("");
  const [sending, setSending] = useState<Sending | null>(null);
  const [problem, setProblem] = useState<Problem | null>(null);
  const input = useRef<HTMLInputElement>(null);
  const recognized = file ? formatOf(file.name, formats) : "";
  const wanted = format || recognized;
  const options = formats.find((one) => one.name === wanted)?.schema.properties ?? {};
  const submit = async (event: Event) => {
    event.preventDefault();
    if (!file) return;
    setProblem(null);
    const path = withQuery("datasets", { name: file.name, format: wanted, resize: "resize" in options ? resize : null, header: "header" in options ? header : null });
    try {
      const dataset = await send(path, file, (sent, stop) => setSending({ name: file.name, sent, size: file.size, stop }));
      toast(`Uploaded ${dataset.name}`);
      setFile(null);
      if (input.current) input.current.value = "";
    } catch (error) {
      setProblem(error as Problem);
    }
    setSending(null);
    refresh("datasets");
  };
  return (
    <section class="card stack" aria-label="Add a dataset">
      <h2>Add a dataset</h2>
      <form class="row" style={{ alignItems: "end" }} onSubmit={submit}>
        <label class="field"><span>File</span><input ref={input} type="file" required onChange={(event) => setFile(event.currentTarget.files?.[0] ?? null)} /></label>
        <label class="field">
          <span>Format</span>
          <select value={format} onChange={(event) => setFormat(event.currentTarget.value)}>
            <option value="">{recognized ? `auto: ${recognized}` : "auto"}</option>
            {formats.map((one) => <option key={one.name} value={one.name}>{one.name}</option>)}
          </select>
        </label>
        {"resize" in options && <label class="field"><span>Height x width (if sizes differ)</span><input value={resize} placeholder="32x32" pattern="[0-9]+x[0-9]+" onInput={(event) => setResize(event.currentTarget.value)} /></label>}
        {"header" in options && (
          <label class="field"><span>First row</span>
            <select value={header} onChange={(event) => setHeader(event.currentTarget.value)}>
              <option value="">detect</option>
              <option value="true">column names</option>
              <option value="false">data</option>
            </select>
          </label>
        )}
        <button class="primary" disabled={!file || sending !== null || (file !== null && !wanted)}>Upload</button>
        <Builtins names={known.filter((one) => one.kind === "builtin").map((one) => one.name)} />
      </form>
      {file && !wanted && <p class="wrong">The file name has no known format. Select one.</p>}
      {sending && <Progress {...sending} />}
      {problem && <ProblemBox problem={problem} />}
    </section>
  );
}

function Builtins({ names }: { names: string[] }) {
  const add = async (builtin: string) => {
    await notify(post<Dataset>("datasets", { builtin }), `Adding the built-in ${builtin}`);
    refresh("datasets");
  };
  return <>{names.map((name) => <button type="button" key={name} onClick={() => add(name)}>Add the built-in {name}</button>)}</>;
}

function Progress({ name, sent, size, stop }: Sending) {
  const part = size ? sent / size : 0;
  return (
    <div class="row">
      <progress class="grow" max={1} value={part} aria-label={`Upload of ${name}`} />
      <span class="number">{bytes(sent)} of {bytes(size)}, {percent(part)}</span>
      <button type="button" onClick={stop}>Cancel</button>
    </div>
  );
}

/** XMLHttpRequest reports upload progress, fetch does not. The browser streams the file. */
function send(path: string, file: File, progress: (sent: number, stop: () => void) => void): Promise<Dataset> {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const stop = () => request.abort();
    request.open("POST", `${BASE}/${path}`);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.upload.onprogress = (event) => progress(event.loaded, stop);
    request.onload = () => (request.status === 201 ? resolve(JSON.parse(request.responseText) as Dataset) : reject(problemOf(request)));
    request.onerror = () => reject(new Problem(0, "unreachable", "The connection was lost during the upload."));
    request.onabort = () => reject(new Problem(0, "stopped", "The upload was canceled. Nothing was stored."));
    progress(0, stop);
    request.send(file);
  });
}

function problemOf({ status, responseText }: XMLHttpRequest): Problem {
  try {
    const body = JSON.parse(responseText) as { code: string; detail: string; hint?: string; errors?: Problem["errors"]; type?: string };
    return new Problem(status, body.code, body.detail, body.hint ?? null, body.errors ?? [], body.type ?? null);
  } catch {
    return new Problem(status, "unknown", `The service responded with status ${status}.`);
  }
}
