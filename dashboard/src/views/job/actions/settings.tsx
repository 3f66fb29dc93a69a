// Change settings of a running job at its next step boundary, and show if and from which step they apply.
import { useEffect, useRef, useState } from "preact/hooks";

import { post, Problem } from "../../../api/http";
import { refresh, useLive } from "../../../api/live";
import type { Command, Job, Page } from "../../../api/types";
import { count } from "../../../format";
import { ProblemBox } from "../../../ui/state";
import { toast } from "../../../ui/toast";
import { Dialog, Ending } from "./dialog";
import { commandText } from "../charts/marks";
import { current, settable } from "./settable";

interface Row { path: string; value: string }

export function Settings({ job, onClose }: { job: Job; onClose(): void }) {
  const spec = useLive<Record<string, unknown>>(`jobs/${job.id}/spec?resolved=true`, Infinity).value;
  const commands = useLive<Page<Command>>(`jobs/${job.id}/commands?limit=1000`, 1);
  const [rows, setRows] = useState<Row[]>([{ path: "optimizer.lr", value: "" }]);
  const [problem, setProblem] = useState<Problem | null>(null);
  const [busy, setBusy] = useState(false);
  const [sent, setSent] = useState<string[]>([]);
  const done = commands.value?.data ?? [];
  useApplied(done.filter((one) => sent.includes(one.id)));
  const now = current(spec, done);
  const change = (place: number, row: Partial<Row>) => setRows(rows.map((one, at) => (at === place ? { ...one, ...row } : one)));
  const send = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setProblem(null);
    try {
      const set = Object.fromEntries(rows.map(({ path, value }) => [path.trim(), parsed(value)]));
      const made = await post<Command>(`jobs/${job.id}/commands`, { set });
      setSent([...sent, made.id]);
      refresh(`jobs/${job.id}`);
    } catch (error) {
      setProblem(error instanceof Problem ? error : new Problem(0, "unreadable", (error as Error).message));
    }
    setBusy(false);
  };
  return (
    <Dialog title="Change settings" onClose={onClose}>
      <form onSubmit={send}>
        <datalist id="settable">{settable(spec).map((path) => <option key={path} value={path} />)}</datalist>
        {rows.map((row, place) => (
          <div key={place} class="row">
            <label class="field" style={{ flex: 2 }}><span>Setting</span>
              <input list="settable" required value={row.path} aria-invalid={wrong(problem, row.path)} onInput={(event) => change(place, { path: event.currentTarget.value })} />
            </label>
            <label class="field" style={{ flex: 1 }}><span>{now(row.path) === undefined ? "New value" : `New value (current: ${JSON.stringify(now(row.path))})`}</span>
              <input required value={row.value} aria-invalid={wrong(problem, row.path)} onInput={(event) => change(place, { value: event.currentTarget.value })} />
            </label>
            {rows.length > 1 && <button type="button" class="plain" aria-label={`Remove ${row.path}`} onClick={() => setRows(rows.filter((_, at) => at !== place))}>✕</button>}
          </div>
        ))}
        <div><button type="button" class="small" onClick={() => setRows([...rows, { path: "", value: "" }])}>Add setting</button></div>
        <p class="muted">All settings change at the same step boundary, or none does.</p>
        {problem && <ProblemBox problem={problem} />}
        <Ending does="Apply" busy={busy} onClose={onClose} />
      </form>
      <Commands commands={done} />
    </Dialog>
  );
}

/** Show once for each command sent here if it was applied or rejected. */
function useApplied(commands: readonly Command[]): void {
  const shown = useRef(new Set<string>());
  useEffect(() => {
    for (const one of commands) {
      if (one.state === "pending" || shown.current.has(one.id)) continue;
      shown.current.add(one.id);
      if (one.state === "applied") toast(`${commandText({ ...one.body, ...one })}: applied from step ${count(one.step)}.`);
      else toast(`Rejected: ${reason(one)}`, true);
    }
  });
}

/** A value as JSON; anything else is a string. */
function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function wrong(problem: Problem | null, path: string): true | undefined {
  const escaped = path.trim().replaceAll("~", "~0").replaceAll("/", "~1");
  return problem?.errors.some((one) => one.pointer === `/set/${escaped}`) || undefined;
}

export function reason(command: Command): string {
  const detail = command.problem?.["detail"] ?? command.problem?.["message"];
  return typeof detail === "string" ? detail : "no reason given";
}

export function Commands({ commands }: { commands: readonly Command[] }) {
  if (!commands.length) return null;
  return (
    <div class="table">
      <table>
        <caption class="only-readers">Commands of the job</caption>
        <thead><tr><th scope="col">command</th><th scope="col">state</th><th scope="col" class="number">from step</th></tr></thead>
        <tbody>
          {[...commands].reverse().slice(0, 20).map((one) => (
            <tr key={one.id}>
              <td>{commandText({ ...one.body, ...one })}{one.state === "rejected" && <div class="muted">{reason(one)}</div>}</td>
              <td><span class={`badge ${one.state === "applied" ? "good" : one.state === "rejected" ? "bad" : "busy"}`}>{one.state}</span></td>
              <td class="number">{count(one.step)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
