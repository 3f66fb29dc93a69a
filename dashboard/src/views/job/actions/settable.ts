// Suggestions for the settings of a spec that can be changed while the job runs. Pure.
// The service decides: any other path can be typed, and is rejected with the allowed ones.
import type { Command } from "../../../api/types";

type Tree = Record<string, unknown>;

const tree = (value: unknown): Tree => (typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Tree) : {});
const given = (value: Tree, keys: readonly string[]) => keys.filter((key) => value[key] !== null && value[key] !== undefined);

export function settable(spec: Tree | null): string[] {
  if (!spec) return [];
  const optimizer = tree(spec["optimizer"]);
  const numbers = Object.entries(tree(optimizer["args"])).filter(([, value]) => typeof value === "number" || Array.isArray(value));
  const stop = tree(spec["stop"]);
  return [
    ...new Set(["lr", ...numbers.map(([name]) => name)].map((name) => `optimizer.${name}`)),
    ...given(tree(spec["grad_clip"]), ["max", "min"]).map((name) => `grad_clip.${name}`),
    ...given(stop, ["epochs", "steps", "seconds"]).map((name) => `stop.${name}`),
    ...given(tree(stop["early"]), ["patience", "min_delta"]).map((name) => `stop.early.${name}`),
    ...given(tree(spec["evaluate"]), ["every_epochs", "every_steps"]).map((name) => `evaluate.${name}`),
    ...given(tree(spec["checkpoint"]), ["every_epochs", "every_steps", "every_s"]).map((name) => `checkpoint.${name}`),
  ];
}

/** The current value of a setting: from the newest applied command, else from the spec; undefined if unknown. */
export function current(spec: Tree | null, commands: readonly Command[]): (path: string) => unknown {
  const set = Object.assign({}, ...commands.filter((one) => one.state === "applied").map((one) => one.new ?? {})) as Tree;
  return (path) => {
    if (path in set) return set[path];
    const steps = path.replace(/^optimizer\.(?!sparse\.)/, "optimizer.args.").split(".");
    return steps.reduce<unknown>((at, step) => tree(at)[step], spec ?? undefined);
  };
}
