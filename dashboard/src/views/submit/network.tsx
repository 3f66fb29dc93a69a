// The network of the spec: a preset with its sizes, or layers.
import type { Plan } from "../../api/types";
import { getAt, isObject, type Json, type JsonObject, setAt } from "../../spec/pointer";
import type { Field } from "../../spec/schema";
import { presetNetwork } from "../../spec/suggest";
import { Edit, idOf, Problems, useForm } from "../../ui/form";
import type { Known } from "./known";
import { layersOf } from "./layer_table";
import { LayerList } from "./layers";

interface Shown { known: Known; plan: Plan | null; isOld: boolean; choosePreset(name: string): void }

export function Network({ known, plan, isOld, choosePreset }: Shown) {
  const form = useForm();
  const network = getAt(form.value, "/network");
  const isPreset = isObject(network) && network["type"] === "preset";
  const preset = isPreset ? String(network["preset"]) : "";
  const summary = known.catalog.presets.find((one) => one.name === preset)?.summary;
  return (
    <div id={idOf("/network")} class="stack wide">
      <Problems at="/network" />
      <div class="row">
        <label class="field">
          <span>Preset</span>
          <select value={preset} onChange={(event) => choosePreset(event.currentTarget.value)}>
            <option value="">none (custom layers)</option>
            {known.presets.map((one) => <option key={one.name} value={one.name}>{one.name}</option>)}
          </select>
        </label>
        {isPreset && <button type="button" style={{ alignSelf: "end" }} disabled={!plan || isOld} onClick={() => form.set("/network", graphOf(plan))}>Edit layers</button>}
      </div>
      {summary && <p class="muted small">{summary}</p>}
      {isPreset ? <PresetArgs known={known} /> : <Graph known={known} network={network} plan={plan} />}
    </div>
  );
}

function PresetArgs({ known }: { known: Known }) {
  const form = useForm();
  const owner = known.field("Preset");
  if (owner.kind !== "group") return null;
  const network = getAt(form.value, "/network");
  const args = form.property(owner, owner.properties.find((one) => one.name === "args")!, isObject(network) ? network : {});
  return <Edit {...args} label="Sizes" pointer="/network/args" />;
}

function Graph({ known, network, plan }: { known: Known; network: Json | undefined; plan: Plan | null }) {
  const layers = isObject(network) && Array.isArray(network["layers"]) ? network["layers"] : [];
  const owner = known.field("Graph");
  const outputs = owner.kind === "group" ? owner.properties.find((one) => one.name === "outputs") : undefined;
  return (
    <>
      <LayerList layers={layers} planned={layersOf(plan)} field={known.field("LayerSpec") as Extract<Field, { kind: "group" }>} />
      {outputs && <div class="fields"><Edit field={outputs.field} pointer="/network/outputs" label="outputs" list="names" /></div>}
    </>
  );
}

/** The layers of a preset, from the plan, without unset fields. */
function graphOf(plan: Plan | null): Json {
  const graph = (plan?.spec["network"] ?? {}) as JsonObject;
  const layers = (graph["layers"] ?? []) as JsonObject[];
  return { ...graph, layers: layers.map((layer) => Object.fromEntries(Object.entries(layer).filter(([, value]) => value !== null))) };
}

/** The spec with another network; inputs of the old output become inputs of the new one. */
export function withPreset(spec: Json, known: Known, name: string, old: string | null): Json {
  const preset = known.presets.find((one) => one.name === name);
  if (!preset) return setAt(spec, "/network", { type: "graph", layers: [{ name: "flat", type: "Flatten" }, { name: "fc", type: "Linear", args: { out_features: 10 } }] });
  const output = preset.outputs?.[0];
  const changed = setAt(spec, "/network", presetNetwork(preset, classesIn(spec)));
  return old && output ? renamed(changed, old, output) : changed;
}

function renamed(spec: Json, old: string, now: string): Json {
  const of = (value: Json | undefined): Json | undefined =>
    Array.isArray(value) ? value.map((one) => of(one)!) : isObject(value) && Array.isArray(value["inputs"]) ? { ...value, inputs: value["inputs"].map((one) => (one === old ? now : one)) } : value;
  return ["/loss", "/metrics"].reduce((whole, at) => setAt(whole, at, of(getAt(whole, at))), spec);
}

/** The number of classes of the loss's target. */
function classesIn(spec: Json): number | null {
  const target = getAt(spec, "/loss/inputs/1");
  const field = typeof target === "string" ? getAt(spec, `/data/fields/${target}`) : undefined;
  if (!isObject(field)) return null;
  return typeof field["dim"] === "number" ? field["dim"] : Array.isArray(field["classes"]) ? field["classes"].length : null;
}
