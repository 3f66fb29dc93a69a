// The health of a layer: rules over its newest statistics. Pure.
// A rule whose data is not watched is not evaluated; it never passes for lack of data.
import { type Layer, num } from "../../../api/types";
import { count, figure } from "../../../format";
import { kindName } from "../kinds";
import { tensorsOf, together, updateRatio } from "./combined";

export type Level = "bad" | "warn" | "ok" | "unknown";

export interface Finding {
  readonly rule: string;
  readonly level: "bad" | "warn" | "ok";
  /** The measured value and the rule's limit. */
  readonly text: string;
}

export interface Verdict {
  readonly level: Level;
  readonly findings: readonly Finding[];
  /** Rules without data, and what to watch for them. */
  readonly skipped: readonly { rule: string; needs: string }[];
}

/** The limits of the rules. */
export const LIMITS = {
  overflow: 0.5, // of the largest value of the dtype
  inactive: 0.9, // of the outputs of a ReLU
  flat: 1e-8, // standard deviation
  wide: 100,
  vanishing: 1e-7, // root mean square of a gradient, which is at least its mean magnitude
  large: 100, // norm of a gradient
  exploding: 1000,
  slow: 1e-5, // of the weights' norm, in one step
  fast: 1e-1,
} as const;

const LARGEST: Record<string, number> = { float16: 65504, bfloat16: 3.3895e38, float32: 3.4028e38, float64: Number.MAX_VALUE };
const RECTIFIERS = new Set(["ReLU", "ReLU6", "Threshold", "Hardshrink", "Softshrink", "relu", "relu6"]);

type Outcome = Omit<Finding, "rule"> | null;
interface Rule {
  readonly name: string;
  readonly needs: string;
  /** Whether the rule applies to this layer. */
  readonly applies: (layer: Layer) => boolean;
  /** Null: its data is not watched. */
  readonly evaluate: (layer: Layer) => Outcome;
}

const always = () => true;
const trained = (layer: Layer) => layer.trainable && Object.keys(layer.parameter_shapes).length > 0;
const ok = (text: string): Outcome => ({ level: "ok", text });
const warn = (text: string): Outcome => ({ level: "warn", text });
const bad = (text: string): Outcome => ({ level: "bad", text });

function nonfinite(layer: Layer): Outcome {
  const tensors = tensorsOf(layer);
  if (!tensors.length) return null;
  const hit = tensors.filter(({ figures }) => (num(figures.nan) ?? 0) + (num(figures.inf) ?? 0) > 0);
  if (!hit.length) return ok("no NaN or Inf");
  const texts = hit.slice(0, 3).map(({ name, kind, figures }) => `${name} (${kindName(kind)}) has ${num(figures.nan)} NaN and ${num(figures.inf)} Inf at step ${figures.step}`);
  return bad(texts.join("; ") + (hit.length > 3 ? `; and ${hit.length - 3} more tensors` : ""));
}

function overflow(layer: Layer): Outcome {
  const largest = LARGEST[layer.dtype];
  const tensors = tensorsOf(layer);
  if (!tensors.length || largest === undefined) return null;
  const most = Math.max(...tensors.map(({ figures }) => num(figures.absmax) ?? 0));
  const text = `the max magnitude is ${figure(most)}; the largest ${layer.dtype} is ${figure(largest)}`;
  return most > LIMITS.overflow * largest ? warn(`${text}: over half of it may overflow`) : ok(text);
}

function deadUnits(layer: Layer): Outcome {
  const zeros = num(layer.stats["output"]?.zeros);
  if (zeros === null) return null;
  const text = `${(zeros * 100).toFixed(1)} % of its outputs are zero`;
  if (zeros >= 1) return bad(text);
  if (RECTIFIERS.has(layer.type) && zeros > LIMITS.inactive) return warn(`${text}, over ${LIMITS.inactive * 100} % of a ${layer.type}`);
  return ok(text);
}

function outputStd(layer: Layer): Outcome {
  const std = num(layer.stats["output"]?.std);
  if (std === null || Number.isNaN(std)) return null;
  const text = `the standard deviation of its outputs is ${figure(std)}`;
  if (std < LIMITS.flat) return warn(`${text}, under ${LIMITS.flat}: they are constant`);
  return std > LIMITS.wide ? warn(`${text}, over ${LIMITS.wide}`) : ok(text);
}

function gradient(layer: Layer): Outcome {
  const found = together(layer, "param_grad");
  if (!found) return null;
  if (found.nonfinite) return bad(`${found.nonfinite} of the gradient's ${found.size} values are NaN or Inf`); // the statistics exclude them
  const rms = found.l2 / Math.sqrt(found.size);
  if (found.l2 > LIMITS.exploding) return bad(`the gradient's norm is ${figure(found.l2)}, over ${LIMITS.exploding}: exploding`);
  if (found.l2 > LIMITS.large) return warn(`the gradient's norm is ${figure(found.l2)}, over ${LIMITS.large}`);
  if (found.l2 === 0) return warn("the gradient is exactly zero: nothing is learned");
  if (rms < LIMITS.vanishing) return warn(`the gradient's root mean square is ${figure(rms)}, under ${LIMITS.vanishing}: vanishing`);
  return ok(`the gradient's norm is ${figure(found.l2)}, its root mean square ${figure(rms)}`);
}

function updateSize(layer: Layer): Outcome {
  const ratio = updateRatio(layer);
  if (ratio === null || Number.isNaN(ratio)) return null;
  const text = `the ratio of their norms in a step is ${figure(ratio)}`;
  if (ratio > LIMITS.fast) return bad(`${text}, over ${LIMITS.fast}: too fast`);
  return ratio < LIMITS.slow ? warn(`${text}, under ${LIMITS.slow}: too slow`) : ok(`${text}; about 0.001 is typical`);
}

export const RULES: readonly Rule[] = [
  { name: "NaN or Inf", needs: "any tensor", applies: always, evaluate: nonfinite },
  { name: "Overflow", needs: "any tensor", applies: (layer) => layer.dtype in LARGEST, evaluate: overflow },
  { name: "Dead units", needs: "Activation", applies: always, evaluate: deadUnits },
  { name: "Output standard deviation", needs: "Activation", applies: always, evaluate: outputStd },
  { name: "Gradient", needs: "Weight gradient", applies: trained, evaluate: gradient },
  { name: "Update to weight", needs: "Update and Weights of the same step, finite and not all zero", applies: trained, evaluate: updateSize },
];

export function verdictOf(layer: Layer): Verdict {
  const findings: Finding[] = [];
  const skipped: { rule: string; needs: string }[] = [];
  for (const { name, needs, applies, evaluate } of RULES) {
    if (!applies(layer)) continue;
    const found = evaluate(layer);
    if (found) findings.push({ rule: name, ...found });
    else skipped.push({ rule: name, needs });
  }
  const level = !findings.length ? "unknown" : findings.some((one) => one.level === "bad") ? "bad" : findings.some((one) => one.level === "warn") ? "warn" : "ok";
  return { level, findings, skipped };
}

/** A sign and a word for each level: never color alone. */
export const SIGNS: Record<Level, readonly [sign: string, word: string]> = {
  bad: ["✕", "problem"],
  warn: ["▲", "warning"],
  ok: ["✓", "healthy"],
  unknown: ["○", "not watched"],
};

/** "1 warning", "2 problems", "3 healthy" */
export function levelCount(level: Level, number: number): string {
  return `${count(number)} ${SIGNS[level][1]}${number !== 1 && (level === "bad" || level === "warn") ? "s" : ""}`;
}
