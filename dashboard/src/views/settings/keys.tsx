// API keys: create, show once, revoke. Requires the scope admin.
import { useLocation } from "preact-iso";
import { useState } from "preact/hooks";

import { ask, post, type Problem, withQuery } from "../../api/http";
import { refresh, useLive } from "../../api/live";
import { onceKey } from "../../api/once_key";
import type { Key, NewKey, Page } from "../../api/types";
import { ago } from "../../format";
import { Confirm } from "../../ui/confirm";
import { Once } from "../../ui/once";
import { Scroll } from "../../ui/scroll";
import { Loading, ProblemBox } from "../../ui/state";
import { notify } from "../../ui/toast";

export function Keys() {
  const { query } = useLocation();
  const { value, problem } = useLive<Page<Key>>(withQuery("keys", { limit: 50, after: query["keys_after"] }), 10);
  return (
    <section class="card stack" aria-label="API keys">
      <h2>API keys</h2>
      {problem?.status === 403 ? <p class="muted">Only a session with the scope <code>admin</code> can list and create keys.</p> : problem && <ProblemBox problem={problem} />}
      {value ? <><NewKeyForm /><KeyTable page={value} isLater={"keys_after" in query} /></> : !problem && <Loading />}
    </section>
  );
}

const SCOPES: readonly [scope: string, words: string][] = [["read", "view"], ["submit", "view, create and change"], ["admin", "everything, for all owners"]];

function NewKeyForm() {
  const [name, setName] = useState("");
  const [owner, setOwner] = useState("");
  const [scope, setScope] = useState("submit");
  const [made, setMade] = useState<NewKey | null>(null);
  const [problem, setProblem] = useState<Problem | null>(null);
  const [busy, setBusy] = useState(false);
  const create = async (event: Event) => {
    event.preventDefault();
    setProblem(null);
    setBusy(true); // a second click would create a second key
    try {
      setMade(await post<NewKey>("keys", { name, scopes: [scope], ...(owner ? { owner } : {}) }, onceKey()));
      setName("");
      refresh("keys");
    } catch (error) {
      setProblem(error as Problem);
    }
    setBusy(false);
  };
  return (
    <>
      <form class="row" style={{ alignItems: "end" }} onSubmit={create}>
        <label class="field"><span>Key name</span><input value={name} required maxLength={100} autocomplete="off" onInput={(event) => setName(event.currentTarget.value)} /></label>
        <label class="field">
          <span>Scope</span>
          <select value={scope} onChange={(event) => setScope(event.currentTarget.value)}>{SCOPES.map(([one, words]) => <option key={one} value={one}>{one}: {words}</option>)}</select>
        </label>
        <label class="field"><span>Owner (default: yours)</span><input value={owner} maxLength={100} autocomplete="off" onInput={(event) => setOwner(event.currentTarget.value)} /></label>
        <button class="primary" disabled={busy}>Create key</button>
      </form>
      {problem && <ProblemBox problem={problem} />}
      {made?.key && <Once title={`API key ${made.name}.`} secret={made.key} hint="It is shown only once: the service stores only a hash of it." done={() => setMade(null)} />}
    </>
  );
}

function KeyTable({ page, isLater }: { page: Page<Key>; isLater: boolean }) {
  return (
    <>
      <Scroll label="API keys">
        <table>
          <caption class="only-readers">API keys</caption>
          <thead><tr><th>Name</th><th>Prefix</th><th>Owner</th><th>Scopes</th><th>Created</th><th>State</th></tr></thead>
          <tbody>{page.data.map((one) => <KeyLine key={one.id} of={one} />)}</tbody>
        </table>
      </Scroll>
      <div class="row">
        {isLater && <a class="button" href="/settings">Newest</a>}
        {page.has_more && page.next && <a class="button" href={withQuery("/settings", { keys_after: page.next })}>Older keys</a>}
      </div>
    </>
  );
}

function KeyLine({ of: key }: { of: Key }) {
  const revoke = async () => {
    await notify(ask(`keys/${key.id}`, { method: "DELETE" }), `Revoked ${key.name}`);
    refresh("keys");
  };
  return (
    <tr>
      <td>{key.name}</td>
      <td class="mono">{key.hint}…</td>
      <td>{key.owner}</td>
      <td>{key.scopes.join(", ")}</td>
      <td class="nowrap">{ago(key.created_at)}</td>
      <td>{key.revoked_at ? <span class="muted">revoked {ago(key.revoked_at)}</span> : <Confirm word="Revoke" label={`Revoke ${key.name}`} question={`Revoke ${key.name}? Programs and browsers that use it lose access. This cannot be undone.`} act={revoke} />}</td>
    </tr>
  );
}
