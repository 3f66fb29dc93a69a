// The gradient over the depth of the network: one point a layer, in forward order, and what of them is amiss. Pure.
import type { components } from "../../api/schema.gen";
import { num } from "../../api/types";
import { LIMITS } from "./health";
import type { Layer } from "./rows";

export type Series = components["schemas"]["StatsSeries"];
export type Measure = "l2" | "rms" | "absmax";
export type Source = "param_grad" | "output_grad";

export interface FlowPoint {
  readonly layer: string;
  readonly place: number;
  /** Null where the layer was not watched at this step; NaN where the gradient is not finite. */
  readonly value: number | null;
  readonly mark: "vanishing" | "exploding" | "nonfinite" | null;
}

/** `size`: how many values; of what depends on the batch it is not known, NaN. */
interface Sum { squares: number; absmax: number; size: number; nonfinite: boolean; seen: boolean }

/** Of each layer the gradient at a step. Of its parameters together, or of what comes out of it (first leaf). */
export function flowAt(layers: readonly Layer[], series: readonly Series[], step: number, measure: Measure, source: Source): FlowPoint[] {
  const byName = new Map(series.filter((one) => one.kind === source && one.phase === "train").map((one) => [one.layer, one]));
  const asked = layers.map((layer, place) => ({ layer, place, names: namesOf(layer, source) })).filter((one) => one.names.length);
  return asked.map(({ layer, place, names }) => {
    const sum: Sum = { squares: 0, absmax: 0, size: 0, nonfinite: false, seen: false };
    for (const [name, size] of names) add(sum, byName.get(name), step, size);
    const value = valueOf(sum, measure);
    return { layer: layer.name, place, value, mark: markOf(sum) };
  });
}

function namesOf(layer: Layer, source: Source): [name: string, size: number][] {
  const size = (shape: readonly number[]) => shape.reduce((all, length) => all * length, 1);
  if (source === "param_grad") return Object.entries(layer.parameter_shapes).map(([name, shape]) => [name, size(shape)]);
  return [[Object.keys(layer.output_shapes)[0] ?? layer.name, NaN]];
}

function add(sum: Sum, series: Series | undefined, step: number, size: number): void {
  const at = series ? series.step.indexOf(step) : -1;
  if (!series || at < 0) return;
  const figure = (name: string) => num(series.values[name]?.[at]);
  const l2 = figure("l2");
  sum.seen = true;
  sum.nonfinite ||= (figure("nan") ?? 0) + (figure("inf") ?? 0) > 0 || (l2 !== null && !Number.isFinite(l2));
  sum.squares += (l2 ?? 0) ** 2;
  sum.absmax = Math.max(sum.absmax, figure("absmax") ?? 0);
  sum.size += size;
}

function valueOf(sum: Sum, measure: Measure): number | null {
  if (!sum.seen) return null;
  if (sum.nonfinite) return NaN;
  if (measure === "absmax") return sum.absmax;
  return Math.sqrt(measure === "rms" ? sum.squares / sum.size : sum.squares);
}

function markOf(sum: Sum): FlowPoint["mark"] {
  if (!sum.seen) return null;
  if (sum.nonfinite) return "nonfinite";
  const norm = Math.sqrt(sum.squares);
  if (norm > LIMITS.large) return "exploding";
  const usual = Number.isNaN(sum.size) ? sum.absmax : norm / Math.sqrt(sum.size);
  return usual < LIMITS.vanishing ? "vanishing" : null;
}

/** What the whole depth says: how the first layer's norm stands to the last's. Needs the norms. */
export function overDepth(norms: readonly FlowPoint[]): { ratio: number; mark: "vanishing" | "exploding" | null } | null {
  const there = norms.filter((point) => point.value !== null && Number.isFinite(point.value));
  const [first, last] = [there[0]?.value, there.at(-1)?.value];
  if (there.length < 2 || !last || first === undefined || first === null) return null;
  const ratio = first / last;
  const mark = ratio > 70 ? "exploding" : ratio < 1e-3 && first < 1e-4 ? "vanishing" : null;
  return { ratio, mark };
}

/** All steps that any of the series has, in order. */
export function stepsOf(series: readonly { step: readonly number[] }[]): number[] {
  const found = new Set<number>();
  for (const one of series) for (const step of one.step) found.add(step);
  return [...found].sort((a, b) => a - b);
}
