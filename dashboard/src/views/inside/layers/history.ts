// The statistics of a step other than the newest. Pure.
import type { Figures, Layer } from "../../../api/types";
import type { components } from "../../../api/schema.gen";

export type Series = components["schemas"]["StatsSeries"];

/** The layers with the statistics of one step instead of the newest; those of training if an evaluation has some, too. */
export function layersAt(layers: readonly Layer[], series: readonly Series[], step: number): Layer[] {
  const found = new Map<string, Record<string, Figures>>();
  for (const one of series) {
    const at = one.step.indexOf(step);
    const kinds = found.get(one.layer) ?? {};
    if (at < 0 || kinds[one.kind]?.phase === "train" || one.values["mean"]?.[at] === undefined) continue;
    const values = Object.fromEntries(Object.entries(one.values).map(([name, column]) => [name, column[at] ?? "NaN"]));
    kinds[one.kind] = { step, phase: one.phase, ...values } as Figures;
    found.set(one.layer, kinds);
  }
  return layers.map((layer) => {
    const own = Object.keys(layer.output_shapes)[0] ?? layer.name;
    const others = [...new Set([...Object.keys(layer.parameter_shapes), ...Object.keys(layer.tensors)])].filter((name) => name !== own && found.has(name));
    return { ...layer, stats: found.get(own) ?? {}, tensors: Object.fromEntries(others.map((name) => [name, found.get(name)!])) };
  });
}

/** All steps that any of the series has, in order. */
export function stepsOf(series: readonly { step: readonly number[] }[]): number[] {
  const found = new Set<number>();
  for (const one of series) for (const step of one.step) found.add(step);
  return [...found].sort((a, b) => a - b);
}

export const MEASURES = {
  "output/std": "Activation, std",
  "output/mean": "Activation, mean",
  "output/zeros": "Activation, fraction of zeros",
  "output_grad/l2": "Activation gradient, norm",
  "param_grad/l2": "Weight gradient, norm (first parameter)",
  "param/l2": "Weights, norm (first parameter)",
  "update/l2": "Update, norm (first parameter)",
} as const;
export type MeasureName = keyof typeof MEASURES;

/** The default trend: gradients if they are watched, else outputs, else what is watched. */
export function defaultMeasure(layers: readonly Layer[]): MeasureName {
  const watched = new Set(layers.flatMap((layer) => [...Object.keys(layer.stats), ...Object.values(layer.tensors).flatMap((kinds) => Object.keys(kinds))]));
  const order: MeasureName[] = ["param_grad/l2", "output/std", "output_grad/l2", "param/l2", "update/l2"];
  return order.find((name) => watched.has(name.split("/")[0]!)) ?? "output/std";
}

/** The series' name of a layer for a measure: its first leaf, or its first parameter. */
export function seriesName(layer: Layer, measure: MeasureName): string {
  const own = Object.keys(layer.output_shapes)[0] ?? layer.name;
  return measure.startsWith("output") ? own : Object.keys(layer.parameter_shapes)[0] ?? own;
}
