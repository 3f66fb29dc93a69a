// The classes that a network gave to rows: how sure it was, and against a column of the data, which were wrong.
import type { Ref } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { get, Problem, withQuery } from "../../api/http";
import { useLive } from "../../api/live";
import type { Page } from "../../api/types";
import { count, percent } from "../../format";
import { Loading, ProblemBox } from "../../ui/state";
import type { Column } from "../../spec/suggest";
import { OneRow, telling } from "../datasets/rows";
import { Labelled, useVisible } from "./chart";
import { type Confusion, confusion, worstFirst } from "./confusion";

const PAGE = 50;
const ROWS = 1000;
const MOST_CLASSES = 40;

/** The rows that were predicted, where they are all rows of a split in their order. */
export interface Source {
  dataset: string;
  split: string;
}

interface Dataset { columns: Column[]; splits: Record<string, number> }
/** What a class is called. */
type Called = (id: number) => string;
interface Chosen { truth: number | null; id: number | null }

interface Predicted {
  ids: readonly number[];
  probs: readonly number[] | null;
  source: Source | null;
  /** What the classes are called, by their numbers; null: by these numbers. */
  names: readonly string[] | null;
  /** The column that has the true class where the network was trained. */
  label: string;
}

export function Classes({ ids, probs, source, names, label }: Predicted) {
  const [selected, setColumn] = useState<string | null>(null);
  const [chosen, setChosen] = useState<Chosen>({ truth: null, id: null });
  const dataset = useLive<Dataset>(source && `datasets/${source.dataset}`, Infinity).value;
  const column = selected ?? (comparable(dataset?.columns ?? [], names).includes(label) ? label : "");
  const { truth, problem, loading } = useTruth(source, column, ids.length, names);
  const known = source && dataset?.splits[source.split] === ids.length ? { ...source, columns: dataset.columns, column } : null;
  const told = useMemo(() => (truth ? confusion(truth, ids) : null), [truth, ids]);
  const order = useMemo(() => worstFirst(truth, ids, probs), [truth, ids, probs]);
  const fits = (row: number) => (chosen.id === null || ids[row] === chosen.id) && (chosen.truth === null || truth?.[row] === chosen.truth);
  const called = (id: number) => names?.[id] ?? (id === OTHER ? "another" : String(id));
  return (
    <>
      {known && <Columns names={comparable(known.columns, names)} column={column} onColumn={(name) => (setColumn(name), setChosen({ truth: null, id: null }))} />}
      {problem && <ProblemBox problem={problem} />}
      {loading && <Loading what="Reading the column" />}
      {told && <p><b>{percent(told.right / told.total, 2)}</b> right: {count(told.right)} of {count(told.total)} rows</p>}
      {told && told.classes.length <= MOST_CLASSES && <Matrix told={told} called={called} chosen={chosen} onChoose={setChosen} />}
      {!told && <Totals ids={ids} called={called} chosen={chosen} onChoose={setChosen} />}
      <Rows key={`${chosen.truth} ${chosen.id} ${column}`} rows={order.filter(fits)} ids={ids} probs={probs} truth={truth} known={known} called={called} />
    </>
  );
}

/** A true class that the network does not know. */
const OTHER = -1;

/** The columns that may say what is true: one whole number a row, or a text where the classes have names. */
function comparable(columns: readonly Column[], names: readonly string[] | null): string[] {
  const fits = (dtype: string) => /^u?int/.test(dtype) || (names !== null && dtype === "string");
  return columns.filter((one) => fits(one.dtype) && one.shape.length === 0).map((one) => one.name);
}

function Columns({ names, column, onColumn }: { names: string[]; column: string; onColumn(name: string): void }) {
  if (!names.length) return null;
  return (
    <div class="row">
      <Labelled name="compare with the column">
        <select value={column} onChange={(event) => onColumn(event.currentTarget.value)}>
          <option value="">none</option>
          {names.map((name) => <option key={name} value={name}>{name}</option>)}
        </select>
      </Labelled>
    </div>
  );
}

/** The values of a column of a split, read page by page. */
function useTruth(source: Source | null, column: string, rows: number, names: readonly string[] | null) {
  const [state, setState] = useState<{ column: string; truth: number[] | null; problem: Problem | null }>({ column: "", truth: null, problem: null });
  useEffect(() => {
    if (!source || !column) return;
    const asked = new AbortController();
    readColumn(source, column, rows, asked.signal)
      .then((values) => setState({ column, truth: values.map((one) => placeOf(one, names)), problem: null }))
      .catch((problem: Problem) => asked.signal.aborted || setState({ column, truth: null, problem }));
    return () => asked.abort();
  }, [source?.dataset, source?.split, column, rows, names?.join("\n")]);
  const mine = state.column === column;
  return { truth: mine && column ? state.truth : null, problem: mine ? state.problem : null, loading: column !== "" && !mine };
}

/** The number of a true class. */
function placeOf(value: number | string, names: readonly string[] | null): number {
  return typeof value === "number" ? value : (names?.indexOf(value) ?? OTHER);
}

