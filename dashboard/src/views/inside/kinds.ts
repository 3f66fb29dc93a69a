// Which tensors a layer has, by kind; which layer a name belongs to. Pure.
import type { Layer } from "../../api/types";
import type { components } from "../../api/schema.gen";
import { KINDS } from "./probe";

export type Kind = (typeof KINDS)[number];
export type Capture = components["schemas"]["Capture"];

export const WORDS: Record<Kind, string> = {
  output: "what comes out",
  output_grad: "gradient of the loss by what comes out",
  input: "what goes in",
  param: "parameters",
  param_grad: "gradients of the parameters",
  update: "what a step changed of the parameters",
  optim_state: "what the optimizer keeps",
};

/** The names of a layer's tensors of each kind that it has. */
export function tensorNames(layer: Layer): [kind: Kind, names: string[]][] {
  const leaves = [...(Object.keys(layer.output_shapes).length ? Object.keys(layer.output_shapes) : [layer.name]), ...layer.inner_outputs];
  const parameters = Object.keys(layer.parameter_shapes);
  const names: Record<Kind, string[]> = {
    output: leaves,
    output_grad: leaves,
    input: [...layer.input_names, ...layer.inner_inputs],
    param: parameters,
    param_grad: parameters,
    update: parameters,
    optim_state: parameters.flatMap((name) => layer.state_names.map((state) => `${name}.${state}`)),
  };
  return KINDS.map((kind): [Kind, string[]] => [kind, names[kind]]).filter(([, all]) => all.length > 0);
}

const LOSS: Layer = {
  name: "loss", type: "loss", inputs: [], output_shape: [], output_shapes: { loss: [], "loss.samples": [], "loss.rows": [] }, parameters: 0, trainable: false,
  dtype: "", parameter_shapes: {}, flops: 0, shared_with: null, input_names: [], inner_inputs: [], inner_outputs: [], state_names: [], stats: {}, tensors: {},
};

/** The layer of a name of the address, which may also name one of its tensors; null where there is none. */
export function find(layers: readonly Layer[], name: string): { layer: Layer; place: number; tensor: string | null } | null {
  const place = layers.findIndex((one) => one.name === name);
  if (place >= 0) return { layer: layers[place]!, place, tensor: null };
  const owner = layers.findIndex((one) => tensorNames(one).some(([, names]) => names.includes(name)));
  if (owner >= 0) return { layer: layers[owner]!, place: owner, tensor: name };
  return LOSS.output_shapes[name] ? { layer: LOSS, place: -1, tensor: name } : null;
}

/** The kind and tensor that are shown: those asked for where they are, else the first that somebody watches. */
export function chosen(layer: Layer, kind: string | null, tensor: string | null): { kind: Kind; tensor: string } {
  const all = tensorNames(layer);
  const has = (one: Kind) => all.find(([name]) => name === one)?.[1].some((name) => (layer.stats[one] && name === (Object.keys(layer.output_shapes)[0] ?? layer.name)) || layer.tensors[name]?.[one]);
  const named = all.filter(([, names]) => tensor === null || names.includes(tensor));
  const [found, names] = all.find(([one]) => one === kind) ?? named.find(([one]) => has(one)) ?? named[0] ?? all[0]!;
  return { kind: found, tensor: tensor !== null && names.includes(tensor) ? tensor : names[0]! };
}
