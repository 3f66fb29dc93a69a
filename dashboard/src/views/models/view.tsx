// A published model: its versions, a form to try it, its traffic, drift and evaluation.
import { useLocation, useRoute } from "preact-iso";
import { useEffect, useState } from "preact/hooks";

import { ask } from "../../api/http";
import { refresh, useLive, useLiveAll } from "../../api/live";
import type { Job, Model } from "../../api/types";
import { ago, count } from "../../format";
import { Confirm } from "../../ui/confirm";
import { Loading, ProblemBox } from "../../ui/state";
import { notify } from "../../ui/toast";
import { driftOf } from "../job/serving/drift";
import { DriftTables } from "../job/serving/drift-tables";
import { Evaluated } from "./evaluated";
import { servedVersion } from "./references";
import { Traffic } from "./traffic";
import { type TrainingSpec, Try } from "./try";
import { Versions } from "./versions";

export default function View() {
  const { params } = useRoute();
  const live = useLive<Model>(`models/${params["name"]}`, 2);
  if (!live.value) return live.problem ? <div class="stack"><ProblemBox problem={live.problem} /><a href="/models">Back to models</a></div> : <Loading what="Loading the model" />;
  return <Shown key={live.value.id} model={live.value} />;
}

function Shown({ model }: { model: Model }) {
  const [chosen, setChosen] = useState<string | null>(null);
  const [number, setNumber] = useState<number | null>(null);
  useEffect(() => {
    document.title = `${model.name} · Glasshouse`;
    return () => void (document.title = "Glasshouse");
  }, [model.name]);
  const ids = [...new Set(model.served_by.map((one) => one.job))];
  const jobs = useLiveAll<Job>(ids.map((id) => `jobs/${id}`), 2);
  const version = model.versions.find((one) => one.version === number) ?? firstShown(model);
  const serving = model.served_by.filter((one) => servedVersion(model, one) === version.version);
  const served = serving.find((one) => one.reference === chosen) ?? serving.find((one) => one.version !== null) ?? serving[0] ?? null;
  const spec = useLive<TrainingSpec>(version.job ? `jobs/${version.job}/spec?resolved=true` : null, Infinity).value;
  const select = (wanted: number) => {
    setNumber(wanted);
    setChosen(null);
  };
  const follow = (wanted: string) => {
    setChosen(wanted);
    const served = model.served_by.find((one) => one.reference === wanted);
    setNumber(served ? servedVersion(model, served) : number);
  };
  const drift = jobs.flatMap((one) => driftOf(one.value?.serving, model.name));
  return (
    <div class="stack">
      <Head model={model} />
      <Versions model={model} selected={version.version} onSelect={select} />
      <Try {...{ model, spec, version, served }} onReference={follow} />
      <Traffic name={model.name} servedBy={model.served_by} jobs={jobs} />
      <DriftTables found={drift} />
      <Evaluated key={version.checkpoint} version={version} data={spec?.data ?? null} />
    </div>
  );
}

/** The version that answers requests or will, else the one in production, else the newest. */
function firstShown(model: Model) {
  const served = model.served_by.find((one) => one.version !== null) ?? model.served_by[0];
  const wanted = (served && servedVersion(model, served)) ?? model.aliases["production"];
  return model.versions.find((one) => one.version === wanted) ?? model.versions[0]!;
}

function Head({ model }: { model: Model }) {
  const { route } = useLocation();
  const remove = async () => {
    const gone = await notify(ask(`models/${model.name}`, { method: "DELETE" }), `Deleted ${model.name}.`);
    if (gone) route("/models");
    refresh("models?");
  };
  return (
    <div class="head">
      <div class="spread">
        <h1>{model.name}</h1>
        <Confirm word="Delete" label={`Delete the model ${model.name}`} question={`Delete ${model.name} with its ${count(model.num_versions)} ${model.num_versions === 1 ? "version" : "versions"} and aliases? The checkpoints are kept.`} act={remove} />
      </div>
      <dl class="figures">
        <div><dt>newest version</dt><dd>{model.latest}</dd></div>
        <div><dt>aliases</dt><dd>{Object.entries(model.aliases).map(([name, version]) => `${name} ${version}`).join(", ") || "none"}</dd></div>
        <div><dt>created</dt><dd title={model.created_at}>{ago(model.created_at)}</dd></div>
        <div><dt>changed</dt><dd title={model.updated_at}>{ago(model.updated_at)}</dd></div>
      </dl>
    </div>
  );
}
