// The distribution of a tensor's values over steps: a heat map, ridges, and a table for one step.
import { useMemo, useState } from "preact/hooks";

import { Heat } from "../../../charts/heat";
import { Ridgeline } from "../../../charts/ridgeline";
import { withQuery } from "../../../api/http";
import { useLive } from "../../../api/live";
import type { components } from "../../../api/schema.gen";
import { ended, type Page } from "../../../api/types";
import { count, figure } from "../../../format";
import { useQuery } from "../../../query";
import { Loading, ProblemBox } from "../../../ui/state";
import type { TensorProps } from "./statistics";
import { kindName } from "../kinds";
import { useRank } from "../ranks";
import { stepOf } from "./steps";
import { Scrubber } from "./scrubber";
import { axisOf, placeOfStep, type Scale } from "./histogram-axis";
import { WatchThis } from "../probes/watch";

type Histogram = components["schemas"]["HistogramSeries"];
const BINS = 64;
const POINTS = 100;

export function Histograms({ job, tensor, kind }: TensorProps) {
  const [query, change] = useQuery();
  const [table, setTable] = useState(false);
  const rank = useRank(job);
  const path = withQuery(`jobs/${job.id}/stats`, { layer: tensor, kind, rank, stat: "histogram", bins: BINS, max_points: POINTS });
  const { value, problem } = useLive<Page<Histogram>>(path, ended(job) ? Infinity : 3);
  const found = value?.data.find((one) => one.phase === (query.get("phase") ?? "train")) ?? value?.data[0];
  const scale: Scale = query.get("scale") === "log" ? "log" : "linear";
  const axis = useMemo(() => axisOf(found?.edges ?? [], scale), [found, scale]);
  if (!value) return problem ? <ProblemBox problem={problem} /> : <Loading what="Loading the histograms" />;
  if (!found?.step.length) return <WatchThis job={job} tensor={tensor} kind={kind} want="histogram" every={5} rank={rank} what="No histograms" />;
  if (found.edges.length < 2) return <p class="muted">All values are NaN or Inf: there is nothing to count.</p>;
  const step = stepOf(query.get("step"));
  const place = placeOfStep(found.step, step);
  const label = sentence(found, tensor, kind);
  return (
    <div class="stack">
      <div class="row">
        <label class="field"><span>Axis of the values</span>
          <select value={scale} onChange={(event) => change({ scale: event.currentTarget.value })}>
            <option value="linear">linear</option>
            <option value="log">symmetric log</option>
          </select>
        </label>
        <button aria-pressed={table} onClick={() => setTable(!table)} style={{ alignSelf: "end" }}>Table</button>
      </div>
      <Scrubber steps={found.step} step={step} onStep={(one) => change({ step: one === null ? null : String(one) })} />
      {table ? <Counts found={found} place={place} /> : (
        <div class="grid">
          <section class="card"><h3>Heat map</h3><Heat spread={found} axis={axis} chosen={place} label={`Heat map. ${label}`} onChoose={(at) => change({ step: String(found.step[at]) })} /></section>
          <section class="card"><h3>Ridges</h3><Ridgeline spread={found} axis={axis} chosen={place} label={`Ridges. ${label}`} /></section>
        </div>
      )}
    </div>
  );
}

function sentence({ step, edges, counts }: Histogram, tensor: string, kind: string): string {
  const held = (row: readonly number[]) => {
    const places = row.flatMap((number, bar) => (number ? [bar] : []));
    return places.length ? `from ${figure(edges[places[0]!])} to ${figure(edges[places.at(-1)! + 1])}` : "no finite value";
  };
  return `${kindName(kind)} of ${tensor} at ${step.length} steps: at step ${step[0]} values are ${held(counts[0]!)}, at step ${step.at(-1)} ${held(counts.at(-1)!)}`;
}

function Counts({ found, place }: { found: Histogram; place: number }) {
  const counts = found.counts[place]!;
  return (
    <div class="values card" tabIndex={0} role="region" aria-label="Counts">
      <table data-step={found.step[place]}>
        <caption>Step {count(found.step[place])}: {count(counts.reduce((sum, one) => sum + one, 0))} finite values</caption>
        <thead><tr><th scope="col" class="number">From</th><th scope="col" class="number">To</th><th scope="col" class="number">Values</th></tr></thead>
        <tbody>
          {counts.map((number, bar) => (
            <tr key={bar}><td>{figure(found.edges[bar], 6)}</td><td>{figure(found.edges[bar + 1], 6)}</td><td data-of="count" data-value={number}>{count(number)}</td></tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
