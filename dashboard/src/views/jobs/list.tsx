// The list of jobs, live: filters by state, name and label, and actions on several jobs.
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

/** The states of a filter: those of a group, or the state itself. */
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
  const [selected, setSelected] = useState<ReadonlySet<string>>(new Set());
  useEffect(() => setSelected(new Set()), [path]);
  const select = (id: string, on: boolean) => {
    const wanted = new Set(selected);
    if (on) wanted.add(id);
    else wanted.delete(id);
    setSelected(wanted);
  };
  const rows = jobs.value?.data ?? [];
  return (
    <div class="stack">
      <div class="spread"><h1>Jobs</h1></div>
      <Filters query={query} change={change} />
      {jobs.problem && jobs.problem.status > 0 && <ProblemBox problem={jobs.problem} />}
      {!jobs.value && !jobs.problem && <Loading />}
      {jobs.value && rows.length === 0 && <None filtered={[...query.keys()].length > 0} />}
      {rows.length > 0 && <Bulk jobs={rows.filter((job) => selected.has(job.id))} clear={() => setSelected(new Set())} />}
      {rows.length > 0 && <JobTable jobs={rows} selected={selected} select={select} selectAll={(on) => setSelected(new Set(on ? rows.map((job) => job.id) : []))} />}
      {jobs.value && (
        <div class="row">
          {query.get("after") && <button onClick={() => change({ after: null }, true)}>Newest</button>}
          {jobs.value.has_more && <button onClick={() => change({ after: jobs.value?.next ?? null }, true)}>Older</button>}
          <label class="row muted">
            jobs per page
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
      <p>Train a small network on the built-in digits dataset and inspect it while it trains.</p>
      <a class="button primary" href="/submit">New job</a>
    </Empty>
  );
}

interface TableProps {
  jobs: Job[];
  selected: ReadonlySet<string>;
  select(id: string, on: boolean): void;
  selectAll(on: boolean): void;
}

function JobTable({ jobs, selected, select, selectAll }: TableProps) {
  const all = jobs.every((job) => selected.has(job.id));
  return (
    <div class="card table" style={{ padding: 0 }}>
      <table class="jobs">
        <thead>
          <tr>
            <th scope="col"><input type="checkbox" aria-label="Select all on this page" checked={all} onChange={(event) => selectAll(event.currentTarget.checked)} /></th>
            <th scope="col">Job</th>
            <th scope="col">State</th>
            <th scope="col">Progress</th>
            <th scope="col" class="number">Loss</th>
            <th scope="col"><span class="only-readers">Loss trend</span></th>
            <th scope="col" class="wide-only">Best validation</th>
            <th scope="col" class="wide-only">Devices</th>
            <th scope="col" class="wide-only">Created</th>
            <th scope="col"><span class="only-readers">Actions</span></th>
          </tr>
        </thead>
        <tbody>{jobs.map((job) => <JobRow key={job.id} job={job} selected={selected.has(job.id)} select={select} />)}</tbody>
      </table>
    </div>
  );
}
