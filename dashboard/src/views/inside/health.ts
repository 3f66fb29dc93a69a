// Whether a layer is well: rules over its newest figures, each with its words and its numbers. Pure.
// What a rule needs and nobody watched leaves it unanswered; it never passes for lack of data.
import { type Layer, num } from "../../api/types";
import { figure } from "../../format";
import { tensorsOf, together, updateRatio } from "./together";

export type Level = "bad" | "warn" | "ok" | "unknown";

export interface Finding {
  readonly rule: string;
  readonly level: "bad" | "warn" | "ok";
  /** What was found, with its number and the rule's. */
  readonly text: string;
}

export interface Verdict {
  readonly level: Level;
  readonly findings: readonly Finding[];
  /** Rules that had nothing to look at, and what would have to be watched. */
  readonly unanswered: readonly { rule: string; needs: string }[];
}

/** The numbers of the rules. */
export const LIMITS = {
  overflow: 0.5, // of the largest number of the type
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

type Answer = Omit<Finding, "rule"> | null;
interface Rule {
  readonly name: string;
  readonly needs: string;
  /** Whether it is asked of this layer at all. */
  readonly asked: (layer: Layer) => boolean;
  /** Null: its data was not watched. */
  readonly answer: (layer: Layer) => Answer;
}

const always = () => true;
const trained = (layer: Layer) => layer.trainable && Object.keys(layer.parameter_shapes).length > 0;
const ok = (text: string): Answer => ({ level: "ok", text });
const warn = (text: string): Answer => ({ level: "warn", text });
const bad = (text: string): Answer => ({ level: "bad", text });

function nonfinite(layer: Layer): Answer {
  const tensors = tensorsOf(layer);
  if (!tensors.length) return null;
  const hit = tensors.filter(({ figures }) => (num(figures.nan) ?? 0) + (num(figures.inf) ?? 0) > 0);
  if (!hit.length) return ok("every value is finite");
  const told = hit.slice(0, 3).map(({ name, kind, figures }) => `${kind} of ${name} has ${num(figures.nan)} NaN and ${num(figures.inf)} Inf at step ${figures.step}`);
  return bad(told.join("; ") + (hit.length > 3 ? `; and ${hit.length - 3} more tensors` : ""));
}

function overflow(layer: Layer): Answer {
  const largest = LARGEST[layer.dtype];
  const tensors = tensorsOf(layer);
  if (!tensors.length || largest === undefined) return null;
  const most = Math.max(...tensors.map(({ figures }) => num(figures.absmax) ?? 0));
  const told = `the largest magnitude is ${figure(most)}; ${layer.dtype} ends at ${figure(largest)}`;
  return most > LIMITS.overflow * largest ? warn(`${told}, and more than half of that is near the end`) : ok(told);
}

function silent(layer: Layer): Answer {
  const zeros = num(layer.stats["output"]?.zeros);
  if (zeros === null) return null;
  const share = `${(zeros * 100).toFixed(1)} % of its outputs are zero`;
  if (zeros >= 1) return bad(share);
  if (RECTIFIERS.has(layer.type) && zeros > LIMITS.inactive) return warn(`${share}; of a ${layer.type} more than ${LIMITS.inactive * 100} % is too many`);
  return ok(share);
}

function spread(layer: Layer): Answer {
  const std = num(layer.stats["output"]?.std);
  if (std === null || Number.isNaN(std)) return null;
  const told = `the standard deviation of its outputs is ${figure(std)}`;
  if (std < LIMITS.flat) return warn(`${told}, under ${LIMITS.flat}: they are all alike`);
  return std > LIMITS.wide ? warn(`${told}, over ${LIMITS.wide}`) : ok(told);
}

function gradient(layer: Layer): Answer {
  const found = together(layer, "param_grad");
  if (!found) return null;
  if (found.nonfinite) return bad(`${found.nonfinite} of the gradient's ${found.size} values are not finite`); // its figures are of the others only
  const rms = found.l2 / Math.sqrt(found.size);
  if (found.l2 > LIMITS.exploding) return bad(`the gradient's norm is ${figure(found.l2)}, over ${LIMITS.exploding}: it explodes`);
  if (found.l2 > LIMITS.large) return warn(`the gradient's norm is ${figure(found.l2)}, over ${LIMITS.large}`);
  if (found.l2 === 0) return warn("the gradient is exactly zero: nothing is learnt here");
  if (rms < LIMITS.vanishing) return warn(`the gradient's root mean square is ${figure(rms)}, under ${LIMITS.vanishing}: it vanishes`);
  return ok(`the gradient's norm is ${figure(found.l2)}, its root mean square ${figure(rms)}`);
}

function pace(layer: Layer): Answer {
  const ratio = updateRatio(layer);
  if (ratio === null || Number.isNaN(ratio)) return null;
  const told = `a step changes the weights by ${figure(ratio)} of their norm`;
  if (ratio > LIMITS.fast) return bad(`${told}, over ${LIMITS.fast}: too fast`);
  return ratio < LIMITS.slow ? warn(`${told}, under ${LIMITS.slow}: hardly at all`) : ok(`${told}; about 0.001 is usual`);
}

export const RULES: readonly Rule[] = [
  { name: "Finite values", needs: "any of its tensors", asked: always, answer: nonfinite },
  { name: "Room for numbers", needs: "any of its tensors", asked: (layer) => layer.dtype in LARGEST, answer: overflow },
  { name: "Silent outputs", needs: "output", asked: always, answer: silent },
  { name: "Spread of outputs", needs: "output", asked: always, answer: spread },
  { name: "Gradient", needs: "param_grad", asked: trained, answer: gradient },
  { name: "Update to weight", needs: "update and param of one step, finite and not all zero", asked: trained, answer: pace },
];

export function verdictOf(layer: Layer): Verdict {
  const findings: Finding[] = [];
  const unanswered: { rule: string; needs: string }[] = [];
  for (const { name, needs, asked, answer } of RULES) {
    if (!asked(layer)) continue;
    const found = answer(layer);
    if (found) findings.push({ rule: name, ...found });
    else unanswered.push({ rule: name, needs });
  }
  const level = !findings.length ? "unknown" : findings.some((one) => one.level === "bad") ? "bad" : findings.some((one) => one.level === "warn") ? "warn" : "ok";
  return { level, findings, unanswered };
}

/** A sign and a word for each level: never colour alone. */
export const SIGNS: Record<Level, readonly [sign: string, word: string]> = {
  bad: ["✕", "bad"],
  warn: ["▲", "look"],
  ok: ["✓", "well"],
  unknown: ["○", "not watched"],
};
