// Checkpoints, commands and attempts as marks on the charts, in a few words each. Pure.
import type { Checkpoint } from "../../../api/types";
import type { Marker } from "../../../charts/plot";
import { figure } from "../../../format";
import type { Axis, Logged } from "../data";

export const MARKED = "command,attempt";

export interface Mark {
  step: number;
  kind: Marker["kind"];
  name: string;
}

/** The mark of an event; empty if it has no step. */
export function markOf(event: Logged): Mark[] {
  const step = event.type === "attempt" ? (event["resumed_from_step"] ?? 0) : event["step"];
  const name = nameOf(event);
  return typeof step === "number" && name ? [{ step, kind: event.type as Mark["kind"], name }] : [];
}

/** Marks of the checkpoints that still exist; the log also has those that newer ones replaced. */
export function marksOf(checkpoints: readonly Checkpoint[]): Mark[] {
  return checkpoints.map(({ step, best, reason }) => ({ step, kind: "checkpoint", name: `checkpoint of step ${step}${best && reason ? `, ${reason}` : ""}` }));
}

const MOST = 1000;
const PLACES = 400;

/** At most as many marks as a chart has room for: older automatic checkpoints are thinned to one per interval of steps. */
export function fewer(marks: Mark[]): Mark[] {
  if (marks.length <= MOST) return marks;
  const [older, newer] = [marks.slice(0, -MOST / 2), marks.slice(-MOST / 2)];
  const width = Math.max(1, ...older.map((one) => one.step)) / PLACES;
  const taken = new Set<number>();
  const some = older.filter(({ kind, step }) => {
    const place = Math.floor(step / width);
    return kind !== "checkpoint" || (!taken.has(place) && taken.add(place));
  });
  return [...some, ...newer].slice(-MOST);
}

export function markersOf(marks: readonly Mark[], axis: Axis): Marker[] {
  return marks.map(({ step, kind, name }) => ({ x: axis.of(step), kind, name }));
}

function nameOf(event: Logged): string | null {
  if (event.type === "attempt") return `attempt ${event["n"]}${event["resumed_from_step"] ? `, from step ${event["resumed_from_step"]}` : ""}`;
  if (event.type === "command") return `${commandText(event)}${event["state"] === "rejected" ? " (rejected)" : ""}`;
  return null;
}

/** "optimizer.lr 0.1 → 0.01", "evaluate" */
export function commandText(command: Record<string, unknown>): string {
  if (typeof command["do"] === "string") return command["do"];
  const set = (command["new"] ?? command["set"] ?? {}) as Record<string, unknown>;
  const old = (command["old"] ?? {}) as Record<string, unknown>;
  const texts = Object.entries(set).map(([path, value]) => `${path} ${path in old ? `${valueText(old[path])} → ` : ""}${valueText(value)}`);
  return texts.join(", ") || Object.keys(command).join(", ");
}

export function valueText(value: unknown): string {
  if (typeof value === "number") return figure(value);
  return typeof value === "string" ? value : JSON.stringify(value) ?? "–";
}
