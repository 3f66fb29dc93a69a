// Webhooks: URLs that are notified when the state of a job changes, and their deliveries.
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
import { notify } from "../../ui/toast";

const EVENTS = ["queued", "starting", "running", "pausing", "paused", "cancelling", "succeeded", "failed", "cancelled"].map((state) => `job.${state}`);

export function Webhooks() {
  const { value, problem } = useLive<Page<Webhook>>("webhooks?limit=100", 10);
  return (
    <section class="card stack" aria-label="Webhooks">
      <h2>Webhooks</h2>
      {problem && <ProblemBox problem={problem} />}
      <NewWebhookForm />
      {value ? value.data.map((one) => <WebhookLine key={one.id} webhook={one} />) : !problem && <Loading />}
      {value?.has_more && <p class="muted">Only the newest 100 are shown.</p>}
    </section>
  );
}

function NewWebhookForm() {
  const [url, setUrl] = useState("");
  const [events, setEvents] = useState<string[]>([]);
  const [made, setMade] = useState<NewWebhook | null>(null);
  const [problem, setProblem] = useState<Problem | null>(null);
  const [busy, setBusy] = useState(false);
  const toggle = (name: string) => setEvents(events.includes(name) ? events.filter((one) => one !== name) : [...events, name]);
  const create = async (event: Event) => {
    event.preventDefault();
    setProblem(null);
    setBusy(true); // a second click would create a second webhook
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
      <form class="stack" style={{ gap: ".5rem" }} onSubmit={create}>
        <div class="row" style={{ alignItems: "end" }}>
          <label class="field grow"><span>URL to notify of job state changes</span><input type="url" value={url} required placeholder="https://example.org/hook" onInput={(event) => setUrl(event.currentTarget.value)} /></label>
          <button class="primary" disabled={busy}>Add webhook</button>
        </div>
        <fieldset class="plain">
          <legend>Events (none selected: all)</legend>
          <div class="row">{EVENTS.map((name) => <label key={name}><input type="checkbox" checked={events.includes(name)} onChange={() => toggle(name)} /> {name}</label>)}</div>
        </fieldset>
      </form>
      {problem && <ProblemBox problem={problem} />}
      {made?.secret && <Once title="Signing secret." secret={made.secret} hint="It is shown only once." done={() => setMade(null)} />}
    </>
  );
}

function WebhookLine({ webhook }: { webhook: Webhook }) {
  const [open, setOpen] = useState(false);
  const remove = async () => {
    setOpen(false); // stop requesting the deliveries of a deleted webhook
    await notify(ask(`webhooks/${webhook.id}`, { method: "DELETE" }), "Webhook deleted");
    refresh("webhooks?");
  };
  const labels = Object.entries(webhook.labels).map(([name, value]) => `${name}: ${value}`);
  return (
    <details class="layer" open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <strong class="mono">{webhook.url}</strong> <span class="muted">{webhook.events.join(", ") || "all events"}</span>
        {webhook.disabled_at ? <span class="badge bad">disabled</span> : webhook.failing_since && <span class="badge warn">failing since {ago(webhook.failing_since)}</span>}
      </summary>
      <div class="stack">
        {webhook.disabled_reason && <p class="wrong">{webhook.disabled_reason}</p>}
        {labels.length > 0 && <p>Only jobs with {labels.join(", ")}</p>}
        {open && <Deliveries id={webhook.id} />}
        <div><Confirm word="Delete" label={`Delete the webhook ${webhook.url}`} question={`Delete ${webhook.url}? It receives no more events.`} act={remove} /></div>
      </div>
    </details>
  );
}

const BADGES: Record<Delivery["state"], string> = { pending: "busy", delivered: "good", failed: "bad" };

function Deliveries({ id }: { id: string }) {
  const { value, problem } = useLive<Page<Delivery>>(`webhooks/${id}/deliveries?limit=50`, 5);
  if (!value) return problem ? <ProblemBox problem={problem} /> : <Loading />;
  if (!value.data.length) return <p class="muted">No deliveries yet.</p>;
  return (
    <Scroll label="Deliveries">
      <table>
        <caption class="only-readers">Deliveries</caption>
        <thead><tr><th>Event</th><th>State</th><th class="number">Attempts</th><th class="number">HTTP status</th><th>Created</th><th>Error</th></tr></thead>
        <tbody>
          {value.data.map((one) => (
            <tr key={one.id}>
              <td>{one.type}</td>
              <td><span class={`badge ${BADGES[one.state]}`}>{one.state}</span></td>
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
