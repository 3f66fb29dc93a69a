// The statistics of a layer's tensors, combined. Pure.
import { type Figures, type Layer, num } from "../../../api/types";

/** Every tensor of a layer that has statistics, with its name and kind. */
export function tensorsOf(layer: Layer): { name: string; kind: string; figures: Figures }[] {
  const own = Object.keys(layer.output_shapes)[0] ?? layer.name;
  const named: [string, Record<string, Figures>][] = [[own, layer.stats], ...Object.entries(layer.tensors)];
  return named.flatMap(([name, kinds]) => Object.entries(kinds).map(([kind, figures]) => ({ name, kind, figures })));
}

export function sizeOf(shape: readonly number[]): number {
  return shape.reduce((size, length) => size * length, 1);
}

/** The statistics of all watched parameters of a kind, as if they were one vector; null if none is watched. */
export function together(layer: Layer, kind: string): { l2: number; absmax: number; size: number; step: number; nonfinite: number } | null {
  let squares = 0;
  let absmax = 0;
  let size = 0;
  let step = -1;
  let nonfinite = 0;
  for (const [name, shape] of Object.entries(layer.parameter_shapes)) {
    const figures = layer.tensors[name]?.[kind];
    if (!figures) continue;
    squares += (num(figures.l2) ?? 0) ** 2;
    absmax = Math.max(absmax, num(figures.absmax) ?? 0);
    size += sizeOf(shape);
    step = Math.max(step, figures.step);
    nonfinite += (num(figures.nan) ?? 0) + (num(figures.inf) ?? 0);
  }
  return step < 0 ? null : { l2: Math.sqrt(squares), absmax, size, step, nonfinite };
}

/** The norm of the update divided by the norm of the weights, over the parameters that have both at the same step. */
export function updateRatio(layer: Layer): number | null {
  let changed = 0;
  let there = 0;
  for (const name of Object.keys(layer.parameter_shapes)) {
    const { update, param } = layer.tensors[name] ?? {};
    if (!update || !param || update.step !== param.step) continue;
    changed += (num(update.l2) ?? NaN) ** 2;
    there += (num(param.l2) ?? NaN) ** 2;
  }
  return there > 0 ? Math.sqrt(changed / there) : null;
}
