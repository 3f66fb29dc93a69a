// The spec of a job: as submitted, resolved, and the differences from its parent.
import { useLive } from "../../../api/live";
import type { Job } from "../../../api/types";
import { count } from "../../../format";
import { useQuery } from "../../../query";
import { Loading, ProblemBox } from "../../../ui/state";
import { notify } from "../../../ui/toast";
import { differences } from "./diff";

type Spec = Record<string, unknown>;

export function SpecTab({ job }: { job: Job }) {
  const [query, change] = useQuery();
  const kind = query.get("spec") ?? "given";
  const kinds: [string, string][] = [["given", "Submitted"], ["resolved", "Resolved"], ...(job.parent ? [["parent", "Changes from parent"] as [string, string]] : [])];
  return (
    <div class="stack">
      <div class="row" role="group" aria-label="Spec views">
        {kinds.map(([key, name]) => <button key={key} aria-pressed={kind === key} onClick={() => change({ spec: key === "given" ? null : key })}>{name}</button>)}
      </div>
      {kind === "parent" && job.parent ? <Changes job={job} parent={job.parent} /> : <Text job={job} resolved={kind === "resolved"} />}
    </div>
  );
}

const specPath = (job: string, resolved: boolean) => `jobs/${job}/spec${resolved ? "?resolved=true" : ""}`;

function Text({ job, resolved }: { job: Job; resolved: boolean }) {
  const spec = useLive<Spec>(specPath(job.id, resolved), Infinity);
  if (!spec.value) return spec.problem ? <ProblemBox problem={spec.problem} /> : <Loading what="Loading the spec" />;
  const text = JSON.stringify(spec.value, null, 2);
  return (
    <div class="card">
      <div class="spread"><h2>{resolved ? "Resolved spec, with all defaults and sizes" : "Submitted spec"}</h2>
        <button onClick={() => notify(navigator.clipboard.writeText(text), "Copied.")}>Copy</button></div>
      <pre class="block" tabIndex={0}>{text}</pre>
    </div>
  );
}

function Changes({ job, parent }: { job: Job; parent: string }) {
  const mine = useLive<Spec>(specPath(job.id, true), Infinity);
  const its = useLive<Spec>(specPath(parent, true), Infinity);
  const problem = mine.problem ?? its.problem;
  if (problem) return <ProblemBox problem={problem} />;
  if (!mine.value || !its.value) return <Loading what="Loading the specs" />;
  const found = differences(its.value, mine.value);
  return (
    <div class="card diff">
      <h2>{found.length ? `${count(found.length)} ${found.length === 1 ? "difference" : "differences"} from ` : "Identical to "}<a href={`/jobs/${parent}`}>the parent</a></h2>
      {found.length > 0 && (
        <div class="table">
          <table>
            <thead><tr><th scope="col">field</th><th scope="col">parent</th><th scope="col">this job</th></tr></thead>
            <tbody>{found.map((one) => <tr key={one.path}><th scope="row"><code>{one.path}</code></th><td><del>{shown(one.before)}</del></td><td><ins>{shown(one.after)}</ins></td></tr>)}</tbody>
          </table>
        </div>
      )}
    </div>
  );
}

function shown(value: unknown): string {
  if (value === undefined) return "";
  const text = JSON.stringify(value);
  return text.length > 300 ? `${text.slice(0, 300)} …` : text;
}
