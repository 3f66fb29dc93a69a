// The log of the processes by rank and stream, searched by the service, followed as it grows.
import { useLayoutEffect, useRef, useState } from "preact/hooks";

import { ask, withQuery } from "../../../api/http";
import { ended, type Job, type Page } from "../../../api/types";
import { count } from "../../../format";
import { useQuery } from "../../../query";
import { Empty, Loading, ProblemBox } from "../../../ui/state";
import { Labelled } from "../charts/chart";
import { type Growing, useGrowing } from "../data";

interface Printed { seq: number; attempt: number; at: string; rank: number; stream: string; lines: string[] }
interface Line { key: string; rank: number; stream: string; at: string; attempt: number; text: string }

const TAIL = 5000;
const MOST_LINES = 500_000;
const HEIGHT = 20;
const SPARE = 20;

export function Logs({ job }: { job: Job }) {
  const [query, change] = useQuery();
  const [all, setAll] = useState(false);
  const [rank, stream, grep] = [query.get("rank"), query.get("stream"), query.get("grep") ?? ""];
  const [typed, setTyped] = useState(grep);
  const [follow, setFollow] = useState(!ended(job));
  const { items: lines, problem, loading } = useLines(job, rank, grep, all);
  const ranks = useSeen(lines, rank);
  const shown = stream ? lines.filter((one) => one.stream === stream) : lines;
  const cut = !all && lines.length >= TAIL;
  const search = (event: Event) => (event.preventDefault(), change({ grep: typed }));
  return (
    <div class="stack">
      <form class="row" onSubmit={search} role="search" aria-label="Log">
        <input type="search" aria-label="Lines that contain" placeholder="Lines that contain …" value={typed} onInput={(event) => setTyped(event.currentTarget.value)} />
        <button>Search</button>
        <Labelled name="rank">
          <select value={rank ?? ""} onChange={(event) => change({ rank: event.currentTarget.value })}>
            <option value="">all</option>
            {ranks.map((one) => <option key={one} value={String(one)}>{one}</option>)}
          </select>
        </Labelled>
        <Labelled name="stream">
          <select value={stream ?? ""} onChange={(event) => change({ stream: event.currentTarget.value })}>
            <option value="">both</option><option value="stdout">stdout</option><option value="stderr">stderr</option>
          </select>
        </Labelled>
        <label class="row"><input type="checkbox" checked={follow} onChange={(event) => setFollow(event.currentTarget.checked)} /> follow</label>
        <span class="muted" role="status">{count(shown.length)} lines{grep && ` that contain “${grep}”`}</span>
        {cut && <button type="button" class="small" onClick={() => setAll(true)}>Only the newest are shown: load all</button>}
      </form>
      {problem && <ProblemBox problem={problem} />}
      {loading && !lines.length && <Loading what="Loading the log" />}
      {!loading && !shown.length && !problem && <Empty><p>{grep ? "No line contains this text." : ended(job) ? "No output." : "No output yet."}</p></Empty>}
      {shown.length > 0 && <Lines lines={shown} marked={grep} follow={follow} onFollow={setFollow} />}
    </div>
  );
}

/** The lines so far; new ones are requested when the job's log has grown. */
function useLines(job: Job, rank: string | null, grep: string, all: boolean): Growing<Line> {
  const key = [job.id, rank, grep, all].join("\n");
  return useGrowing<Line, string | null>(job, key, null, async (cursor, put) => {
    const tail = cursor.after === null && !all ? TAIL : null;
    const answer = await ask(withQuery(`jobs/${job.id}/logs`, { rank, grep, after: cursor.after, tail }));
    const found = flat(((await answer.json()) as Page<Printed>).data);
    cursor.after = answer.headers.get("x-last-seq");
    put(found);
  }, (lines) => lines.slice(-MOST_LINES));
}

function flat(printed: readonly Printed[]): Line[] {
  return printed.flatMap(({ seq, rank, stream, at, attempt, lines }) => lines.map((text, place) => ({ key: `${seq}.${place}`, rank, stream, at, attempt, text })));
}

/** Every rank seen so far, so that selecting one does not remove the others. */
function useSeen(lines: readonly Line[], rank: string | null): number[] {
  const seen = useRef(new Set<number>());
  if (rank !== null) seen.current.add(+rank);
  for (const one of lines) seen.current.add(one.rank);
  return [...seen.current].sort((a, b) => a - b);
}

/** A virtual list: only visible lines are in the document. */
function Lines({ lines, marked, follow, onFollow }: { lines: readonly Line[]; marked: string; follow: boolean; onFollow(on: boolean): void }) {
  const host = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  const tall = host.current?.clientHeight ?? 600;
  useLayoutEffect(() => {
    if (follow && host.current) host.current.scrollTop = host.current.scrollHeight;
  }, [lines.length, follow]);
  const first = Math.max(0, Math.floor(top / HEIGHT) - SPARE);
  const last = Math.min(lines.length, Math.ceil((top + tall) / HEIGHT) + SPARE);
  const scrolled = (element: HTMLDivElement) => {
    setTop(element.scrollTop);
    const atEnd = element.scrollTop + element.clientHeight >= element.scrollHeight - HEIGHT;
    if (follow && !atEnd && element.scrollTop < top) onFollow(false);
  };
  return (
    <div class="log" ref={host} tabIndex={0} role="log" aria-label="Log lines" aria-live="off" onScroll={(event) => scrolled(event.currentTarget)}>
      <div style={{ height: `${lines.length * HEIGHT}px` }}>
        {lines.slice(first, last).map((one, place) => (
          <div key={one.key} class={`line ${one.stream}`} style={{ top: `${(first + place) * HEIGHT}px` }}>
            <span class="who" title={`${one.at}, attempt ${one.attempt}`}>{new Date(one.at).toLocaleTimeString("en-GB")} {one.rank} {one.stream} </span>
            <Marked text={one.text} marked={marked} />
          </div>
        ))}
      </div>
    </div>
  );
}

function Marked({ text, marked }: { text: string; marked: string }) {
  if (!marked) return <>{text}</>;
  const parts = text.split(marked);
  return <>{parts.map((part, place) => <>{place > 0 && <mark>{marked}</mark>}{part}</>)}</>;
}
