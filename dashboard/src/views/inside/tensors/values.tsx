// The first values of a tensor as numbers: at most the 1,000 that the service returns as JSON.
import { useState } from "preact/hooks";

import { useLive } from "../../../api/live";
import { type Number as JsonNumber, num } from "../../../api/types";
import { count, figure } from "../../../format";
import { useQuery } from "../../../query";
import { Loading } from "../../../ui/state";
import { pathOf, type Summary } from "./captures";
import type { Capture } from "../kinds";
import { valueRows } from "./value-rows";

export function Values({ capture }: { capture: Capture }) {
  const [query, change] = useQuery();
  const slice = query.get("slice") ?? "";
  const [typed, setTyped] = useState(slice);
  const open = query.get("values") === "1";
  const { value, problem } = useLive<Summary>(open ? pathOf(capture, { slice: slice || null }) : null, Infinity);
  return (
    <section class="card stack">
      <div class="row">
        <button aria-pressed={open} onClick={() => change({ values: open ? null : "1" })}>Values</button>
        {open && (
          <form class="row" onSubmit={(event) => (event.preventDefault(), change({ slice: typed }))}>
            <label class="row"><span class="muted">Slice (NumPy syntax)</span><input value={typed} placeholder="0:4,:,::2" onInput={(event) => setTyped(event.currentTarget.value)} /></label>
            <button>Show</button>
          </form>
        )}
      </div>
      {open && problem && <p class="bad-value" role="alert">{problem.message}</p>}
      {open && !problem && (value ? <ValueTable summary={value} /> : <Loading what="Loading the values" />)}
    </section>
  );
}

function ValueTable({ summary }: { summary: Summary }) {
  const { rows, width } = valueRows(summary.values as unknown, summary.shape, summary.truncated);
  return (
    <>
      <div class="values" tabIndex={0} role="region" aria-label="Values">
        <table>
          <thead><tr><th scope="col">Index</th>{Array.from({ length: width }, (_, n) => <th key={n} scope="col" class="number">{n}</th>)}</tr></thead>
          <tbody>{rows.map((row) => <tr key={row.index}><th scope="row">{row.index}</th>{row.values.map((one, n) => <Cell key={n} value={one} />)}</tr>)}</tbody>
        </table>
      </div>
      <p class="muted">{summary.truncated ? `The first 1,000 of ${count(summary.shape.reduce((all, length) => all * length, 1))} values. Enter a slice to see others, or download the tensor.` : `All values of ${summary.shape.join(" × ") || "a scalar"}.`}</p>
    </>
  );
}

function Cell({ value }: { value: unknown }) {
  if (Array.isArray(value)) return <td>{value.map((one) => figure(num(one as JsonNumber), 6)).join(" + i")}</td>;
  const number = typeof value === "boolean" ? +value : num(value as JsonNumber);
  const odd = number !== null && !Number.isFinite(number);
  return <td class={odd ? "bad-value" : ""} data-value={String(value)}>{odd ? "✕ " : ""}{figure(number, 6)}</td>;
}
