// What an inference gave: its files, and where classes were asked for, which and how sure.
import { useMemo, useState } from "preact/hooks";

import { useLive } from "../../api/live";
import { ended, type Job, num, type Number, type Page } from "../../api/types";
import { bytes, count, figure, percent } from "../../format";
import { Empty, Loading, ProblemBox } from "../../ui/state";
import { pace } from "./data";
import { Failure } from "./failure";

interface Artifact { name: string; media_type: string; size_bytes: number; href: string }
interface Tensor { dtype: string; shape: number[]; data: unknown }

const PAGE = 50;

export function Predictions({ job }: { job: Job }) {
  const files = useLive<Page<Artifact>>(`jobs/${job.id}/artifacts`, pace(job, 3));
  const layers = useMemo(() => layersOf(job.result), [job.result]);
  if (!files.value) return files.problem ? <ProblemBox problem={files.problem} /> : <Loading what="Reading the results" />;
  const none = !files.value.data.length && !layers.length;
  return (
    <div class="stack">
      <Failure job={job} />
      {none && <Empty><p>{ended(job) ? "It has no results." : "Its results come when it has ended."}</p></Empty>}
      <Files files={files.value.data} />
      {files.value.data.length > 0 && !layers.length && <p class="muted">The results are too large to be shown here: they are in the files.</p>}
      {layers.map(({ layer, fields }) => <Layer key={layer} layer={layer} fields={fields} />)}
    </div>
  );
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

/** The tensors of a result by layer; one that was joined has no layer. */
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

function Layer({ layer, fields }: { layer: string; fields: Record<string, Tensor> }) {
  const [ids, probs] = [fields["id"], fields["prob"]];
  const classes = ids?.shape.length === 1 ? (ids.data as number[]) : null;
  const others = Object.entries(fields).filter(([name]) => !(classes && (name === "id" || name === "prob")));
  return (
    <section class="card stack" aria-label={layer}>
      <h2>{layer}</h2>
      {classes && <Classes ids={classes} probs={probs?.shape.length === 1 ? (probs.data as Number[]).map((one) => num(one)!) : null} />}
      {others.map(([name, tensor]) => <Plain key={name} name={name} tensor={tensor} />)}
    </section>
  );
}

/** The rows by class, the least sure first: where to look. */
function Classes({ ids, probs }: { ids: readonly number[]; probs: readonly number[] | null }) {
  const [page, setPage] = useState(0);
  const [only, setOnly] = useState<number | null>(null);
  const totals = useMemo(() => tally(ids), [ids]);
  const order = useMemo(() => ids.map((_, row) => row).sort((a, b) => (probs ? probs[a]! - probs[b]! : 0) || a - b), [ids, probs]);
  const rows = only === null ? order : order.filter((row) => ids[row] === only);
  const pages = Math.max(1, Math.ceil(rows.length / PAGE));
  return (
    <>
      <div class="row" role="group" aria-label="Classes">
        <button aria-pressed={only === null} onClick={() => (setOnly(null), setPage(0))}>all {count(ids.length)}</button>
        {totals.map(([id, total]) => <button key={id} aria-pressed={only === id} onClick={() => (setOnly(id), setPage(0))}>class {id}: {count(total)}</button>)}
      </div>
      <div class="table"><table>
        <caption class="only-readers">Rows{probs ? ", the least sure first" : ""}</caption>
        <thead><tr><th scope="col" class="number">row</th><th scope="col" class="number">class</th>{probs && <th scope="col" class="number">probability</th>}</tr></thead>
        <tbody>{rows.slice(page * PAGE, (page + 1) * PAGE).map((row) => <tr key={row}><th scope="row" class="number">{row}</th><td class="number">{ids[row]}</td>{probs && <td class="number">{percent(probs[row], 2)}</td>}</tr>)}</tbody>
      </table></div>
      {pages > 1 && (
        <p class="row">
          <button disabled={page === 0} onClick={() => setPage(page - 1)}>Before</button>
          <span>{page + 1} of {pages}</span>
          <button disabled={page >= pages - 1} onClick={() => setPage(page + 1)}>Next</button>
        </p>
      )}
    </>
  );
}

function tally(ids: readonly number[]): [number, number][] {
  const totals = new Map<number, number>();
  for (const id of ids) totals.set(id, (totals.get(id) ?? 0) + 1);
  return [...totals].sort((a, b) => a[0] - b[0]);
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
