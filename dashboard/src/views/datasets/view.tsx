// A dataset: its columns, their statistics, and its rows.
import { useLocation, useRoute } from "preact-iso";

import { ask, withQuery } from "../../api/http";
import { refresh, useLive } from "../../api/live";
import type { Dataset, DatasetStats } from "../../api/types";
import { ago, bytes, count } from "../../format";
import type { Column, TableStats } from "../../spec/suggest";
import { Confirm } from "../../ui/confirm";
import { Loading, ProblemBox } from "../../ui/state";
import { notify } from "../../ui/toast";
import { DatasetState, problemText } from "./condition";
import { Distributions } from "./distributions";
import { RowTable } from "./rows";
import { ColumnFigures } from "./figures";

export default function View() {
  const { params } = useRoute();
  const live = useLive<Dataset>(`datasets/${params["id"]}`, 5);
  if (!live.value) return live.problem ? <ProblemBox problem={live.problem} /> : <Loading />;
  return <Shown dataset={live.value} />;
}

function Shown({ dataset }: { dataset: Dataset }) {
  const { path, query, route } = useLocation();
  const names = Object.keys(dataset.splits);
  const split = names.includes(query["split"] ?? "") ? query["split"]! : (names[0] ?? "");
  const isReady = dataset.state === "ready";
  const stats = useLive<DatasetStats>(isReady ? `datasets/${dataset.id}/stats` : null, Infinity);
  const figures = (stats.value?.splits as unknown as TableStats | undefined)?.[split] ?? null;
  const go = (more: Record<string, string>) => route(withQuery(path, { ...query, ...more }), true);
  const columns = dataset.columns as Column[];
  return (
    <div class="stack">
      <Head dataset={dataset} />
      {dataset.problem && <div class="problem" role="alert"><p><strong>The file could not be read.</strong></p><p>{problemText(dataset.problem)}</p></div>}
      {dataset.notes.map((one) => <p key={one.code} class="note" role="note">{one.detail}</p>)}
      {dataset.state === "pending" && <Loading what="Reading the file" />}
      {isReady && (
        <>
          <div class="tabs" role="group" aria-label="Splits">
            {names.map((name) => <a key={name} href={withQuery(path, { split: name })} aria-current={name === split ? "page" : undefined}>{name} ({count(dataset.splits[name])})</a>)}
          </div>
          <ColumnFigures columns={columns} figures={figures} />
          {figures && <Distributions columns={columns} figures={figures} split={split} />}
          <RowTable key={split} id={dataset.id} {...{ split, columns, figures }} offset={Number(query["offset"] ?? 0) || 0} go={(offset) => go({ split, offset: String(offset) })} />
        </>
      )}
    </div>
  );
}

function Head({ dataset }: { dataset: Dataset }) {
  const { route } = useLocation();
  const remove = async () => {
    const gone = await notify(ask(`datasets/${dataset.id}`, { method: "DELETE" }), `Deleted ${dataset.name}`);
    if (gone) route("/datasets");
    refresh("datasets?"); // only the lists: the dataset itself no longer exists
  };
  return (
    <>
      <div class="spread">
        <h1>{dataset.name} <DatasetState state={dataset.state} /></h1>
        <div class="row">
          {dataset.state === "ready" && <a class="button primary" href={`/submit?dataset=${dataset.id}`}>Train</a>}
          <Confirm word="Delete" question={`Delete ${dataset.name} and its rows? Ended jobs are kept but cannot be retried.`} act={remove} />
        </div>
      </div>
      <dl class="facts card">
        <dt>Id</dt><dd class="mono">{dataset.id}</dd>
        <dt>Format</dt><dd>{dataset.format}{dataset.resize && `, resized to ${dataset.resize}`}</dd>
        {dataset.size_bytes > 0 && <><dt>Size</dt><dd>{bytes(dataset.size_bytes)}</dd></>}
        <dt>Created</dt><dd>{ago(dataset.created_at)}</dd>
        {dataset.sha256 && <><dt>SHA-256</dt><dd class="mono">{dataset.sha256}</dd></>}
      </dl>
    </>
  );
}
