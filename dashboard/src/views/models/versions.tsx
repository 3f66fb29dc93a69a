// The versions of a model: what each is, its aliases, and what serves it.
import { useState } from "preact/hooks";

import { ask } from "../../api/http";
import { refresh } from "../../api/live";
import { type Model, type ModelVersion, num, type Number } from "../../api/types";
import { ago, count, figure } from "../../format";
import { Confirm } from "../../ui/confirm";
import { Scroll } from "../../ui/scroll";
import { notify } from "../../ui/toast";
import { Dialog, Ending } from "../job/actions/dialog";

const METRICS = 3;

interface Shown { model: Model; selected: number; onSelect(version: number): void }

export function Versions({ model, selected, onSelect }: Shown) {
  const [named, setNamed] = useState<ModelVersion | null>(null);
  const names = metricsOf(model.versions);
  return (
    <section class="card" aria-label="Versions">
      <h2>Versions</h2>
      <Scroll label="Versions">
        <table class="versions">
          <caption class="only-readers">Versions, newest first</caption>
          <thead><tr><th scope="col" class="number">Version</th><th scope="col">Aliases</th><th scope="col">Trained by</th><th scope="col" class="number">Step</th>{names.map((name) => <th key={name} scope="col" class="number">{name}</th>)}<th scope="col">Served by</th><th scope="col">Published</th><th scope="col">Actions</th></tr></thead>
          <tbody>{model.versions.map((one) => <Line key={one.version} {...{ model, version: one, names, onSelect }} isSelected={one.version === selected} onAlias={() => setNamed(one)} />)}</tbody>
        </table>
      </Scroll>
      {named && <Alias model={model} version={named} onClose={() => setNamed(null)} />}
    </section>
  );
}

/** A few metrics of the checkpoints, those of validation first. */
function metricsOf(versions: readonly ModelVersion[]): string[] {
  const names = [...new Set(versions.flatMap((one) => Object.keys(one.metrics)))];
  const isOfTraining = (name: string) => !name.includes("/") && name !== "lr"; // not system/…, padding/…
  return [...names.filter((name) => name.startsWith("validation/")), ...names.filter(isOfTraining)].slice(0, METRICS);
}

interface OfVersion { model: Model; version: ModelVersion; names: string[]; isSelected: boolean; onSelect(version: number): void; onAlias(): void }

function Line({ model, version, names, isSelected, onSelect, onAlias }: OfVersion) {
  const served = model.served_by.filter((one) => one.version === version.version);
  return (
    <tr>
      <th scope="row" class="number"><button class="small" aria-pressed={isSelected} aria-label={`Show version ${version.version}`} onClick={() => onSelect(version.version)}>{version.version}</button>{version.state === "damaged" && <div class="badge bad">✕ damaged</div>}</th>
      <td><span class="row">{version.aliases.length ? version.aliases.map((one) => <span key={one} class="chip">{one}</span>) : <span class="muted">–</span>}</span></td>
      <td class="nowrap">{version.job ? <a href={`/jobs/${version.job}`} title={version.job}>{shortened(version.job)}</a> : "uploaded"}<div class="muted small mono" title={version.checkpoint}>{shortened(version.checkpoint)}</div></td>
      <td class="number">{count(version.step)}</td>
      {names.map((name) => <td key={name} class="number">{figure(num(version.metrics[name] as Number | undefined))}</td>)}
      <td class="nowrap">{served.length ? [...new Set(served.map((one) => one.job))].map((job) => <div key={job}><a href={`/jobs/${job}`} title={job}>{shortened(job)}</a></div>) : <span class="muted">–</span>}</td>
      <td class="nowrap" title={version.created_at}>{ago(version.created_at)}{version.created_by && <div class="muted">by {version.created_by}</div>}</td>
      <td>
        <span class="row" style={{ flexWrap: "nowrap" }}>
          <button class="small" aria-label={`Aliases of version ${version.version}`} onClick={onAlias}>Aliases</button>
          {version.aliases.length === 0 && model.num_versions > 1 && <Deletion model={model} version={version} />}
        </span>
      </td>
    </tr>
  );
}

/** The type and the end of an id: its beginning is the time. */
const shortened = (id: string) => `${id.slice(0, id.indexOf("_") + 1)}…${id.slice(-6)}`;

function Deletion({ model, version }: { model: Model; version: ModelVersion }) {
  const remove = async () => {
    await notify(ask(`models/${model.name}/versions/${version.version}`, { method: "DELETE" }), `Deleted ${model.name}:${version.version}.`);
    refresh(`models/${model.name}`);
  };
  return <Confirm word="Delete" label={`Delete version ${version.version}`} question={`Delete version ${version.version} of ${model.name}? Its checkpoint is kept; the number is not used again.`} act={remove} />;
}

/** Set, move and remove the aliases of a version. */
function Alias({ model, version, onClose }: { model: Model; version: ModelVersion; onClose(): void }) {
  const [name, setName] = useState("");
  const [busy, setBusy] = useState(false);
  const typed = name.trim();
  const before = model.aliases[typed];
  const change = async (aliases: Record<string, number | null>, done: string) => {
    setBusy(true);
    const changed = await notify(ask(`models/${model.name}`, { method: "PATCH", body: { aliases }, headers: { "Content-Type": "application/merge-patch+json" } }), done);
    refresh(`models/${model.name}`);
    setBusy(false);
    if (changed) onClose();
  };
  const set = (event: Event) => {
    event.preventDefault();
    if (typed) void change({ [typed]: version.version }, `${typed} names version ${version.version} now.`);
  };
  return (
    <Dialog title={`Aliases of version ${version.version}`} onClose={onClose}>
      {version.aliases.map((one) => (
        <div key={one} class="spread"><span class="chip">{one}</span>
          <button type="button" class="danger small" disabled={busy} aria-label={`Remove the alias ${one}`} onClick={() => change({ [one]: null }, `Removed the alias ${one}.`)}>Remove</button></div>
      ))}
      <form onSubmit={set}>
        <label class="field"><span>Alias</span><input value={name} list="aliases-of-model" autocomplete="off" spellcheck={false} placeholder="production" onInput={(event) => setName(event.currentTarget.value)} /></label>
        <datalist id="aliases-of-model">{Object.keys(model.aliases).filter((one) => !version.aliases.includes(one)).map((one) => <option key={one} value={one} />)}</datalist>
        <p class="muted">{before !== undefined && before !== version.version ? `It moves from version ${before}. Jobs that serve ${model.name}@${typed} load version ${version.version} while they answer with version ${before}.` : "Jobs refer to the version by the alias, and follow it when it moves."}</p>
        <Ending does={before !== undefined && before !== version.version ? "Move alias" : "Set alias"} busy={busy || !typed} onClose={onClose} />
      </form>
    </Dialog>
  );
}
