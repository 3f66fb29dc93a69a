// The spec as a form, in the order in which one thinks of it. Everything that a spec may say is somewhere here.
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
  ["Learning", ["loss", "optimizer", "scheduler", "grad_clip"]],
  ["How long, how judged", ["stop", "evaluate", "metrics"]],
  ["Looking inside", ["probes"]],
  ["Where and how precisely", ["devices", "precision", "accumulate", "deterministic", "grad_scaler", "memory_format", "tune"]],
];
const SORTED = new Set(SECTIONS.flatMap(([, names]) => names));
const FOLDED = "Everything else";

interface Shown { draft: Draft; known: Known; planned: Planned; datasets: Dataset[]; choosePreset(name: string): void }

export function SpecForm({ draft, known, planned, datasets, choosePreset }: Shown) {
  const spec = draft.spec.value;
  const root = known.field(getAt(spec, "/kind") === "infer" ? "InferJob" : "TrainJob");
  if (root.kind !== "group" || !isObject(spec)) return <p class="wrong">A spec is a JSON object.</p>;
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
      <Section title={FOLDED} root={root} only={(name) => !SORTED.has(name) && name !== "kind"} isFolded />
      <Offers {...{ spec, known, planned, datasets }} />
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

/** What the inputs complete: types, names of layers and fields, datasets, splits. */
function Offers({ spec, known, planned, datasets }: { spec: Json; known: Known; planned: Planned; datasets: Dataset[] }) {
  const fields = getAt(spec, "/data/fields");
  const chosen = datasets.find((one) => one.id === getAt(spec, "/data/train/dataset"));
  const names = [...(isObject(fields) ? Object.keys(fields) : []), ...layersOf(planned.plan).map((one) => one.name)];
  return (
    <>
      <Offer id="layers">{known.catalogue.layers.map((one) => <option key={one.name} value={one.name} />)}</Offer>
      <Offer id="metrics">{known.catalogue.metrics.map((one) => <option key={one.name} value={one.name} />)}</Offer>
      <Offer id="names">{names.slice(0, 2000).map((name) => <option key={name} value={name} />)}</Offer>
      <Offer id="datasets">{datasets.map((one) => <option key={one.id} value={one.id}>{one.name}</option>)}</Offer>
      <Offer id="splits">{Object.keys(chosen?.splits ?? {}).map((split) => <option key={split} value={split} />)}</Offer>
    </>
  );
}

const Offer = ({ id, children }: { id: string; children: ComponentChildren }) => <datalist id={id}>{children}</datalist>;
