// The filters of the list of jobs. They are in the URL; text is applied when typing pauses.
import { useEffect, useRef, useState } from "preact/hooks";

import type { Query } from "../../query";

const STATES = ["active", "ended", "queued", "running", "paused", "succeeded", "failed", "cancelled"];
const PAUSE_MS = 250;

interface Props {
  query: URLSearchParams;
  change(changes: Query): void;
}

export function Filters({ query, change }: Props) {
  return (
    <form class="row" role="search" onSubmit={(event) => event.preventDefault()}>
      <Typed name="Search" hint="name or id contains" value={query.get("q") ?? ""} set={(q) => change({ q, after: null })} />
      <label class="field">
        <span>State</span>
        <select value={query.get("state") ?? ""} onChange={(event) => change({ state: event.currentTarget.value, after: null })}>
          <option value="">any</option>
          {STATES.map((state) => <option key={state}>{state}</option>)}
        </select>
      </label>
      <label class="field">
        <span>Kind</span>
        <select value={query.get("kind") ?? ""} onChange={(event) => change({ kind: event.currentTarget.value, after: null })}>
          <option value="">any</option>
          <option>train</option>
          <option>infer</option>
          <option>evaluate</option>
          <option>diagnose</option>
        </select>
      </label>
      <Typed name="Label" hint="key:value, key:value" value={query.get("label") ?? ""} set={(label) => change({ label: whole(label), after: null })} />
      <label class="field">
        <span>Order</span>
        <select value={query.get("order") ?? "desc"} onChange={(event) => change({ order: event.currentTarget.value, after: null })}>
          <option value="desc">newest first</option>
          <option value="asc">oldest first</option>
        </select>
      </label>
    </form>
  );
}

/** The complete labels: one without a colon is still being typed. */
export function whole(label: string): string {
  return label.split(",").map((one) => one.trim()).filter((one) => /^[^:]+:/.test(one)).join(",");
}

function Typed({ name, hint, value, set }: { name: string; hint: string; value: string; set(text: string): void }) {
  const [text, setText] = useState(value);
  const timer = useRef<ReturnType<typeof setTimeout>>(undefined);
  const sent = useRef(value);
  useEffect(() => {
    if (value !== sent.current) setText(value); // changed by a link or the back button
    sent.current = value;
  }, [value]);
  const type = (typed: string) => {
    setText(typed);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => {
      sent.current = typed;
      set(typed);
    }, PAUSE_MS);
  };
  return (
    <label class="field">
      <span>{name}</span>
      <input type="search" placeholder={hint} value={text} onInput={(event) => type(event.currentTarget.value)} />
    </label>
  );
}
