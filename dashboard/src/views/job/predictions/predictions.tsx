// The results of an inference job: its files, and the predicted classes with their probabilities.
import { useMemo } from "preact/hooks";

import { useLive } from "../../../api/live";
import { ended, type Job, num, type Number, type Page } from "../../../api/types";
import { bytes, figure } from "../../../format";
import { Empty, Loading, ProblemBox } from "../../../ui/state";
import { Classes, type Source } from "./classes";
import { pollEvery } from "../data";
import { Failure } from "../logs/failure";

interface Artifact { name: string; media_type: string; size_bytes: number; href: string }
interface Tensor { dtype: string; shape: number[]; data: unknown; column?: string }

interface Spec { data?: { dataset?: string; split?: string; fraction?: unknown } | null }

/** The split of the rows; null if they are not a whole split in order. */
function sourceOf(spec: Spec | null): Source | null {
  const { dataset, split, fraction } = spec?.data ?? {};
  return dataset && split && !fraction ? { dataset, split } : null;
}

export function Predictions({ job }: { job: Job }) {
  const files = useLive<Page<Artifact>>(`jobs/${job.id}/artifacts`, pollEvery(job, 3));
  const source = sourceOf(useLive<Spec>(`jobs/${job.id}/spec?resolved=true`, Infinity).value);
  const layers = useMemo(() => layersOf(job.result), [job.result]);
  if (!files.value) return files.problem ? <ProblemBox problem={files.problem} /> : <Loading what="Loading the results" />;
  const none = !files.value.data.length && !layers.length;
  return (
    <div class="stack">
      <Failure job={job} />
      {none && <Empty><p>{ended(job) ? "No results." : "Results are shown when the job has ended."}</p></Empty>}
      <Files files={files.value.data} />
      {files.value.data.length > 0 && !layers.length && <p class="muted">The results are too large to show here. Download the files.</p>}
      {layers.map(({ layer, fields }) => <Layer key={layer} layer={layer} fields={fields} source={source} />)}
    </div>
  );
}

/** The files of a job. */
export function ResultFiles({ job }: { job: Job }) {
  const files = useLive<Page<Artifact>>(`jobs/${job.id}/artifacts`, pollEvery(job, 3));
  return <Files files={files.value?.data ?? []} />;
}

function Files({ files }: { files: readonly Artifact[] }) {
  if (!files.length) return null;
  return (
    <section class="card" aria-label="Files">
      <h2>Files</h2>
      <div class="table"><table>
        <thead><tr><th scope="col">name</th><th scope="col">type</th><th scope="col" class="number">size</th></tr></thead>
        <tbody>{files.map((one) => <tr key={one.name}><th scope="row"><a href={one.href} download>{one.name}</a></th><td>{one.media_type}</td><td class="number">{bytes(one.size_bytes)}</td></tr>)}</tbody>
      </table></div>
    </section>
  );
}

/** The tensors of a result by layer; joined outputs have no layer. */
function layersOf(result: unknown): { layer: string; fields: Record<string, Tensor> }[] {
  if (typeof result !== "object" || result === null) return [];
  const entries = Object.entries(result as Record<string, Record<string, Tensor> | Tensor>);
  const joined = Object.fromEntries(entries.filter((one): one is [string, Tensor] => isTensor(one[1])));
  const layers = entries.flatMap(([layer, fields]) => (isTensor(fields) ? [] : [{ layer, fields }]));
  return Object.keys(joined).length ? [{ layer: "all outputs", fields: joined }, ...layers] : layers;
}

function isTensor(value: Record<string, Tensor> | Tensor): value is Tensor {
  return "dtype" in value && "shape" in value && "data" in value;
}

function Layer({ layer, fields, source }: { layer: string; fields: Record<string, Tensor>; source: Source | null }) {
  const [ids, probs] = [fields["id"], fields["prob"]];
  const classes = ids?.shape.length === 1 ? (ids.data as number[]) : null;
  const known = fields["classes"];
  const names = known?.dtype === "string" ? (known.data as string[]) : null;
  const others = Object.entries(fields).filter(([name]) => !(classes && ["id", "prob", "class", "classes"].includes(name)));
  return (
    <section class="card stack" aria-label={layer}>
      <h2>{layer}</h2>
      {classes && <Classes ids={classes} probs={probs?.shape.length === 1 ? (probs.data as Number[]).map((one) => num(one)!) : null} source={source} names={names} label={known?.column ?? ""} />}
      {others.map(([name, tensor]) => <Plain key={name} name={name} tensor={tensor} />)}
    </section>
  );
}

const SOME = 20;

function Plain({ name, tensor }: { name: string; tensor: Tensor }) {
  const flat = [tensor.data].flat(Infinity) as Number[];
  return (
    <p>
      <b>{name}</b> <span class="muted">{tensor.dtype} {JSON.stringify(tensor.shape)}</span>{" "}
      <code>{flat.slice(0, SOME).map((one) => figure(num(one))).join(", ")}{flat.length > SOME ? " …" : ""}</code>
    </p>
  );
}
