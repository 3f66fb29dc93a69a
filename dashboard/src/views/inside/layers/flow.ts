// Gradient flow: one point per layer, in forward order, and which are vanishing, exploding or NaN or Inf. Pure.
import { type Figures, type Layer, num } from "../../../api/types";
import { LIMITS } from "./health";

export type Measure = "l2" | "rms" | "absmax";
export type Source = "param_grad" | "output_grad";
export type Mark = "vanishing" | "exploding" | "nonfinite" | null;

export interface FlowPoint {
  readonly name: string;
  /** In the network's order. */
  readonly place: number;
  /** Null if the layer was not watched; NaN if the gradient has NaN or Inf. */
  readonly value: number | null;
  readonly mark: Mark;
}

/** `size`: the number of values; NaN if it depends on the batch. */
interface Sum { squares: number; absmax: number; size: number; nonfinite: boolean; seen: boolean }

/** The gradient of each layer that can have one: of all its parameters together, or of its output (first leaf). */
export function flowOf(layers: readonly Layer[], measure: Measure, source: Source): FlowPoint[] {
  return layers.flatMap((layer, place) => {
    const tensors = gradientsOf(layer, source);
    if (!tensors.length) return [];
    const sum: Sum = { squares: 0, absmax: 0, size: 0, nonfinite: false, seen: false };
    for (const [figures, size] of tensors) if (figures) add(sum, figures, size);
    return [{ name: layer.name, place, value: valueOf(sum, measure), mark: markOf(sum) }];
  });
}

function gradientsOf(layer: Layer, source: Source): [figures: Figures | undefined, size: number][] {
  if (source === "output_grad") return [[layer.stats["output_grad"], NaN]];
  return Object.entries(layer.parameter_shapes).map(([name, shape]) => [layer.tensors[name]?.["param_grad"], shape.reduce((all, length) => all * length, 1)]);
}

function add(sum: Sum, figures: Figures, size: number): void {
  const l2 = num(figures.l2) ?? 0;
  sum.seen = true;
  sum.nonfinite ||= (num(figures.nan) ?? 0) + (num(figures.inf) ?? 0) > 0 || !Number.isFinite(l2);
  sum.squares += l2 ** 2;
  sum.absmax = Math.max(sum.absmax, num(figures.absmax) ?? 0);
  sum.size += size;
}

function valueOf(sum: Sum, measure: Measure): number | null {
  if (!sum.seen) return null;
  if (sum.nonfinite) return NaN;
  if (measure === "absmax") return sum.absmax;
  return Math.sqrt(measure === "rms" ? sum.squares / sum.size : sum.squares);
}

function markOf(sum: Sum): Mark {
  if (!sum.seen) return null;
  if (sum.nonfinite) return "nonfinite";
  const norm = Math.sqrt(sum.squares);
  if (norm > LIMITS.large) return "exploding";
  const usual = Number.isNaN(sum.size) ? sum.absmax : norm / Math.sqrt(sum.size);
  return usual < LIMITS.vanishing ? "vanishing" : null;
}

export const DEPTH = { exploding: 70, vanishing: 1e-3, first: 1e-4 } as const;

/** The ratio of the first layer's norm to the last layer's, and its mark. Takes norms. */
export function gradientTrend(norms: readonly FlowPoint[]): { ratio: number; mark: Mark } | null {
  const there = norms.filter((point) => point.value !== null && Number.isFinite(point.value));
  const [first, last] = [there[0]?.value, there.at(-1)?.value];
  if (there.length < 2 || !last || first === undefined || first === null) return null;
  const ratio = first / last;
  if (ratio > DEPTH.exploding) return { ratio, mark: "exploding" };
  return { ratio, mark: ratio < DEPTH.vanishing && first < DEPTH.first ? "vanishing" : null };
}
