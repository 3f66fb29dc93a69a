// Settings: API keys, quotas, webhooks, the service's capabilities and limits, and the theme.
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
      <Theme />
    </div>
  );
}

const QUOTAS: readonly [name: keyof Quotas["limits"], words: string, write: (value: number) => string][] = [
  ["queued_jobs", "queued jobs", count],
  ["running_jobs", "running jobs", count],
  ["devices", "devices", count],
  ["storage_bytes", "storage", bytes],
  ["uploads", "concurrent uploads", count],
  ["streams", "streams", count],
  ["requests_per_s", "requests per second", count],
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
            <thead><tr><th>Quota</th><th class="number">Used</th><th class="number">Limit</th><th>Applies to</th></tr></thead>
            <tbody>
              {QUOTAS.map(([name, words, write]) => {
                const used = (value.used as Record<string, number>)[name];
                const limit = value.limits[name];
                return (
                  <tr key={name}>
                    <td>{words}</td>
                    <td class="number">{used === undefined ? "–" : write(used)}</td>
                    <td class="number">{limit === null ? "no limit" : write(limit)}{used !== undefined && limit !== null && used >= limit && <span class="badge warn"> reached</span>}</td>
                    <td>{name in value.own ? "this owner" : "all owners"}</td>
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

/** The labels of capabilities and limits; unknown ones are shown by name. */
const CAPABILITIES: Record<string, string> = {
  kinds: "Job kinds", networks: "Network types", dataset_formats: "Dataset formats", builtin_datasets: "Built-in datasets", catalog: "Catalog sections",
  event_types: "Event types", tensor_kinds: "Tensors for probes",
};
const LIMITS: Record<string, string> = {
  max_json_bytes: "Max size of a request without a file", max_upload_bytes: "Max size of a dataset file", max_page: "Max entries per page", max_head_bytes: "Max size of request headers",
  head_timeout_s: "Timeout for request headers", body_timeout_s: "Timeout for a request body", max_wait_s: "Max wait for a job per request",
  planner_timeout_s: "Planner timeout", idempotency_kept_s: "Idempotency keys are kept for",
  keep_values_days: "Days to keep events with values", keep_events_days: "Days to keep events of an ended job",
  keep_metrics_days: "Days to keep metrics of an ended job", keep_statistics_days: "Days to keep statistics of an ended job",
  keep_requests_days: "Days to keep the request log of an ended job", keep_captures_days: "Days to keep captures of an ended job", keep_checkpoints_days: "Days to keep checkpoints of an ended job",
  keep_jobs_days: "Days to keep an ended job",
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
          <p><a href="/docs">API documentation</a> · <a href="/openapi.json">openapi.json</a></p>
        </>
      )}
    </section>
  );
}

const Fact = ({ name, value }: { name: string; value: string }) => <><dt>{name.replaceAll("_", " ")}</dt><dd>{value}</dd></>;

const CHOICES: readonly [Choice, string][] = [["system", "System"], ["light", "Light"], ["dark", "Dark"]];

function Theme() {
  return (
    <section class="card">
      <fieldset class="plain">
        <legend>Theme</legend>
        <div class="row">
          {CHOICES.map(([value, words]) => <label key={value}><input type="radio" name="theme" checked={choice.value === value} onChange={() => choose(value)} /> {words}</label>)}
        </div>
      </fieldset>
    </section>
  );
}
