// Layers as the API returns them, for the tests.
import type { Figures, Layer } from "../src/api/types";

export function figures(of: Partial<Figures> = {}): Figures {
  return { step: 10, phase: "train", mean: 0, std: 1, min: -1, max: 1, l2: 1, absmax: 1, zeros: 0, nan: 0, inf: 0, ...of };
}

export function layer(of: Partial<Layer> = {}): Layer {
  return {
    name: "fc", type: "Linear", inputs: [], output_shape: [4], output_shapes: { fc: [4] }, parameters: 20, trainable: true, dtype: "float32",
    parameter_shapes: { "fc.weight": [4, 4], "fc.bias": [4] }, flops: 1, shared_with: null, input_names: [], inner_inputs: [], inner_outputs: [],
    state_names: [], stats: {}, tensors: {}, ...of,
  };
}
