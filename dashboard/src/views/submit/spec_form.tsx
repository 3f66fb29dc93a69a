// The spec as a form with all its fields, in sections.
import type { ComponentChildren } from "preact";

import type { Dataset } from "../../api/types";
import { getAt, isObject, type Json } from "../../spec/pointer";
import type { Field } from "../../spec/schema";
import { type Form, FormContext, Problems, Properties } from "../../ui/form";
import type { Draft } from "./draft";
import type { Known } from "./known";
import { layersOf } from "./layer_table";
import { Network } from "./network";
import type { Planned } from "./planning";

const SECTIONS: readonly [title: string, names: readonly string[]][] = [
  ["Job", ["name", "seed", "priority", "labels"]],
  ["Data", ["data"]],
  ["Network", ["network"]],
  ["Training", ["loss", "optimizer", "scheduler", "grad_clip"]],
  ["Stopping and evaluation", ["stop", "evaluate", "metrics"]],
  ["Probes", ["probes"]],
  ["Devices and precision", ["devices", "parallel", "precision", "accumulate", "deterministic", "grad_scaler", "memory_format", "tune"]],
];
const SORTED = new Set(SECTIONS.flatMap(([, names]) => names));
const OTHERS = "Other fields";
const MODELS: Record<string, string> = { infer: "InferJob", evaluate: "EvaluateJob", diagnose: "DiagnoseJob" };

interface Shown { draft: Draft; known: Known; planned: Planned; datasets: Dataset[]; choosePreset(name: string): void }

export function SpecForm({ draft, known, planned, datasets, choosePreset }: Shown) {
  const spec = draft.spec.value;
  const root = known.field(MODELS[String(getAt(spec, "/kind"))] ?? "TrainJob");
  if (root.kind !== "group" || !isObject(spec)) return <p class="wrong">A spec must be a JSON object.</p>;
  const form: Form = {
    value: spec,
    set: (pointer, value) => draft.set(pointer, value),
    problems: planned.problems,
    property: (owner, property, value) => known.property(owner, property, value),
    instead: (_, pointer) => (pointer === "/network" ? <Network {...{ known, choosePreset }} plan={planned.plan} isOld={planned.isOld} /> : undefined),
  };
  return (
    <FormContext.Provider value={form}>
      <Problems at="" />
      {SECTIONS.map(([title, names]) => <Section key={title} title={title} root={root} only={(name) => names.includes(name)} />)}
      <Section title={OTHERS} root={root} only={(name) => !SORTED.has(name) && name !== "kind"} isFolded />
      <Completions {...{ spec, known, planned, datasets }} />
    </FormContext.Provider>
  );
}

type Root = Extract<Field, { kind: "group" }>;

function Section({ title, root, only, isFolded }: { title: string; root: Root; only(name: string): boolean; isFolded?: boolean }) {
  if (!root.properties.some((one) => only(one.name))) return null;
  return (
    <details class="card" open={!isFolded}>
      <summary>{title}</summary>
      <Properties field={root} pointer="" only={only} />
    </details>
  );
}

/** The completions of inputs: types, names of layers and fields, datasets, splits. */
function Completions({ spec, known, planned, datasets }: { spec: Json; known: Known; planned: Planned; datasets: Dataset[] }) {
  const fields = getAt(spec, "/data/fields");
  const chosen = datasets.find((one) => one.id === getAt(spec, "/data/train/dataset"));
  const names = [...(isObject(fields) ? Object.keys(fields) : []), ...layersOf(planned.plan).map((one) => one.name)];
  return (
    <>
      <Completion id="layers">{known.catalog.layers.map((one) => <option key={one.name} value={one.name} />)}</Completion>
      <Completion id="metrics">{known.catalog.metrics.map((one) => <option key={one.name} value={one.name} />)}</Completion>
      <Completion id="names">{names.slice(0, 2000).map((name) => <option key={name} value={name} />)}</Completion>
      <Completion id="datasets">{datasets.map((one) => <option key={one.id} value={one.id}>{one.name}</option>)}</Completion>
      <Completion id="splits">{Object.keys(chosen?.splits ?? {}).map((split) => <option key={split} value={split} />)}</Completion>
    </>
  );
}

const Completion = ({ id, children }: { id: string; children: ComponentChildren }) => <datalist id={id}>{children}</datalist>;
