// The view of one layer: its tensors by kind, each over steps, as histograms, and as captured values.
import { useRoute } from "preact-iso";
import { useEffect } from "preact/hooks";

import { useLive } from "../../api/live";
import { ended, type Job, type Layer, type Page } from "../../api/types";
import { count } from "../../format";
import { useQuery } from "../../query";
import { Empty, Loading, ProblemBox, StateBadge } from "../../ui/state";
import { Figures } from "./statistics/statistics";
import { Histograms } from "./statistics/histograms";
import { find, KIND_NAMES, KIND_TITLES, selected, tensorNames } from "./kinds";
import { Light, LightTip, Rules } from "./layers/health-sign";
import { rowOf, shapeText } from "./layers/rows";
import { RankChoice, useRank } from "./ranks";
import { TensorView } from "./tensors/tensor";

const VIEWS = { steps: "Over steps", histogram: "Histograms", tensor: "Values and maps" } as const;

export default function LayerPage() {
  const { id = "", layer: name = "" } = useRoute().params;
  const job = useLive<Job>(`jobs/${id}`, 2);
  const layers = useLive<Page<Layer>>(`jobs/${id}/layers`, job.value && ended(job.value) ? Infinity : 3);
  useEffect(() => {
    document.title = `${name} · ${job.value?.name ?? id} · Glasshouse`;
    return () => void (document.title = "Glasshouse");
  }, [name, job.value?.name, id]);
  const problem = job.problem ?? layers.problem;
  if (!job.value || !layers.value) return problem ? <ProblemBox problem={problem} /> : <Loading what="Loading the layer" />;
  const found = find(layers.value.data, name);
  if (!found) return <Empty><p>The network has no layer <code>{name}</code>.</p><a class="button" href={`/jobs/${id}/inside`}>Back to layers</a></Empty>;
  return <Whole job={job.value} layers={layers.value.data} layer={found.layer} place={found.place} named={found.tensor} />;
}

function Whole({ job, layers, layer, place, named }: { job: Job; layers: readonly Layer[]; layer: Layer; place: number; named: string | null }) {
  const [query] = useQuery();
  const { kind, tensor } = selected(layer, query.get("kind"), query.get("tensor") ?? named);
  const asked = query.get("view") ?? "steps";
  const view = asked in VIEWS ? asked : "steps";
  const rank = useRank(job);
  const kept: Record<string, string> = rank === null ? {} : { rank: String(rank) };
  const to = (changes: Record<string, string>) => `?${new URLSearchParams({ kind, tensor, view, ...kept, ...changes })}`;
  const names = tensorNames(layer).find(([one]) => one === kind)![1];
  const Shown = { steps: Figures, histogram: Histograms, tensor: TensorView }[view as keyof typeof VIEWS];
  return (
    <div class="stack inside">
      <Head job={job} layers={layers} layer={layer} place={place} />
      <nav class="tabs" aria-label="Tensor kinds">
        {tensorNames(layer).map(([one]) => <a key={one} href={`?${new URLSearchParams({ kind: one, view, ...kept })}`} title={KIND_TITLES[one]} aria-current={one === kind ? "page" : undefined}>{KIND_NAMES[one]}</a>)}
      </nav>
      <div class="spread">
        <nav class="row" aria-label="Views">
          {Object.entries(VIEWS).map(([key, words]) => <a key={key} class="button" href={to({ view: key })} aria-current={key === view ? "page" : undefined}>{words}</a>)}
        </nav>
        <span class="row">
          <RankChoice job={job} />
          {names.length > 1 ? <TensorChoice names={names} tensor={tensor} /> : <code>{tensor}</code>}
        </span>
      </div>
      <Shown key={`${tensor} ${kind} ${rank}`} job={job} layer={layer} tensor={tensor} kind={kind} />
      <LightTip />
    </div>
  );
}

function TensorChoice({ names, tensor }: { names: readonly string[]; tensor: string }) {
  const [, change] = useQuery();
  return (
    <label class="row"><span class="muted">Tensor</span>
      <select value={tensor} onChange={(event) => change({ tensor: event.currentTarget.value, step: null, at: null })}>
        {names.map((one) => <option key={one} value={one}>{one}</option>)}
      </select>
    </label>
  );
}

function Head({ job, layers, layer, place }: { job: Job; layers: readonly Layer[]; layer: Layer; place: number }) {
  const row = rowOf(layer, place);
  const [previous, next] = [layers[place - 1], place >= 0 ? layers[place + 1] : undefined];
  const readers = layers.filter((one) => one.inputs.some((input) => input === layer.name || input.startsWith(`${layer.name}.`)));
  const shapes = Object.entries(layer.parameter_shapes);
  return (
    <header class="card">
      <div class="spread">
        <div class="row">
          <a href={`/jobs/${job.id}/inside`}>{job.name ?? job.id}</a> <span aria-hidden="true">›</span> <h1>{layer.name}</h1>
          <Light verdict={row.verdict} name={layer.name} /> <StateBadge state={job.state} />
        </div>
        <nav class="row" aria-label="Adjacent layers">
          {previous && <a class="button" href={linkTo(job, previous.name)} aria-label={`Previous layer: ${previous.name}`}>◀ {previous.name}</a>}
          {next && <a class="button" href={linkTo(job, next.name)} aria-label={`Next layer: ${next.name}`}>{next.name} ▶</a>}
        </nav>
      </div>
      <dl class="facts">
        <dt>Type</dt><dd>{layer.type}{layer.shared_with && <>, shared with <a href={linkTo(job, layer.shared_with)}>{layer.shared_with}</a></>}</dd>
        {place >= 0 && <><dt>Output shape</dt><dd>{shapeText(layer.output_shape)} {layer.dtype}</dd></>}
        {place >= 0 && <><dt>Parameters</dt><dd>{count(layer.parameters)}{layer.parameters > 0 && !layer.trainable && ", not trainable"}{shapes.length > 0 && `: ${shapes.map(([name, shape]) => `${name} ${shape.join(" × ") || "scalar"}`).join(", ")}`}</dd></>}
        {layer.inputs.length > 0 && <><dt>Inputs</dt><dd><Links job={job} layers={layers} names={layer.inputs} /></dd></>}
        {readers.length > 0 && <><dt>Used by</dt><dd><Links job={job} layers={layers} names={readers.map((one) => one.name)} /></dd></>}
      </dl>
      {row.verdict.level !== "unknown" && <details><summary>Health rules, newest statistics</summary><Rules verdict={row.verdict} /></details>}
    </header>
  );
}

function Links({ job, layers, names }: { job: Job; layers: readonly Layer[]; names: readonly string[] }) {
  const known = new Set(layers.map((layer) => layer.name));
  return <>{names.map((name, place) => <span key={name}>{place > 0 && ", "}{known.has(name.split(".")[0]!) ? <a href={linkTo(job, name.split(".")[0]!)}>{name}</a> : `${name} (data)`}</span>)}</>;
}

function linkTo(job: Job, layer: string): string {
  return `/jobs/${job.id}/layers/${encodeURIComponent(layer)}`;
}
