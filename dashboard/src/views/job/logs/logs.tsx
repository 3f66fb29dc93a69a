// The log of the processes, filtered by the service, followed as it grows.
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

import { ask, withQuery } from "../../../api/http";
import { ended, type Job, type Page } from "../../../api/types";
import { count } from "../../../format";
import { useQuery } from "../../../query";
import { Empty, Loading, ProblemBox } from "../../../ui/state";
import { Labelled } from "../charts/chart";
import { type Growing, useGrowing } from "../data";
import { type Filters, filtersOf, LEVELS, parametersOf, searchText, TIMES } from "./filters";

interface Printed { seq: number; attempt: number; at: string; rank: number; stream: string; lines: string[]; levels: string[] }
interface Line { key: string; rank: number; stream: string; level: string; at: string; attempt: number; text: string }

const TAIL = 5000;
const MOST_LINES = 500_000;
const HEIGHT = 20;
const SPARE = 20;

export function Logs({ job }: { job: Job }) {
  const [query] = useQuery();
  const [all, setAll] = useState(false);
  const [filters, stream] = [filtersOf(query), query.get("stream")];
  const [follow, setFollow] = useState(!ended(job));
  const { items: lines, problem, loading } = useLines(job, filters, all);
  const ranks = useSeen(lines, filters.rank, job.ranks);
  const shown = stream ? lines.filter((one) => one.stream === stream) : lines;
  const cut = !all && lines.length >= TAIL;
  const isFiltered = filters.search || filters.level || filters.since || filters.rank || stream;
  return (
    <div class="stack">
      <Controls filters={filters} stream={stream} ranks={ranks}>
        <label class="row"><input type="checkbox" checked={follow} onChange={(event) => setFollow(event.currentTarget.checked)} /> follow</label>
        <span class="muted" role="status">{count(shown.length)} lines{searchText(filters)}</span>
        {cut && <button type="button" class="small" onClick={() => setAll(true)}>Only the newest are shown: load all</button>}
      </Controls>
      {problem && <ProblemBox problem={problem} />}
      {loading && !lines.length && <Loading what="Loading the log" />}
      {!loading && !shown.length && !problem && <Empty><p>{isFiltered ? "No line passes these filters." : ended(job) ? "No output." : "No output yet."}</p></Empty>}
      {shown.length > 0 && <Lines lines={shown} marked={filters.isPattern ? "" : filters.search} follow={follow} onFollow={setFollow} />}
    </div>
  );
}

/** The filters. They are in the address of the page. */
function Controls({ filters, stream, ranks, children }: { filters: Filters; stream: string | null; ranks: readonly number[]; children: ComponentChildren }) {
  const [, change] = useQuery();
  const [typed, setTyped] = useState(filters.search);
  const [isPattern, setPattern] = useState(filters.isPattern);
  const search = (as: boolean) => change(as ? { grep: typed, text: null } : { text: typed, grep: null });
  const toggle = (as: boolean) => (setPattern(as), search(as));
  const { level, rank, since } = filters;
  return (
    <form class="row" onSubmit={(event) => (event.preventDefault(), search(isPattern))} role="search" aria-label="Log">
      <input type="search" aria-label={isPattern ? "Lines that match" : "Lines that contain"} placeholder={isPattern ? "Lines that match …" : "Lines that contain …"} value={typed} onInput={(event) => setTyped(event.currentTarget.value)} />
      <label class="row" title="RE2: as in Python, without look-around and back references"><input type="checkbox" checked={isPattern} onChange={(event) => toggle(event.currentTarget.checked)} /> regular expression</label>
      <button>Search</button>
      <Choice name="level" value={level} options={LEVELS.map((one) => [one, one === "error" ? one : `${one} and above`])} />
      {(ranks.length > 1 || rank !== null) && <Choice name="rank" value={rank} options={ranks.map((one) => [`${one}`, `${one}`])} />}
      <Choice name="stream" value={stream} all="both" options={[["stdout", "stdout"], ["stderr", "stderr"]]} />
      <Choice name="since" value={since} options={Object.entries(TIMES)} />
      {children}
    </form>
  );
}

/** A filter with a few values. Another one from the address is shown as it is. */
function Choice({ name, value, options, all = "all" }: { name: string; value: string | null; options: readonly (readonly [string, string])[]; all?: string }) {
  const [, change] = useQuery();
  const isOther = value !== null && !options.some(([one]) => one === value);
  return (
    <Labelled name={name}>
      <select value={value ?? ""} onChange={(event) => change({ [name]: event.currentTarget.value })}>
        <option value="">{all}</option>
        {options.map(([one, text]) => <option key={one} value={one}>{text}</option>)}
        {isOther && <option value={value}>{value}</option>}
      </select>
    </Labelled>
  );
}

/** The lines so far; new ones are requested when the job's log has grown. */
function useLines(job: Job, filters: Filters, all: boolean): Growing<Line> {
  const asked = parametersOf(filters);
  const key = JSON.stringify([job.id, asked, all]);
  return useGrowing<Line, string | null>(job, key, null, async (cursor, put) => {
    if (cursor.after === null && !all) {
      const [lines, after] = await lastLines(job.id, asked);
      cursor.after = after;
      return put(lines);
    }
    for (let more = true; more; ) { // a search ends after some seconds, wherever it is
      const [page, after] = await read(job.id, { ...asked, after: cursor.after });
      [cursor.after, more] = [after, page.has_more];
      put(flat(page.data));
    }
  }, (lines) => lines.slice(-MOST_LINES));
}

/** The last lines, and the cursor after them. */
async function lastLines(job: string, asked: ReturnType<typeof parametersOf>): Promise<[Line[], string | null]> {
  const [first, after] = await read(job, { ...asked, tail: TAIL });
  let [page, lines] = [first, flat(first.data)];
  while (page.has_more && lines.length < TAIL) {
    [page] = await read(job, { ...asked, tail: TAIL - lines.length, before: page.next });
    lines = [...flat(page.data), ...lines];
  }
  return [lines, after];
}

async function read(job: string, query: Parameters<typeof withQuery>[1]): Promise<[Page<Printed>, string | null]> {
  const answer = await ask(withQuery(`jobs/${job}/logs`, query));
  return [(await answer.json()) as Page<Printed>, answer.headers.get("x-last-seq")];
}

function flat(printed: readonly Printed[]): Line[] {
  return printed.flatMap(({ seq, rank, stream, at, attempt, lines, levels }) => lines.map((text, place) => ({ key: `${seq}.${place}`, rank, stream, level: levels[place] ?? "info", at, attempt, text })));
}

/** Every rank seen so far, so that selecting one does not remove the others. */
function useSeen(lines: readonly Line[], rank: string | null, known: Job["ranks"]): number[] {
  const seen = useRef(new Set<number>());
  for (const one of known) seen.current.add(one.rank);
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
            {one.level !== "info" && <span class="level">{one.level} </span>}
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
