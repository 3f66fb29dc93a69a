// Webhooks: addresses that are told when jobs move, and what was sent to them.
import { useState } from "preact/hooks";

import { ask, post, type Problem } from "../../api/http";
import { refresh, useLive } from "../../api/live";
import { onceKey } from "../../api/once_key";
import type { Delivery, NewWebhook, Page, Webhook } from "../../api/types";
import { ago } from "../../format";
import { Confirm } from "../../ui/confirm";
import { Once } from "../../ui/once";
import { Scroll } from "../../ui/scroll";
import { Loading, ProblemBox } from "../../ui/state";
import { tell } from "../../ui/toast";

const EVENTS = ["queued", "starting", "running", "pausing", "paused", "cancelling", "succeeded", "failed", "cancelled"].map((state) => `job.${state}`);

export function Webhooks() {
  const { value, problem } = useLive<Page<Webhook>>("webhooks?limit=100", 10);
  return (
    <section class="card stack" aria-label="Webhooks">
      <h2>Webhooks</h2>
      {problem && <ProblemBox problem={problem} />}
      <NewWebhookForm />
      {value ? value.data.map((one) => <WebhookLine key={one.id} webhook={one} />) : !problem && <Loading />}
      {value?.has_more && <p class="muted">The newest 100 are shown.</p>}
    </section>
  );
}

function NewWebhookForm() {
  const [url, setUrl] = useState("");
  const [events, setEvents] = useState<string[]>([]);
  const [made, setMade] = useState<NewWebhook | null>(null);
  const [problem, setProblem] = useState<Problem | null>(null);
  const [busy, setBusy] = useState(false);
  const turn = (name: string) => setEvents(events.includes(name) ? events.filter((one) => one !== name) : [...events, name]);
  const make = async (event: Event) => {
    event.preventDefault();
    setProblem(null);
    setBusy(true); // a second click would make a second one
    try {
      setMade(await post<NewWebhook>("webhooks", { url, events }, onceKey()));
      setUrl("");
      refresh("webhooks");
    } catch (error) {
      setProblem(error as Problem);
    }
    setBusy(false);
  };
  return (
    <>
      <form class="stack" style={{ gap: ".5rem" }} onSubmit={make}>
        <div class="row" style={{ alignItems: "end" }}>
          <label class="field grow"><span>Address that is told when a job moves</span><input type="url" value={url} required placeholder="https://example.org/hook" onInput={(event) => setUrl(event.currentTarget.value)} /></label>
          <button class="primary" disabled={busy}>Add a webhook</button>
        </div>
        <fieldset class="plain">
          <legend>Of these (none chosen: of all)</legend>
          <div class="row">{EVENTS.map((name) => <label key={name}><input type="checkbox" checked={events.includes(name)} onChange={() => turn(name)} /> {name}</label>)}</div>
        </fieldset>
      </form>
      {problem && <ProblemBox problem={problem} />}
      {made?.secret && <Once title="The secret of its signatures." secret={made.secret} hint="It is shown this once." done={() => setMade(null)} />}
    </>
  );
}

function WebhookLine({ webhook }: { webhook: Webhook }) {
  const [open, setOpen] = useState(false);
  const remove = async () => {
    setOpen(false); // nobody asks for the deliveries of what is gone
    await tell(ask(`webhooks/${webhook.id}`, { method: "DELETE" }), "The webhook is deleted");
    refresh("webhooks?");
  };
  const labels = Object.entries(webhook.labels).map(([name, value]) => `${name}: ${value}`);
  return (
    <details class="layer" open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <strong class="mono">{webhook.url}</strong> <span class="muted">{webhook.events.join(", ") || "everything"}</span>
        {webhook.disabled_at ? <span class="badge bad">switched off</span> : webhook.failing_since && <span class="badge warn">failing since {ago(webhook.failing_since)}</span>}
      </summary>
      <div class="stack">
        {webhook.disabled_reason && <p class="wrong">{webhook.disabled_reason}</p>}
        {labels.length > 0 && <p>Only of jobs with {labels.join(", ")}</p>}
        {open && <Deliveries id={webhook.id} />}
        <div><Confirm word="Delete" label={`Delete the webhook ${webhook.url}`} question={`Delete ${webhook.url}? Nothing more is sent to it.`} act={remove} /></div>
      </div>
    </details>
  );
}

const LOOKS: Record<Delivery["state"], string> = { pending: "busy", delivered: "good", failed: "bad" };

function Deliveries({ id }: { id: string }) {
  const { value, problem } = useLive<Page<Delivery>>(`webhooks/${id}/deliveries?limit=50`, 5);
  if (!value) return problem ? <ProblemBox problem={problem} /> : <Loading />;
  if (!value.data.length) return <p class="muted">Nothing was sent yet.</p>;
  return (
    <Scroll label="Deliveries">
      <table>
        <caption class="only-readers">Deliveries</caption>
        <thead><tr><th>Message</th><th>State</th><th class="number">Tries</th><th class="number">Answer</th><th>When</th><th>Problem</th></tr></thead>
        <tbody>
          {value.data.map((one) => (
            <tr key={one.id}>
              <td>{one.type}</td>
              <td><span class={`badge ${LOOKS[one.state]}`}>{one.state}</span></td>
              <td class="number">{one.tries}</td>
              <td class="number">{one.status ?? "–"}</td>
              <td class="nowrap">{ago(one.created_at)}</td>
              <td>{one.problem ?? ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}
