// The layer table: one row per layer with the newest statistics of its tensors; sorting and filtering. Pure.
import { type Layer, num } from "../../../api/types";
import { type Verdict, verdictOf } from "./health";
import { sizeOf, tensorsOf, together, updateRatio } from "./combined";

export type Shape = Layer["output_shape"];

export interface Row {
  readonly index: number;
  readonly layer: Layer;
  readonly name: string;
  readonly type: string;
  readonly shape: string;
  readonly parameters: number;
  readonly mean: number | null;
  readonly std: number | null;
  readonly zeros: number | null;
  /** L2 norm of the gradient of all its parameters together. */
  readonly grad: number | null;
  readonly weight: number | null;
  /** log10 of the update's norm to the weights' norm. */
  readonly ratio: number | null;
  readonly nan: number | null;
  readonly inf: number | null;
  /** The step of its newest statistics; null if none of its tensors is watched. */
  readonly step: number | null;
  readonly verdict: Verdict;
}

export function shapeText(shape: Shape): string {
  if (Array.isArray(shape)) return shape.length ? shape.join(" × ") : "scalar";
  return Object.values(shape).map((one) => one.join(" × ") || "scalar").join(", ");
}

export function rowOf(layer: Layer, index: number): Row {
  const tensors = tensorsOf(layer);
  const output = layer.stats["output"];
  const ratio = updateRatio(layer);
  const sum = (which: "nan" | "inf") => (tensors.length ? tensors.reduce((all, one) => all + (num(one.figures[which]) ?? 0), 0) : null);
  return {
    index,
    layer,
    name: layer.name,
    type: layer.type,
    shape: shapeText(layer.output_shape),
    parameters: layer.parameters,
    mean: num(output?.mean),
    std: num(output?.std),
    zeros: num(output?.zeros),
    grad: together(layer, "param_grad")?.l2 ?? null,
    weight: together(layer, "param")?.l2 ?? null,
    ratio: ratio === null ? null : Math.log10(ratio),
    nan: sum("nan"),
    inf: sum("inf"),
    step: tensors.length ? Math.max(...tensors.map((one) => one.figures.step)) : null,
    verdict: verdictOf(layer),
  };
}

export type Column = "index" | "name" | "type" | "shape" | "parameters" | "mean" | "std" | "zeros" | "grad" | "weight" | "ratio" | "nan" | "health";

const ORDER: Record<Verdict["level"], number> = { bad: 3, warn: 2, ok: 1, unknown: 0 };

function key(row: Row, column: Column): number | string | null {
  if (column === "health") return ORDER[row.verdict.level];
  if (column === "nan") return row.nan === null ? null : row.nan + (row.inf ?? 0);
  if (column === "shape") return Array.isArray(row.layer.output_shape) ? sizeOf(row.layer.output_shape) : null;
  return row[column];
}

/** Sorted: rows without a value are last either way, NaN is the largest, and equal rows keep the network's order. */
export function sorted(rows: readonly Row[], column: Column, descending: boolean): Row[] {
  const keyed = rows.map((row) => ({ row, at: key(row, column) }));
  const sign = descending ? -1 : 1;
  keyed.sort((a, b) => {
    if (a.at === null || b.at === null) return (a.at === null ? 1 : 0) - (b.at === null ? 1 : 0) || a.row.index - b.row.index;
    return sign * compared(a.at, b.at) || a.row.index - b.row.index;
  });
  return keyed.map((one) => one.row);
}

const inOrder = new Intl.Collator("en", { numeric: true }); // fc2 before fc10

function compared(a: number | string, b: number | string): number {
  if (typeof a === "string" || typeof b === "string") return inOrder.compare(String(a), String(b));
  if (Number.isNaN(a) || Number.isNaN(b)) return +Number.isNaN(a) - +Number.isNaN(b);
  return a < b ? -1 : a > b ? 1 : 0;
}

/** A test of names: globs as in probes (`*`, `?`, `[ab]`, `[!ab]`), or a substring if there is no wildcard. */
export function matcher(filter: string): (name: string) => boolean {
  const wanted = filter.split(/[\s,]+/).filter(Boolean);
  if (!wanted.length) return () => true;
  const tests = wanted.map((one) => {
    if (!/[*?[]/.test(one)) return (name: string) => name.toLowerCase().includes(one.toLowerCase());
    const pattern = globbed(one);
    return (name: string) => pattern.test(name);
  });
  return (name) => tests.some((test) => test(name));
}

function globbed(glob: string): RegExp {
  const parts = glob.match(/\[!?[^\]]+\]|[\s\S]/g) ?? [];
  const source = parts.map((part) => {
    if (part === "*") return ".*";
    if (part === "?") return ".";
    if (part.length > 1) return `[${part[1] === "!" ? "^" : ""}${part.slice(part[1] === "!" ? 2 : 1, -1).replace(/[\\\]^]/g, "\\$&")}]`;
    return part.replace(/[.+^${}()|[\]\\]/g, "\\$&");
  });
  return new RegExp(`^${source.join("")}$`, "s");
}
