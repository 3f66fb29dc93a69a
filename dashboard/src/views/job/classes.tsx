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
interface Chosen { truth: number | null; id: number | null }

export function Classes({ ids, probs, source }: { ids: readonly number[]; probs: readonly number[] | null; source: Source | null }) {
  const [column, setColumn] = useState("");
  const [chosen, setChosen] = useState<Chosen>({ truth: null, id: null });
  const { truth, problem, loading } = useTruth(source, column, ids.length);
  const dataset = useLive<Dataset>(source && `datasets/${source.dataset}`, Infinity).value;
  const known = source && dataset?.splits[source.split] === ids.length ? { ...source, columns: dataset.columns, column } : null;
  const told = useMemo(() => (truth ? confusion(truth, ids) : null), [truth, ids]);
  const order = useMemo(() => worstFirst(truth, ids, probs), [truth, ids, probs]);
  const fits = (row: number) => (chosen.id === null || ids[row] === chosen.id) && (chosen.truth === null || truth?.[row] === chosen.truth);
  return (
    <>
      {known && <Columns columns={known.columns} column={column} onColumn={(name) => (setColumn(name), setChosen({ truth: null, id: null }))} />}
      {problem && <ProblemBox problem={problem} />}
      {loading && <Loading what="Reading the column" />}
      {told && <p><b>{percent(told.right / told.total, 2)}</b> right: {count(told.right)} of {count(told.total)} rows</p>}
      {told && told.classes.length <= MOST_CLASSES && <Matrix told={told} chosen={chosen} onChoose={setChosen} />}
      {!told && <Totals ids={ids} chosen={chosen} onChoose={setChosen} />}
      <Rows key={`${chosen.truth} ${chosen.id} ${column}`} rows={order.filter(fits)} ids={ids} probs={probs} truth={truth} known={known} />
    </>
  );
}

/** Which column says what is true: one whole number a row. */
function Columns({ columns, column, onColumn }: { columns: Column[]; column: string; onColumn(name: string): void }) {
  const names = columns.filter((one) => /^u?int/.test(one.dtype) && one.shape.length === 0).map((one) => one.name);
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
function useTruth(source: Source | null, column: string, rows: number) {
  const [state, setState] = useState<{ column: string; truth: number[] | null; problem: Problem | null }>({ column: "", truth: null, problem: null });
  useEffect(() => {
    if (!source || !column) return;
    const asked = new AbortController();
    readColumn(source, column, rows, asked.signal)
      .then((truth) => setState({ column, truth, problem: null }))
      .catch((problem: Problem) => asked.signal.aborted || setState({ column, truth: null, problem }));
    return () => asked.abort();
  }, [source?.dataset, source?.split, column, rows]);
  const mine = state.column === column;
  return { truth: mine && column ? state.truth : null, problem: mine ? state.problem : null, loading: column !== "" && !mine };
}

async function readColumn({ dataset, split }: Source, column: string, rows: number, signal: AbortSignal): Promise<number[]> {
  const found: number[] = [];
  while (found.length < rows) {
    const path = withQuery(`datasets/${dataset}/rows`, { split, offset: found.length, limit: ROWS });
    const page = await get<Page<Record<string, number>>>(path, { signal });
    found.push(...page.data.map((row) => row[column]!));
    if (!page.has_more) break;
  }
  if (found.length !== rows) throw new Problem(0, "other_rows", `The split has ${count(found.length)} rows, the result ${count(rows)}.`);
  return found;
}

function Totals({ ids, chosen, onChoose }: { ids: readonly number[]; chosen: Chosen; onChoose(chosen: Chosen): void }) {
  const totals = new Map<number, number>();
  for (const id of ids) totals.set(id, (totals.get(id) ?? 0) + 1);
  const sorted = [...totals].sort((a, b) => a[0] - b[0]);
  if (sorted.length > MOST_CLASSES) return <p class="muted">{count(sorted.length)} classes.</p>;
  return (
    <div class="row" role="group" aria-label="Classes">
      <button aria-pressed={chosen.id === null} onClick={() => onChoose({ truth: null, id: null })}>all {count(ids.length)}</button>
      {sorted.map(([id, total]) => <button key={id} aria-pressed={chosen.id === id} onClick={() => onChoose({ truth: null, id })}>class {id}: {count(total)}</button>)}
    </div>
  );
}

/** How many rows of each true class got which; a cell shows its rows. */
function Matrix({ told, chosen, onChoose }: { told: Confusion; chosen: Chosen; onChoose(chosen: Chosen): void }) {
  const most = Math.max(...told.counts.flat(), 1);
  const isOn = (truth: number, id: number) => chosen.truth === truth && chosen.id === id;
  return (
    <div class="table">
      <table class="confusion">
        <caption>Rows: what is true; columns: what was predicted. Choose a cell to see its rows.</caption>
        <thead><tr><td />{told.classes.map((id) => <th key={id} scope="col">{id}</th>)}</tr></thead>
        <tbody>
          {told.classes.map((truth, row) => (
            <tr key={truth}>
              <th scope="row">{truth}</th>
              {told.classes.map((id, at) => {
                const total = told.counts[row]![at]!;
                const part = Math.round((total / most) * 45);
                return (
                  <td key={id} style={{ background: `color-mix(in srgb, var(${truth === id ? "--good" : "--bad"}) ${part}%, transparent)` }}>
                    {total === 0 ? <span class="muted">0</span> : (
                      <button class="plain" aria-pressed={isOn(truth, id)} aria-label={`${count(total)} of class ${truth} predicted as ${id}`}
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

function Rows({ rows, ids, probs, truth, known }: { rows: readonly number[]; ids: readonly number[]; probs: readonly number[] | null; truth: readonly number[] | null; known: Known | null }) {
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
            <td class="number">{ids[row]}</td>
            {truth && <td class="number">{truth[row] === ids[row] ? truth[row] : <span class="badge bad">✕ {truth[row]}</span>}</td>}
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
