// The predicted classes of rows with their probabilities, and compared with a column of the data, the mistakes.
import type { Ref } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { get, Problem, withQuery } from "../../../api/http";
import { useLive } from "../../../api/live";
import type { Page } from "../../../api/types";
import { count, percent } from "../../../format";
import { Loading, ProblemBox } from "../../../ui/state";
import type { Column } from "../../../spec/suggest";
import { OneRow, identifying } from "../../datasets/rows";
import { Labelled, useVisible } from "../charts/chart";
import { type Confusion, confusion, worstFirst } from "./confusion";

const PAGE = 50;
const ROWS = 1000;
const MOST_CLASSES = 40;

/** The split of the predicted rows, if they are all its rows in order. */
export interface Source {
  dataset: string;
  split: string;
}

interface Dataset { columns: Column[]; splits: Record<string, number> }
/** The name of a class. */
type ClassName = (id: number) => string;
interface Selection { truth: number | null; id: number | null }

interface Predicted {
  ids: readonly number[];
  probs: readonly number[] | null;
  source: Source | null;
  /** The names of the classes by number; null: the numbers are the names. */
  names: readonly string[] | null;
  /** The column with the true class on which the network was trained. */
  label: string;
}

export function Classes({ ids, probs, source, names, label }: Predicted) {
  const [selected, setColumn] = useState<string | null>(null);
  const [selection, setSelection] = useState<Selection>({ truth: null, id: null });
  const dataset = useLive<Dataset>(source && `datasets/${source.dataset}`, Infinity).value;
  const column = selected ?? (comparable(dataset?.columns ?? [], names).includes(label) ? label : "");
  const { truth, problem, loading } = useLabels(source, column, ids.length, names);
  const known = source && dataset?.splits[source.split] === ids.length ? { ...source, columns: dataset.columns, column } : null;
  const matrix = useMemo(() => (truth ? confusion(truth, ids) : null), [truth, ids]);
  const order = useMemo(() => worstFirst(truth, ids, probs), [truth, ids, probs]);
  const fits = (row: number) => (selection.id === null || ids[row] === selection.id) && (selection.truth === null || truth?.[row] === selection.truth);
  const called = (id: number) => names?.[id] ?? (id === OTHER ? "other" : String(id));
  return (
    <>
      {known && <Columns names={comparable(known.columns, names)} column={column} onColumn={(name) => (setColumn(name), setSelection({ truth: null, id: null }))} />}
      {problem && <ProblemBox problem={problem} />}
      {loading && <Loading what="Loading the column" />}
      {matrix && <p><b>{percent(matrix.right / matrix.total, 2)}</b> correct: {count(matrix.right)} of {count(matrix.total)} rows</p>}
      {matrix && matrix.classes.length <= MOST_CLASSES && <Matrix matrix={matrix} called={called} selection={selection} onSelect={setSelection} />}
      {!matrix && <Totals ids={ids} called={called} selection={selection} onSelect={setSelection} />}
      <Rows key={`${selection.truth} ${selection.id} ${column}`} rows={order.filter(fits)} ids={ids} probs={probs} truth={truth} known={known} called={called} />
    </>
  );
}

/** A true class that the network does not have. */
const OTHER = -1;

/** The columns that may hold the true class: one integer per row, or a string if the classes have names. */
function comparable(columns: readonly Column[], names: readonly string[] | null): string[] {
  const fits = (dtype: string) => /^u?int/.test(dtype) || (names !== null && dtype === "string");
  return columns.filter((one) => fits(one.dtype) && one.shape.length === 0).map((one) => one.name);
}

function Columns({ names, column, onColumn }: { names: string[]; column: string; onColumn(name: string): void }) {
  if (!names.length) return null;
  return (
    <div class="row">
      <Labelled name="compare with column">
        <select value={column} onChange={(event) => onColumn(event.currentTarget.value)}>
          <option value="">none</option>
          {names.map((name) => <option key={name} value={name}>{name}</option>)}
        </select>
      </Labelled>
    </div>
  );
}

/** The values of a column of a split, read page by page. */
function useLabels(source: Source | null, column: string, rows: number, names: readonly string[] | null) {
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

function Totals({ ids, called, selection, onSelect }: { ids: readonly number[]; called: ClassName; selection: Selection; onSelect(selection: Selection): void }) {
  const totals = new Map<number, number>();
  for (const id of ids) totals.set(id, (totals.get(id) ?? 0) + 1);
  const sorted = [...totals].sort((a, b) => a[0] - b[0]);
  if (sorted.length > MOST_CLASSES) return <p class="muted">{count(sorted.length)} classes.</p>;
  return (
    <div class="row" role="group" aria-label="Classes">
      <button aria-pressed={selection.id === null} onClick={() => onSelect({ truth: null, id: null })}>all {count(ids.length)}</button>
      {sorted.map(([id, total]) => <button key={id} aria-pressed={selection.id === id} onClick={() => onSelect({ truth: null, id })}>class {called(id)}: {count(total)}</button>)}
    </div>
  );
}

/** The confusion matrix; a click on a cell shows its rows. */
function Matrix({ matrix, called, selection, onSelect }: { matrix: Confusion; called: ClassName; selection: Selection; onSelect(selection: Selection): void }) {
  const most = Math.max(...matrix.counts.flat(), 1);
  const isOn = (truth: number, id: number) => selection.truth === truth && selection.id === id;
  return (
    <div class="table">
      <table class="confusion">
        <caption>Rows: true class. Columns: predicted class. Click a cell to see its rows.</caption>
        <thead><tr><td />{matrix.classes.map((id) => <th key={id} scope="col">{called(id)}</th>)}</tr></thead>
        <tbody>
          {matrix.classes.map((truth, row) => (
            <tr key={truth}>
              <th scope="row">{called(truth)}</th>
              {matrix.classes.map((id, at) => {
                const total = matrix.counts[row]![at]!;
                const part = Math.round((total / most) * 45);
                return (
                  <td key={id} style={{ background: `color-mix(in srgb, var(${truth === id ? "--good" : "--bad"}) ${part}%, transparent)` }}>
                    {total === 0 ? <span class="muted">0</span> : (
                      <button class="plain" aria-pressed={isOn(truth, id)} aria-label={`${count(total)} of class ${called(truth)} predicted as ${called(id)}`}
                        onClick={() => onSelect(isOn(truth, id) ? { truth: null, id: null } : { truth, id })}>{count(total)}</button>
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
  return <td ref={place as Ref<HTMLTableCellElement>}><OneRow id={dataset} split={split} columns={columns} shown={identifying(columns, column)} row={row} visible={wasSeen.current} /></td>;
}

/** The data of the predicted rows; `column` holds their true class. */
interface Known extends Source {
  columns: Column[];
  column: string;
}

function Rows({ rows, ids, probs, truth, known, called }: { rows: readonly number[]; called: ClassName; ids: readonly number[]; probs: readonly number[] | null; truth: readonly number[] | null; known: Known | null }) {
  const [page, setPage] = useState(0);
  const pages = Math.max(1, Math.ceil(rows.length / PAGE));
  return (
    <>
      <div class="table"><table class="predicted">
        <caption class="only-readers">{truth ? "Rows, most confident mistakes first" : probs ? "Rows, least confident first" : "Rows"}</caption>
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
          <button disabled={page === 0} onClick={() => setPage(page - 1)}>Previous</button>
          <span>{page + 1} of {pages}</span>
          <button disabled={page >= pages - 1} onClick={() => setPage(page + 1)}>Next</button>
        </p>
      )}
    </>
  );
}
