// Drift as tables: each field and layer with its PSI as a bar, next to its threshold.
import { useState } from "preact/hooks";

import { num } from "../../../api/types";
import { ago, count, figure } from "../../../format";
import { Scroll } from "../../../ui/scroll";
import { type Drift, type Series, worstFirst } from "./drift";

const FEW = 12;

/** Nothing, if the service reports no drift. */
export function DriftTables({ found }: { found: readonly Drift[] }) {
  return <>{found.map((one) => <Version key={`${one.model}:${one.version}`} drift={one} />)}</>;
}

function Version({ drift }: { drift: Drift }) {
  const [all, setAll] = useState(false);
  const name = `${drift.model}:${drift.version}`;
  const series = worstFirst(drift.series);
  const shown = all ? series : series.slice(0, FEW);
  const numDrifted = series.filter((one) => one.drifted).length;
  const most = Math.max(...series.map((one) => Math.max(num(one.psi) ?? 0, num(one.threshold) ?? 0)).filter(Number.isFinite), 1e-9) * 1.1;
  return (
    <section class="card stack" aria-label={`Drift of ${name}`}>
      <h2>Drift of {name} <DriftBadge drift={drift} numDrifted={numDrifted} /></h2>
      <p class="muted">
        {drift.state === "watching" ? <>The last {count(drift.rows)} rows{drift.at && ` (${ago(drift.at)})`} compared with the training rows: the population stability index (PSI) of each field and layer.</> : null}
        {drift.state === "collecting" && "Drift is shown when enough requests have come. "}
        {drift.detail}
      </p>
      {series.length > 0 && (
        <Scroll label={`Drift of ${name}`}>
          <table class="drift">
            <caption class="only-readers">PSI by field and layer, drifted ones first</caption>
            <thead><tr><th scope="col">Name</th><th scope="col">Measure</th><th scope="col">State</th><th scope="col" class="number">PSI</th><th scope="col" class="wide"><span class="only-readers">PSI against the threshold</span></th><th scope="col" class="number">Threshold</th></tr></thead>
            <tbody>{shown.map((one) => <Line key={`${one.of} ${one.name} ${one.measure}`} series={one} most={most} />)}</tbody>
          </table>
        </Scroll>
      )}
      {series.length > FEW && <div><button class="small" aria-expanded={all} onClick={() => setAll(!all)}>{all ? "Show fewer" : `Show all ${count(series.length)}`}</button></div>}
    </section>
  );
}

function DriftBadge({ drift, numDrifted }: { drift: Drift; numDrifted: number }) {
  if (drift.state === "unavailable") return <span class="badge warn">! unavailable</span>;
  if (drift.state === "collecting") return <span class="badge busy">… collecting</span>;
  return numDrifted ? <span class="badge bad">✕ {count(numDrifted)} drifted</span> : <span class="badge good">✓ no drift</span>;
}

function Line({ series, most }: { series: Series; most: number }) {
  const [psi, threshold] = [num(series.psi), num(series.threshold)];
  const part = (value: number | null) => `${(100 * Math.min(value ?? 0, most)) / most}%`;
  return (
    <tr>
      <th scope="row"><span class="mono">{series.name}</span> <span class="muted">{series.of}</span></th>
      <td>{series.measure}</td>
      <td>{series.drifted ? <span class="badge bad">✕ drifted</span> : <span class="badge good">✓ normal</span>}</td>
      <td class="number">{figure(psi, 3)}</td>
      <td class="wide"><div class={series.drifted ? "psi over" : "psi"} aria-hidden="true"><i style={{ width: part(psi) }} /><b style={{ left: part(threshold) }} /></div></td>
      <td class="number">{figure(threshold, 3)}</td>
    </tr>
  );
}
