// Compare up to twenty jobs: a metric of all of them, the differences of their specs, and their best values.
import { useState } from "preact/hooks";

import { withQuery } from "../../api/http";
import { useLive, useLiveAll } from "../../api/live";
import { type Job, num, type Page } from "../../api/types";
import { Swatch } from "../../charts/swatch";
import { figure } from "../../format";
import { useQuery } from "../../query";
import { Empty, Loading, ProblemBox, StateBadge } from "../../ui/state";
import { directionOf } from "../jobs/finite";
import { Overlay } from "./chart";
import { type Difference, differing, flatten, type Flat, groupsBy, shown } from "./differing";
import { type Axis, Parallel } from "./parallel";

const MOST = 20;

export default function Compare() {
  const [query, change] = useQuery();
  const ids = [...new Set(query.get("jobs")?.split(",").filter(Boolean) ?? [])].slice(0, MOST);
  return (
    <div class="stack">
      <h1>Compare</h1>
      <Picker ids={ids} change={change} />
      {ids.length === 0 ? <Empty><p>Add jobs to compare, or select them in the <a href="/jobs">list of jobs</a>.</p></Empty> : <Selected ids={ids} />}
    </div>
  );
}

function Picker({ ids, change }: { ids: string[]; change: ReturnType<typeof useQuery>[1] }) {
  const [text, setText] = useState("");
  const found = useLive<Page<Job>>(withQuery("jobs", { q: text, limit: 20, kind: "train" }), Infinity);
  const others = found.value?.data.filter((job) => !ids.includes(job.id)) ?? [];
  return (
    <div class="row">
      <label class="field"><span>Find a job</span><input type="search" value={text} placeholder="name or id contains" onInput={(event) => setText(event.currentTarget.value)} /></label>
      <label class="field">
        <span>Add ({ids.length} of {MOST})</span>
        <select value="" disabled={ids.length >= MOST} onChange={(event) => change({ jobs: [...ids, event.currentTarget.value].join(",") })}>
          <option value="">select …</option>
          {others.map((job) => <option key={job.id} value={job.id}>{job.name ?? job.id} · {job.state}</option>)}
        </select>
      </label>
    </div>
  );
}

function Selected({ ids }: { ids: string[] }) {
  const jobs = useLiveAll<Job>(ids.map((id) => `jobs/${id}`), 3);
  const specs = useLiveAll<unknown>(ids.map((id) => withQuery(`jobs/${id}/spec`, { resolved: true })), Infinity);
  const problem = jobs.find((one) => one.problem && one.problem.status > 0)?.problem;
  if (problem) return <ProblemBox problem={problem} />;
  if (jobs.some((one) => !one.value) || specs.some((one) => !one.value && !one.problem)) return <Loading />;
  return <Compared jobs={jobs.map((one) => one.value as Job)} specs={specs.map((one) => flatten(one.value ?? {}))} />;
}

function Compared({ jobs, specs }: { jobs: Job[]; specs: Flat[] }) {
  const [query, change] = useQuery();
  const differences = differing(specs);
  const names = [...new Set(jobs.flatMap((job) => Object.keys(job.summary)))].sort();
  const metric = query.get("metric") ?? (names.includes("loss") ? "loss" : names[0]) ?? null;
  const by = (query.get("by")?.split(",") ?? []).filter((key) => differences.some((one) => one.key === key));
  const groups = by.length ? groupsBy(by, specs) : null;
  return (
    <>
      <section class="card">
        <div class="spread">
          <h2>{metric ?? "No metrics yet"}</h2>
          <div class="row">
            <label class="field">
              <span>Metric</span>
              <select value={metric ?? ""} onChange={(event) => change({ metric: event.currentTarget.value })}>{names.map((name) => <option key={name}>{name}</option>)}</select>
            </label>
            <label class="field">
              <span>Group by</span>
              <select value={by.join(",")} onChange={(event) => change({ by: event.currentTarget.value })}>
                <option value="">none</option>
                {differences.map(({ key }) => <option key={key} value={key}>{key}</option>)}
              </select>
            </label>
          </div>
        </div>
        {metric && <Overlay metric={metric} jobs={jobs} groups={groups} />}
      </section>
      <Results jobs={jobs} differences={differences} metric={metric} remove={(id) => change({ jobs: jobs.map((job) => job.id).filter((one) => one !== id).join(",") })} />
      <section class="card">
        <h2>Parallel coordinates</h2>
        <Parallel axes={axesOf(differences, jobs, metric)} jobs={jobs.map((job, place) => ({ name: job.name ?? job.id, style: place }))} />
      </section>
    </>
  );
}

/** The settings that differ, and the metric's best value. */
function axesOf(differences: Difference[], jobs: Job[], metric: string | null): Axis[] {
  const axes: Axis[] = differences.slice(0, 8).map(({ key, values }) => ({ name: key, values }));
  if (metric) {
    const best = directionIn(jobs, metric);
    axes.push({ name: `${best} ${metric}`, values: jobs.map((job) => num(job.summary[metric]?.[best]) ?? undefined) });
  }
  return axes;
}

/** The direction of a metric, from the first job that has it. */
function directionIn(jobs: Job[], metric: string): "min" | "max" {
  const having = jobs.find((job) => metric in job.summary);
  return having ? directionOf(having, metric) : "max";
}

interface ResultsProps {
  jobs: Job[];
  differences: Difference[];
  metric: string | null;
  remove(id: string): void;
}

function Results({ jobs, differences, metric, remove }: ResultsProps) {
  const best = metric ? directionIn(jobs, metric) : "max";
  return (
    <section class="card">
      <h2>Differences</h2>
      <div class="table">
        <table>
          <thead>
            <tr>
              <th scope="col">Job</th><th scope="col">State</th>
              {metric && <th scope="col" class="number">{metric}, last</th>}
              {metric && <th scope="col" class="number">{best} at step</th>}
              {differences.map(({ key }) => <th key={key} scope="col">{key}</th>)}
              <th scope="col"><span class="only-readers">Remove</span></th>
            </tr>
          </thead>
          <tbody>
            {jobs.map((job, place) => {
              const summary = metric ? job.summary[metric] : undefined;
              const at = metric && summary ? summary[`${best}_step`] : null;
              return (
                <tr key={job.id} data-job={job.id}>
                  <td class="of-job"><Swatch style={place} /> <a href={`/jobs/${job.id}`}>{job.name ?? job.id}</a></td>
                  <td><StateBadge state={job.state} /></td>
                  {metric && <td class="number">{figure(num(summary?.["last"]))}</td>}
                  {metric && <td class="number">{summary ? `${figure(num(summary[best]))} at ${at ?? "–"}` : "–"}</td>}
                  {differences.map(({ key, values }) => <td key={key} class="mono">{shown(values[place])}</td>)}
                  <td><button class="plain" aria-label={`Remove ${job.name ?? job.id}`} onClick={() => remove(job.id)}>✕</button></td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {jobs.length > 1 && differences.length === 0 && <p class="muted">The specs are identical.</p>}
    </section>
  );
}
