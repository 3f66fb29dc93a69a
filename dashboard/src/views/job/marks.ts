// Checkpoints, commands and attempts as marks on the charts, in a few words each. Pure.
import type { Marker } from "../../charts/plot";
import { figure } from "../../format";
import type { Axis, Logged } from "./data";

export const MARKED = "checkpoint,command,attempt";

export function markersOf(events: readonly Logged[], axis: Axis): Marker[] {
  return events.flatMap((event) => {
    const step = event.type === "attempt" ? (event["resumed_from_step"] ?? 0) : event["step"];
    const name = nameOf(event);
    return typeof step === "number" && name ? [{ x: axis.of(step), kind: event.type as Marker["kind"], name }] : [];
  });
}

function nameOf(event: Logged): string | null {
  if (event.type === "checkpoint") return `checkpoint of step ${event["step"]}`;
  if (event.type === "attempt") return `attempt ${event["n"]}${event["resumed_from_step"] ? `, from step ${event["resumed_from_step"]}` : ""}`;
  if (event.type === "command") return `${commandText(event)}${event["state"] === "rejected" ? " (rejected)" : ""}`;
  return null;
}

/** "optimizer.lr 0.1 → 0.01", "evaluate" */
export function commandText(command: Record<string, unknown>): string {
  if (typeof command["do"] === "string") return command["do"];
  const set = (command["new"] ?? command["set"] ?? {}) as Record<string, unknown>;
  const old = (command["old"] ?? {}) as Record<string, unknown>;
  const told = Object.entries(set).map(([path, value]) => `${path} ${path in old ? `${valueText(old[path])} → ` : ""}${valueText(value)}`);
  return told.join(", ") || Object.keys(command).join(", ");
}

export function valueText(value: unknown): string {
  if (typeof value === "number") return figure(value);
  return typeof value === "string" ? value : JSON.stringify(value) ?? "–";
}
