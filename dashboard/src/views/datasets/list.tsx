// The list of datasets with their states and sizes, and the upload form.
import { useLocation } from "preact-iso";

import { withQuery } from "../../api/http";
import { useLive } from "../../api/live";
import type { Dataset, Page } from "../../api/types";
import { ago, bytes, count } from "../../format";
import { Scroll } from "../../ui/scroll";
import { Empty, Loading, ProblemBox } from "../../ui/state";
import { DatasetState, problemText } from "./condition";
import { Upload } from "./upload";

export default function View() {
  const { query } = useLocation();
  const live = useLive<Page<Dataset>>(withQuery("datasets", { limit: 50, after: query["after"] }), 2);
  return (
    <div class="stack">
      <h1>Datasets</h1>
      <Upload />
      {live.problem && <ProblemBox problem={live.problem} />}
      {live.value ? <List page={live.value} isLater={"after" in query} /> : <Loading />}
    </div>
  );
}

function List({ page, isLater }: { page: Page<Dataset>; isLater: boolean }) {
  if (!page.data.length) return <Empty><p>No datasets yet. Upload a file, or add the built-in digits.</p></Empty>;
  return (
    <div class="card">
      <Scroll label="Datasets">
        <table>
          <caption class="only-readers">Datasets</caption>
          <thead><tr><th>Name</th><th>State</th><th class="number">Rows</th><th>Splits</th><th class="number">Size</th><th>Format</th><th>Created</th><th><span class="only-readers">Use</span></th></tr></thead>
          <tbody>{page.data.map((one) => <Line key={one.id} dataset={one} />)}</tbody>
        </table>
      </Scroll>
      <div class="row">
        {isLater && <a class="button" href="/datasets">Newest</a>}
        {page.has_more && page.next && <a class="button" href={withQuery("/datasets", { after: page.next })}>Older</a>}
      </div>
    </div>
  );
}

function Line({ dataset }: { dataset: Dataset }) {
  const splits = Object.entries(dataset.splits);
  return (
    <tr>
      <td><a href={`/datasets/${dataset.id}`}>{dataset.name}</a></td>
      <td style={dataset.problem ? { minWidth: "14rem" } : {}}><DatasetState state={dataset.state} />{dataset.problem && <p class="wrong">{problemText(dataset.problem)}</p>}</td>
      <td class="number">{dataset.state === "ready" ? count(splits.reduce((sum, [, rows]) => sum + rows, 0)) : "–"}</td>
      <td class="small">{splits.map(([name, rows]) => `${name} ${count(rows)}`).join(", ")}</td>
      <td class="number nowrap">{dataset.size_bytes ? bytes(dataset.size_bytes) : "–"}</td>
      <td>{dataset.format}</td>
      <td class="nowrap">{ago(dataset.created_at)}</td>
      <td class="nowrap">{dataset.state === "ready" && <a class="button" href={`/submit?dataset=${dataset.id}`} aria-label={`Train on ${dataset.name}`}>Train</a>}</td>
    </tr>
  );
}
