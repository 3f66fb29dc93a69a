// What belongs to the service and to whoever uses it: keys, quotas, webhooks, limits, colours.
import { useLive } from "../../api/live";
import type { Quotas, Service } from "../../api/types";
import { bytes, count, duration } from "../../format";
import { choice, choose, type Choice } from "../../theme";
import { Scroll } from "../../ui/scroll";
import { Loading, ProblemBox } from "../../ui/state";
import { Keys } from "./keys";
import { Webhooks } from "./webhooks";

export default function View() {
  return (
    <div class="stack">
      <h1>Settings</h1>
      <Keys />
      <QuotaCard />
      <Webhooks />
      <ServiceCard />
      <Colours />
    </div>
  );
}

const QUOTAS: readonly [name: keyof Quotas["limits"], words: string, write: (value: number) => string][] = [
  ["queued_jobs", "jobs that wait", count],
  ["running_jobs", "jobs that run", count],
  ["devices", "devices", count],
  ["storage_bytes", "storage", bytes],
  ["uploads", "uploads at once", count],
  ["streams", "streams", count],
  ["requests_per_s", "requests a second", count],
];

function QuotaCard() {
  const { value, problem } = useLive<Quotas>("quotas", 5);
  return (
    <section class="card" aria-label="Quotas">
      <h2>Quotas{value && <span class="muted"> of {value.owner}</span>}</h2>
      {problem && <ProblemBox problem={problem} />}
      {!value ? !problem && <Loading /> : (
        <Scroll label="Quotas">
          <table>
            <thead><tr><th>What</th><th class="number">Used</th><th class="number">At most</th><th>Set for</th></tr></thead>
            <tbody>
              {QUOTAS.map(([name, words, write]) => {
                const used = (value.used as Record<string, number>)[name];
                const limit = value.limits[name];
                return (
                  <tr key={name}>
                    <td>{words}</td>
                    <td class="number">{used === undefined ? "–" : write(used)}</td>
                    <td class="number">{limit === null ? "no limit" : write(limit)}{used !== undefined && limit !== null && used >= limit && <span class="badge warn"> used up</span>}</td>
                    <td>{name in value.own ? "this owner" : "everybody"}</td>
                  </tr>
                );
              })}
            </tbody>
          </table>
        </Scroll>
      )}
    </section>
  );
}

/** What may be asked for, and how much of it, in words; what is newer than this page has its own name. */
const CAPABILITIES: Record<string, string> = {
  kinds: "Kinds of jobs", networks: "Networks are given as", dataset_formats: "Files of datasets", builtin_datasets: "Datasets that are here", catalog: "Parts of the catalogue",
  event_types: "Types of events", tensor_kinds: "What a probe may watch",
};
const LIMITS: Record<string, string> = {
  max_json_bytes: "Largest request without a file", max_upload_bytes: "Largest file of a dataset", max_page: "Most entries of a page of a list", max_head_bytes: "Largest head of a request",
  head_timeout_s: "Longest wait for the head of a request", body_timeout_s: "Longest wait for the rest of it", max_wait_s: "Longest wait for a job in one request",
  planner_timeout_s: "Longest time for a plan", idempotency_kept_s: "A request sent twice is known for",
  keep_values_days: "Days for which events with values are kept", keep_events_days: "Days for which events are kept after a job's end",
  keep_metrics_days: "Days for metrics after a job's end", keep_statistics_days: "Days for statistics after a job's end",
  keep_captures_days: "Days for captured tensors after a job's end", keep_checkpoints_days: "Days for checkpoints after a job's end",
  keep_jobs_days: "Days for jobs after their end",
};
const limitText = (name: string, limit: number | null) =>
  limit === null ? "no limit" : name.endsWith("_bytes") ? bytes(limit) : name.endsWith("_s") ? duration(limit) : count(limit);

function ServiceCard() {
  const { value, problem } = useLive<Service>("", Infinity);
  return (
    <section class="card stack" aria-label="Service">
      <h2>Service</h2>
      {problem && <ProblemBox problem={problem} />}
      {!value ? !problem && <Loading /> : (
        <>
          <dl class="facts">
            <dt>Version</dt><dd>{value.version}</dd>
            {Object.entries(value.capabilities).map(([name, what]) => <Fact key={name} name={CAPABILITIES[name] ?? name} value={Array.isArray(what) ? what.join(", ") : String(what)} />)}
          </dl>
          <h3>Limits</h3>
          <dl class="facts">
            {Object.entries(value.limits).map(([name, limit]) => <Fact key={name} name={LIMITS[name] ?? name} value={limitText(name, limit)} />)}
          </dl>
          <p><a href="/docs">The API</a> · <a href="/openapi.json">openapi.json</a></p>
        </>
      )}
    </section>
  );
}

const Fact = ({ name, value }: { name: string; value: string }) => <><dt>{name.replaceAll("_", " ")}</dt><dd>{value}</dd></>;

const CHOICES: readonly [Choice, string][] = [["system", "As the system"], ["light", "Light"], ["dark", "Dark"]];

function Colours() {
  return (
    <section class="card">
      <fieldset class="plain">
        <legend>Colours</legend>
        <div class="row">
          {CHOICES.map(([value, words]) => <label key={value}><input type="radio" name="colours" checked={choice.value === value} onChange={() => choose(value)} /> {words}</label>)}
        </div>
      </fieldset>
    </section>
  );
}
