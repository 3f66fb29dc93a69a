// The tensors of a layer by kind, and the layer of a name. Pure.
import type { Layer } from "../../api/types";
import type { components } from "../../api/schema.gen";

/** A kind of the API: the compiler rejects the tables below if they lack one. */
export type Kind = components["schemas"]["Probe"]["kinds"][number];
export type Capture = components["schemas"]["Capture"];

/** What the dashboard calls each kind of the API. */
export const KIND_NAMES: Record<Kind, string> = {
  output: "Activation",
  output_grad: "Activation gradient",
  input: "Input",
  param: "Weights",
  param_grad: "Weight gradient",
  update: "Update",
  optim_state: "Optimizer state",
};

/** In the order in which they are shown. */
export const KINDS = Object.keys(KIND_NAMES) as Kind[];

export function kindName(kind: string): string {
  return KIND_NAMES[kind as Kind] ?? kind;
}

export const KIND_TITLES: Record<Kind, string> = {
  output: "Output of the layer (output)",
  output_grad: "Gradient of the loss with respect to the output (output_grad)",
  input: "Input of the layer (input)",
  param: "Parameters of the layer (param)",
  param_grad: "Gradient of the loss with respect to the parameters (param_grad)",
  update: "Change of the parameters in a step (update)",
  optim_state: "State that the optimizer keeps for the parameters (optim_state)",
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

/** The layer with this name, or the layer that has a tensor with this name; null if there is none. */
export function find(layers: readonly Layer[], name: string): { layer: Layer; place: number; tensor: string | null } | null {
  const place = layers.findIndex((one) => one.name === name);
  if (place >= 0) return { layer: layers[place]!, place, tensor: null };
  const owner = layers.findIndex((one) => tensorNames(one).some(([, names]) => names.includes(name)));
  if (owner >= 0) return { layer: layers[owner]!, place: owner, tensor: name };
  return LOSS.output_shapes[name] ? { layer: LOSS, place: -1, tensor: name } : null;
}

/** The kind and tensor to show: the requested ones if they exist, else the first that is watched. */
export function selected(layer: Layer, kind: string | null, tensor: string | null): { kind: Kind; tensor: string } {
  const all = tensorNames(layer);
  const has = (one: Kind) => all.find(([name]) => name === one)?.[1].some((name) => (layer.stats[one] && name === (Object.keys(layer.output_shapes)[0] ?? layer.name)) || layer.tensors[name]?.[one]);
  const named = all.filter(([, names]) => tensor === null || names.includes(tensor));
  const [found, names] = all.find(([one]) => one === kind) ?? named.find(([one]) => has(one)) ?? named[0] ?? all[0]!;
  return { kind: found, tensor: tensor !== null && names.includes(tensor) ? tensor : names[0]! };
}
