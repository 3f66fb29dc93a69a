// The event log of a job by type, newest first.
import { useState } from "preact/hooks";

import type { Job } from "../../../api/types";
import { bytes, count, figure } from "../../../format";
import { useQuery } from "../../../query";
import { Empty, Loading, ProblemBox } from "../../../ui/state";
import { kindName } from "../../inside/kinds";
import { layerHref } from "../charts/chart";
import { type Logged, MOST_EVENTS, useEvents } from "../data";
import { commandText } from "../charts/marks";

const TYPES = ["state", "attempt", "command", "checkpoint", "finding", "probe", "adjusted", "stalled", "dropped", "gap", "end", "capture", "metrics", "stats"] as const;
const MANY = new Set(["capture", "metrics", "stats"]); // several per step: hidden by default
const DEFAULT = TYPES.filter((type) => !MANY.has(type));
const SHOWN = 200;
const BACK = 2000;

export function Events({ job }: { job: Job }) {
  const [query, change] = useQuery();
  const asked = query.get("types");
  const wanted = asked === null ? DEFAULT : TYPES.filter((type) => asked.split(",").includes(type));
  const toggle = (type: string, on: boolean) => {
    const next = TYPES.filter((one) => (one === type ? on : (wanted as readonly string[]).includes(one)));
    change({ types: next.join(",") === DEFAULT.join(",") ? null : next.join(",") || "none" });
  };
  return (
    <div class="stack events">
      <fieldset class="types"><legend class="only-readers">Event types</legend>
        {TYPES.map((type) => (
          <label key={type} class="row"><input type="checkbox" checked={(wanted as readonly string[]).includes(type)} onChange={(event) => toggle(type, event.currentTarget.checked)} /> {type}</label>
        ))}
      </fieldset>
      {wanted.length ? <Timeline key={wanted.join()} job={job} types={wanted} /> : <Empty><p>No event type is selected.</p></Empty>}
    </div>
  );
}

function Timeline({ job, types }: { job: Job; types: readonly string[] }) {
  const many = types.some((type) => MANY.has(type));
  const [from, setFrom] = useState(many ? Math.max(0, job.last_seq - BACK) : 0);
  const [shown, setShown] = useState(SHOWN);
  const { items: events, problem, loading } = useEvents(job, types.join(","), from);
  const newest = events.slice(-shown).reverse();
  const earlier = () => (shown < events.length ? setShown(shown + SHOWN) : (setFrom(Math.max(0, from - BACK)), setShown(shown + SHOWN)));
  return (
    <>
      {problem && !events.length && <ProblemBox problem={problem} />}
      {loading && <Loading what="Loading the events" />}
      {!loading && !events.length && <Empty><p>No events of these types{from > 0 ? " among the newest" : " yet"}.</p></Empty>}
      {events.length > 0 && (
        <div class="table">
          <table>
            <caption class="only-readers">Events, newest first</caption>
            <thead><tr><th scope="col" class="number">no.</th><th scope="col">time</th><th scope="col" class="number wide-only">attempt</th><th scope="col">type</th><th scope="col">details</th></tr></thead>
            <tbody>
              {newest.map((one) => (
                <tr key={one.seq}>
                  <td class="number">{count(one.seq)}</td>
                  <td class="nowrap" title={one.at}>{new Date(one.at).toLocaleTimeString("en-GB")}</td>
                  <td class="number wide-only">{one.attempt}</td>
                  <td class="type">{one.type}</td>
                  <td class="what"><What event={one} /></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {(shown < events.length || (from > 0 && events.length < MOST_EVENTS)) && <div><button onClick={earlier}>Show earlier events</button></div>}
      {shown >= events.length && events.length >= MOST_EVENTS && <p class="muted">Only the newest {count(MOST_EVENTS)} events of these types are shown; <code>GET /api/v1/jobs/{job.id}/events</code> returns all of them.</p>}
    </>
  );
}

function What({ event }: { event: Logged }) {
  const step = typeof event["step"] === "number" ? ` at step ${count(event["step"])}` : "";
  const layer = event["layer"];
  if (typeof layer === "string" && layer !== "loss" && (event.type === "finding" || event.type === "capture")) {
    return <>{words(event)} <a href={layerHref(event.job, layer, event["step"])}>{layer}</a>{event.type === "capture" ? step : ""}</>;
  }
  return <>{words(event)}{event.type === "finding" ? "" : step}</>;
}

const text = (value: unknown): string => (typeof value === "string" ? value : typeof value === "number" ? figure(value) : value === null || value === undefined ? "" : JSON.stringify(value));

function words(event: Logged): string {
  const of = (name: string) => text(event[name]);
  switch (event.type) {
    case "state": return `${of("from") ? `${of("from")} → ` : ""}${of("to")}${of("reason") ? `: ${of("reason")}` : ""}`;
    case "attempt": return `attempt ${of("n")} started${event["resumed_from_step"] ? ` from step ${of("resumed_from_step")}` : ""}`;
    case "command": return `${commandText(event)}: ${of("state")}${event["by"] ? `, requested by ${of("by")}` : ""}`;
    case "checkpoint": return `${of("checkpoint")}, ${bytes(event["size_bytes"] as number)}`;
    case "finding": return of("message");
    case "probe": return `${of("probe")} ${of("action")}`;
    case "adjusted": return `${of("what")} ${of("from")} → ${of("to")}, by ${of("by")}`;
    case "stalled": return `no progress for ${of("seconds")} s: ${of("action")}${of("reason") ? `; ${of("reason")}` : ""}`;
    case "dropped": return `${of("count")} of ${of("what")} dropped`;
    case "gap": return `older events were deleted; the log continues with ${of("first_available")}`;
    case "end": return of("state");
    case "capture": return `${kindName(of("kind"))} ${text(event["shape"])} of`;
    case "metrics": return Object.entries(event["values"] as Record<string, unknown>).map(([name, value]) => `${name} ${text(value)}`).join(", ");
    case "stats": return `${(event["rows"] as unknown[]).length} tensors`;
    default: return "";
  }
}
