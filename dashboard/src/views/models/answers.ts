// A prediction request, and what its response says of each row. Pure, except for `predict`.
import { ask } from "../../api/http";
import { num, type Number, type Prediction } from "../../api/types";
import type { Json, JsonObject } from "../../spec/pointer";

export interface Answer extends Prediction {
  /** Milliseconds until the response was here, in the queue, and of the computation. */
  totalMs: number;
  queueMs: number | null;
  computeMs: number | null;
}

/** Predict rows with a reference to a served model: `name`, `name@alias`, `name:3`. */
export async function predict(reference: string, rows: readonly JsonObject[], topK: number | null): Promise<Answer> {
  const began = performance.now();
  const body = topK === null ? { rows } : { rows, top_k: topK };
  const sent = await ask(`models/${encodeURIComponent(reference)}/predict`, { method: "POST", body });
  const answer = (await sent.json()) as Prediction;
  const timing = sent.headers.get("server-timing") ?? "";
  return { ...answer, totalMs: performance.now() - began, queueMs: duration(timing, "queue"), computeMs: duration(timing, "compute") };
}

/** A time of a Server-Timing header, in ms. */
export function duration(header: string, name: string): number | null {
  const found = new RegExp(`(?:^|,\\s*)${name};dur=([0-9.]+)`).exec(header);
  return found ? Number(found[1]) : null;
}

export interface Scored { name: string; prob: number | null }

/** The names of the outputs of a response. */
export function outputsOf({ outputs }: Pick<Prediction, "outputs">): string[] {
  return [...new Set(Object.keys(outputs).map((key) => key.slice(0, key.lastIndexOf("/"))))];
}

/** The classes of a row, the most probable first; null: the output has none, or has one for each step. */
export function scoresOf({ outputs }: Pick<Prediction, "outputs">, output: string, row: number): Scored[] | null {
  const at = (field: string) => (outputs[`${output}/${field}`] as Json[] | undefined)?.[row];
  const [names, probs] = [at("top_k_class") ?? at("top_k"), at("top_k_prob")];
  if (Array.isArray(names) && Array.isArray(probs) && !Array.isArray(names[0])) {
    return names.map((name, place) => ({ name: String(name), prob: num(probs[place] as Number) }));
  }
  const [name, prob] = [at("class") ?? at("id"), at("prob")];
  if (name === undefined || prob === undefined || Array.isArray(name)) return null;
  return [{ name: String(name), prob: num(prob as Number) }];
}

/** The value of an output for a row, flat. */
export function valuesOf({ outputs }: Pick<Prediction, "outputs">, output: string, row: number): number[] {
  const value = (outputs[`${output}/value`] as Json[] | undefined)?.[row];
  if (value === undefined) return [];
  return (([value] as unknown[]).flat(Infinity) as Number[]).map((one) => num(one) ?? NaN);
}

/** Whether a predicted class is the value of a row's column, which may be the number of a named class. */
export function isRight(predicted: string, value: Json, classes: unknown): boolean {
  return predicted === truthText(value, classes) || predicted === String(value);
}

/** The true class as a text: its name if the column has names. */
export function truthText(value: Json, classes: unknown): string {
  const name = Array.isArray(classes) && typeof value === "number" ? (classes as Json[])[value] : undefined;
  return String(name ?? value);
}
