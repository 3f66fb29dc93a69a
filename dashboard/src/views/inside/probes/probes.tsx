// The probes of a job: what each matched, its interval and its cost; attach, change and detach them.
import { useEffect, useRef, useState } from "preact/hooks";

import { ask } from "../../../api/http";
import { refresh, useLive } from "../../../api/live";
import { ended, type Job, type Layer, num, type Page } from "../../../api/types";
import { bytes, count, percent } from "../../../format";
import { useQuery } from "../../../query";
import { Empty, Loading, ProblemBox } from "../../../ui/state";
import { notify } from "../../../ui/toast";
import { kindName } from "../kinds";
import { Matched } from "./matched";
import { cost, draftFrom, draftOf, FORMS, type Probe, whenText } from "./probe";
import { ProbeForm } from "./probe-form";

export function Probes({ job, layers }: { job: Job; layers: readonly Layer[] }) {
  const [query, change] = useQuery();
  const { value, problem } = useLive<Page<Probe>>(`jobs/${job.id}/probes?removed=true`, ended(job) ? Infinity : 1);
  const watch = query.get("watch");
  const changed = value?.data.find((probe) => probe.id === query.get("change"));
  const attach = useRef<HTMLButtonElement>(null);
  const isOpen = watch !== null || !!changed;
  const wasOpen = useRef(isOpen);
  useEffect(() => {
    if (wasOpen.current && !isOpen && document.activeElement === document.body) attach.current?.focus(); // the form had the focus
    wasOpen.current = isOpen;
  }, [isOpen]);
  const close = () => change({ watch: null, kinds: null, ranks: null, change: null });
  return (
    <div class="stack">
      <div class="spread">
        <Overhead job={job} />
        {!ended(job) && watch === null && !changed && <button class="primary" ref={attach} onClick={() => change({ watch: "*" })}>Attach a probe</button>}
      </div>
      {watch !== null && !ended(job) && <ProbeForm key={watch} job={job} initial={draftOf(watch, kindsOf(watch, query.get("kinds"), layers), query.get("ranks") ?? "")} onDone={close} />}
      {changed && !ended(job) && <ProbeForm key={changed.id} job={job} initial={draftFrom(changed)} probe={changed} onDone={close} />}
      {!value ? (problem ? <ProblemBox problem={problem} /> : <Loading what="Loading the probes" />) : <List job={job} probes={value.data} onChange={(id) => change({ change: id, watch: null })} />}
    </div>
  );
}

function kindsOf(watch: string, asked: string | null, layers: readonly Layer[]): string[] {
  if (asked) return asked.split(",");
  const layer = layers.find((one) => one.name === watch);
  return layer && !Object.keys(layer.parameter_shapes).length ? ["output", "output_grad"] : ["output", "param", "param_grad", "update"];
}

function Overhead({ job }: { job: Job }) {
  const fraction = num(job.probe_overhead?.fraction);
  const budget = num(job.probe_overhead?.budget);
  if (fraction === null) return <p class="muted">The overhead of watching has not been measured yet.</p>;
  const unbudgeted = num(job.probe_overhead?.unbudgeted ?? null) ?? 0;
  const budgeted = fraction - unbudgeted;
  return (
    <p>
      Watching makes each step <b data-of="overhead">{percent(fraction, 2)}</b> longer.{" "}
      {budget === null ? "No probe has a budget." : <>Probes with a budget use {percent(budgeted, 2)} of <b>{percent(budget, 2)}</b>{budgeted > budget ? "; their intervals are widened to meet it." : "."}</>}
      {budget !== null && unbudgeted > 0 && ` Probes without a budget use ${percent(unbudgeted, 2)}.`}
    </p>
  );
}

function List({ job, probes, onChange }: { job: Job; probes: readonly Probe[]; onChange: (id: string) => void }) {
  if (!probes.length) return <Empty><p>This job has no probes.</p></Empty>;
  const gone = (probe: Probe) => probe.state === "removed" || probe.state === "rejected";
  const shown = [...probes.filter((probe) => !gone(probe)), ...probes.filter(gone)];
  return (
    <div class="table">
      <table aria-label="Probes">
        <thead><tr><th scope="col">State</th><th scope="col">Layers</th><th scope="col">Tensors</th><th scope="col">Records</th><th scope="col">Interval</th><th scope="col" class="number">Bytes per sample</th><th scope="col" class="number">Cost per sample</th><th scope="col">Since step</th><th scope="col"><span class="only-readers">Actions</span></th></tr></thead>
        <tbody>{shown.map((probe) => <Line key={probe.id} job={job} probe={probe} gone={gone(probe)} onChange={onChange} />)}</tbody>
      </table>
    </div>
  );
}

const FORM_NAMES = Object.fromEntries(FORMS);
const BADGES: Record<Probe["state"], [kind: string, sign: string]> = { pending: ["warn", "…"], active: ["good", "✓"], removed: ["", "■"], rejected: ["bad", "✕"], failed: ["bad", "✕"] };

function Line({ job, probe, gone, onChange }: { job: Job; probe: Probe; gone: boolean; onChange: (id: string) => void }) {
  const [busy, setBusy] = useState(false);
  const [kind, sign] = BADGES[probe.state];
  const remove = async () => {
    setBusy(true);
    await notify(ask(`jobs/${job.id}/probes/${probe.id}`, { method: "DELETE" }), "The probe is detached at the next step.");
    setBusy(false);
    refresh(`jobs/${job.id}/probes`);
  };
  return (
    <tr data-probe={probe.id} class={gone ? "muted" : ""}>
      <td><span class={`badge ${kind}`}><span aria-hidden="true">{sign}</span> {probe.state}</span>{probe.problem && <div class="bad-value">{String(probe.problem["detail"] ?? probe.problem["code"] ?? "")}</div>}</td>
      <td><code>{probe.layers.join(" ")}</code><Matched names={probe.matched} /></td>
      <td>{probe.kinds.map(kindName).join(", ")}{probe.phase === "evaluate" && ", evaluation"}{probe.point === "clipped" && ", after clipping"}{probe.ranks !== "merged" && `, also of ${probe.ranks === "all" ? "each process" : `rank ${probe.ranks.join(", ")}`}`}</td>
      <td>{probe.want.map((form) => FORM_NAMES[form]).join(", ")}{probe.slice && <> of <code>[{probe.slice}]</code></>}</td>
      <td data-of="when">{whenText(probe)}</td>
      <td class="number">{bytes(probe.bytes_per_step)}</td>
      <td class="number" data-of="cost">{probe.cost_s !== null ? `${cost(probe.cost_s)} measured` : probe.estimated_cost_s !== null ? `${cost(probe.estimated_cost_s)} estimated` : "–"}<br /><span class="muted">{probe.max_overhead === null ? "no budget" : `budget ${percent(probe.max_overhead, 1)}`}</span></td>
      <td class="number" data-of="applied">{probe.applied_step === null ? (ended(job) ? "never" : "next step") : count(probe.applied_step)}</td>
      <td class="nowrap">{!gone && !ended(job) && <><button onClick={() => onChange(probe.id)}>Change</button> <button onClick={remove} disabled={busy}>Detach</button></>}</td>
    </tr>
  );
}
