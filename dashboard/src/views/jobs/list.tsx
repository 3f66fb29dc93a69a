// All jobs: what each is doing, live; found by state, name and label; several acted on at once.
import { useEffect, useState } from "preact/hooks";

import { withQuery } from "../../api/http";
import { useLive } from "../../api/live";
import type { Job, JobState, Page } from "../../api/types";
import { useQuery } from "../../query";
import { Empty, Loading, ProblemBox } from "../../ui/state";
import { Bulk } from "./bulk";
import { Filters } from "./filters";
import { JobRow } from "./row";

const GROUPS: Record<string, readonly JobState[]> = {
  active: ["queued", "starting", "running", "pausing", "paused", "cancelling"],
  ended: ["succeeded", "failed", "cancelled"],
};

/** The states that a filter means: a group's, or the one itself. */
export function statesOf(filter: string | null): string | null {
  return filter ? (GROUPS[filter]?.join(",") ?? filter) : null;
}

export default function Jobs() {
  const [query, change] = useQuery();
  const limit = Number(query.get("limit")) || 50;
  const path = withQuery("jobs", {
    state: statesOf(query.get("state")),
    kind: query.get("kind"),
    q: query.get("q"),
    label: query.get("label")?.split(",") ?? null,
    parent: query.get("parent"),
    order: query.get("order"),
    after: query.get("after"),
    limit,
  });
  const jobs = useLive<Page<Job>>(path, limit > 200 ? 5 : 2);
  const [chosen, setChosen] = useState<ReadonlySet<string>>(new Set());
  useEffect(() => setChosen(new Set()), [path]);
  const choose = (id: string, on: boolean) => {
    const wanted = new Set(chosen);
    if (on) wanted.add(id);
    else wanted.delete(id);
    setChosen(wanted);
  };
  const rows = jobs.value?.data ?? [];
  return (
    <div class="stack">
      <div class="spread"><h1>Jobs</h1></div>
      <Filters query={query} change={change} />
      {jobs.problem && jobs.problem.status > 0 && <ProblemBox problem={jobs.problem} />}
      {!jobs.value && !jobs.problem && <Loading />}
      {jobs.value && rows.length === 0 && <None filtered={[...query.keys()].length > 0} />}
      {rows.length > 0 && <Bulk jobs={rows.filter((job) => chosen.has(job.id))} clear={() => setChosen(new Set())} />}
      {rows.length > 0 && <JobTable jobs={rows} chosen={chosen} choose={choose} chooseAll={(on) => setChosen(new Set(on ? rows.map((job) => job.id) : []))} />}
      {jobs.value && (
        <div class="row">
          {query.get("after") && <button onClick={() => change({ after: null }, true)}>Newest</button>}
          {jobs.value.has_more && <button onClick={() => change({ after: jobs.value?.next ?? null }, true)}>Older</button>}
          <label class="row muted">
            jobs a page
            <select value={String(limit)} onChange={(event) => change({ limit: event.currentTarget.value, after: null })}>
              {["50", "200", "1000"].map((one) => <option key={one}>{one}</option>)}
            </select>
          </label>
        </div>
      )}
    </div>
  );
}

function None({ filtered }: { filtered: boolean }) {
  if (filtered) return <Empty><p>No job matches these filters.</p><a class="button" href="/jobs">Show all</a></Empty>;
  return (
    <Empty>
      <h2>No jobs yet</h2>
      <p>Train a small network on the built-in digits, and look inside while it learns.</p>
      <a class="button primary" href="/submit">New job</a>
    </Empty>
  );
}

interface TableProps {
  jobs: Job[];
  chosen: ReadonlySet<string>;
  choose(id: string, on: boolean): void;
  chooseAll(on: boolean): void;
}

function JobTable({ jobs, chosen, choose, chooseAll }: TableProps) {
  const all = jobs.every((job) => chosen.has(job.id));
  return (
    <div class="card table" style={{ padding: 0 }}>
      <table class="jobs">
        <thead>
          <tr>
            <th scope="col"><input type="checkbox" aria-label="Select all shown" checked={all} onChange={(event) => chooseAll(event.currentTarget.checked)} /></th>
            <th scope="col">Job</th>
            <th scope="col">State</th>
            <th scope="col">Progress</th>
            <th scope="col" class="number">Loss</th>
            <th scope="col"><span class="only-readers">Loss over steps</span></th>
            <th scope="col" class="wide-only">Best validation</th>
            <th scope="col" class="wide-only">Devices</th>
            <th scope="col" class="wide-only">Created</th>
            <th scope="col"><span class="only-readers">Actions</span></th>
          </tr>
        </thead>
        <tbody>{jobs.map((job) => <JobRow key={job.id} job={job} chosen={chosen.has(job.id)} choose={choose} />)}</tbody>
      </table>
    </div>
  );
}