async function readColumn({ dataset, split }: Source, column: string, rows: number, signal: AbortSignal): Promise<(number | string)[]> {
  const found: (number | string)[] = [];
  while (found.length < rows) {
    const path = withQuery(`datasets/${dataset}/rows`, { split, offset: found.length, limit: ROWS });
    const page = await get<Page<Record<string, number | string>>>(path, { signal });
    found.push(...page.data.map((row) => row[column]!));
    if (!page.has_more) break;
  }
  if (found.length !== rows) throw new Problem(0, "other_rows", `The split has ${count(found.length)} rows, the result ${count(rows)}.`);
  return found;
}

function Totals({ ids, called, chosen, onChoose }: { ids: readonly number[]; called: Called; chosen: Chosen; onChoose(chosen: Chosen): void }) {
  const totals = new Map<number, number>();
  for (const id of ids) totals.set(id, (totals.get(id) ?? 0) + 1);
  const sorted = [...totals].sort((a, b) => a[0] - b[0]);
  if (sorted.length > MOST_CLASSES) return <p class="muted">{count(sorted.length)} classes.</p>;
  return (
    <div class="row" role="group" aria-label="Classes">
      <button aria-pressed={chosen.id === null} onClick={() => onChoose({ truth: null, id: null })}>all {count(ids.length)}</button>
      {sorted.map(([id, total]) => <button key={id} aria-pressed={chosen.id === id} onClick={() => onChoose({ truth: null, id })}>class {called(id)}: {count(total)}</button>)}
    </div>
  );
}

/** How many rows of each true class got which; a cell shows its rows. */
function Matrix({ told, called, chosen, onChoose }: { told: Confusion; called: Called; chosen: Chosen; onChoose(chosen: Chosen): void }) {
  const most = Math.max(...told.counts.flat(), 1);
  const isOn = (truth: number, id: number) => chosen.truth === truth && chosen.id === id;
  return (
    <div class="table">
      <table class="confusion">
        <caption>Rows: what is true; columns: what was predicted. Choose a cell to see its rows.</caption>
        <thead><tr><td />{told.classes.map((id) => <th key={id} scope="col">{called(id)}</th>)}</tr></thead>
        <tbody>
          {told.classes.map((truth, row) => (
            <tr key={truth}>
              <th scope="row">{called(truth)}</th>
              {told.classes.map((id, at) => {
                const total = told.counts[row]![at]!;
                const part = Math.round((total / most) * 45);
                return (
                  <td key={id} style={{ background: `color-mix(in srgb, var(${truth === id ? "--good" : "--bad"}) ${part}%, transparent)` }}>
                    {total === 0 ? <span class="muted">0</span> : (
                      <button class="plain" aria-pressed={isOn(truth, id)} aria-label={`${count(total)} of class ${called(truth)} predicted as ${called(id)}`}
                        onClick={() => onChoose(isOn(truth, id) ? { truth: null, id: null } : { truth, id })}>{count(total)}</button>
                    )}
                  </td>
                );
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Data({ known, row }: { known: Known; row: number }) {
  const [place, visible] = useVisible();
  const wasSeen = useRef(false);
  wasSeen.current ||= visible;
  const { dataset, split, columns, column } = known;
  return <td ref={place as Ref<HTMLTableCellElement>}><OneRow id={dataset} split={split} columns={columns} shown={telling(columns, column)} row={row} visible={wasSeen.current} /></td>;
}

/** The data that was predicted, row by row; ``column`` says what is true of it. */
interface Known extends Source {
  columns: Column[];
  column: string;
}

function Rows({ rows, ids, probs, truth, known, called }: { rows: readonly number[]; called: Called; ids: readonly number[]; probs: readonly number[] | null; truth: readonly number[] | null; known: Known | null }) {
  const [page, setPage] = useState(0);
  const pages = Math.max(1, Math.ceil(rows.length / PAGE));
  return (
    <>
      <div class="table"><table class="predicted">
        <caption class="only-readers">{truth ? "Rows, the wrong and surest first" : probs ? "Rows, the least sure first" : "Rows"}</caption>
        <thead><tr><th scope="col" class="number">row</th><th scope="col" class="number">class</th>{truth && <th scope="col" class="number">true</th>}{probs && <th scope="col" class="number">probability</th>}{known && <th scope="col">data</th>}</tr></thead>
        <tbody>{rows.slice(page * PAGE, (page + 1) * PAGE).map((row) => (
          <tr key={row}>
            <th scope="row" class="number">{row}</th>
            <td class="number">{called(ids[row]!)}</td>
            {truth && <td class="number">{truth[row] === ids[row] ? called(truth[row]!) : <span class="badge bad">✕ {called(truth[row]!)}</span>}</td>}
            {probs && <td class="number">{percent(probs[row], 2)}</td>}
            {known && <Data known={known} row={row} />}
          </tr>
        ))}</tbody>
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
