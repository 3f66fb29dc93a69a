// The published models: their newest versions, aliases, and the jobs that serve them.
import { useLocation } from "preact-iso";

import { withQuery } from "../../api/http";
import { useLive } from "../../api/live";
import type { ModelSummary, Page } from "../../api/types";
import { ago, count } from "../../format";
import { quoted } from "../../spec/snippets";
import { Scroll } from "../../ui/scroll";
import { Loading, ProblemBox, StateBadge } from "../../ui/state";

export default function View() {
  const { query } = useLocation();
  const live = useLive<Page<ModelSummary>>(withQuery("models", { limit: 50, after: query["after"] }), 3);
  const page = live.value;
  return (
    <div class="stack">
      <h1>Models</h1>
      {live.problem && <ProblemBox problem={live.problem} />}
      {page && (page.data.length ? <List page={page} isLater={"after" in query} /> : <HowTo />)}
      {!page && !live.problem && <Loading what="Loading the models" />}
    </div>
  );
}

function List({ page, isLater }: { page: Page<ModelSummary>; isLater: boolean }) {
  return (
    <div class="card">
      <Scroll label="Models">
        <table>
          <caption class="only-readers">Models</caption>
          <thead><tr><th scope="col">Name</th><th scope="col" class="number">Newest version</th><th scope="col" class="number">Versions</th><th scope="col">Aliases</th><th scope="col">Served</th><th scope="col">Created</th></tr></thead>
          <tbody>{page.data.map((one) => <Line key={one.id} model={one} />)}</tbody>
        </table>
      </Scroll>
      <div class="row">
        {isLater && <a class="button" href="/models">Newest</a>}
        {page.has_more && page.next && <a class="button" href={withQuery("/models", { after: page.next })}>Older</a>}
      </div>
    </div>
  );
}

function Line({ model }: { model: ModelSummary }) {
  return (
    <tr>
      <th scope="row"><a href={`/models/${model.name}`}>{model.name}</a></th>
      <td class="number">{model.latest}</td>
      <td class="number">{count(model.num_versions)}</td>
      <td>{Object.entries(model.aliases).map(([name, version]) => `${name} ${version}`).join(", ") || <span class="muted">none</span>}</td>
      <td>{model.served_by.length ? model.served_by.map((one) => <div key={one.job + one.reference} class="row"><a href={`/jobs/${one.job}`}>{one.reference}</a> {one.version === null ? <StateBadge state={one.state} /> : <span class="badge good">✓ version {one.version}</span>}</div>) : <span class="muted">no</span>}</td>
      <td class="nowrap" title={model.created_at}>{ago(model.created_at)}</td>
    </tr>
  );
}

/** How to publish a checkpoint. */
function HowTo() {
  const url = location.origin;
  const ways: readonly [string, string][] = [
    ["CLI", "glasshouse models publish NAME JOB --alias production"],
    ["Python", `client = gh.Client(${JSON.stringify(url)})  # the key: $GLASSHOUSE_API_KEY\nclient.models.publish("NAME", client.jobs.get("JOB"), aliases=["production"])`],
    ["curl", `curl -sS --fail-with-body ${quoted(`${url}/api/v1/models`)} \\\n  -H "Authorization: Bearer $GLASSHOUSE_API_KEY" \\\n  -H 'Content-Type: application/json' \\\n  -d '{"name": "NAME", "job": "JOB", "aliases": ["production"]}'`],
  ];
  return (
    <section class="card stack" aria-label="Publish a model">
      <h2>No models yet</h2>
      <p>A model is a name for checkpoints that are meant to be used. Publish the newest checkpoint of a <a href="/jobs">job</a>:</p>
      {ways.map(([name, text]) => <div key={name}><h3>{name}</h3><pre class="code" tabIndex={0} aria-label={`As ${name}`}>{text}</pre></div>)}
    </section>
  );
}
