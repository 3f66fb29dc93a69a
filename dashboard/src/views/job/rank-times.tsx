// How long each process of a job takes for the parts of a step, and which one keeps the others waiting.
import { figure, percent } from "../../format";
import type { Metric } from "./data";
import { PARTS, type Part, type RankRow, rankRows, spread, straggler } from "./ranks";

const TITLES: Record<Part, string> = { data: "data", compute: "compute", collective: "collective", step: "step" };

export function RankTimes({ metrics }: { metrics: readonly Metric[] }) {
  const rows = rankRows(metrics);
  if (rows.length < 2) return null;
  const slow = straggler(rows);
  return (
    <section class="card stack" aria-label="Processes">
      <div class="spread">
        <h2>Processes</h2>
        {slow && <span class="badge warn">▲ rank {slow.rank} is slow</span>}
      </div>
      <div class="table">
        <table>
          <caption class="only-readers">Milliseconds per step of each process</caption>
          <thead><tr><th scope="col">ms per step</th>{PARTS.map((part) => <th key={part} scope="col" class="number">{TITLES[part]}</th>)}</tr></thead>
          <tbody>{rows.map((row) => <Row key={row.rank} row={row} isSlow={row.rank === slow?.rank} />)}</tbody>
          <tfoot>{(["min", "median", "max"] as const).map((name) => (
            <tr key={name} class="muted"><th scope="row">{name}</th>{PARTS.map((part) => <Cell key={part} seconds={spread(rows.map((row) => row.seconds[part] ?? NaN))[name]} />)}</tr>
          ))}</tfoot>
        </table>
      </div>
      <p class="muted">
        {slow ? `The others wait for rank ${slow.rank} for ${percent(slow.share)} of a step. ` : "No process keeps the others waiting for long. "}
        In collectives, a process waits for the slowest one, which has the smallest value there.
      </p>
    </section>
  );
}

function Row({ row, isSlow }: { row: RankRow; isSlow: boolean }) {
  return (
    <tr>
      <th scope="row" class="nowrap">rank {row.rank}{isSlow && " ▲ slow"}</th>
      {PARTS.map((part) => <Cell key={part} seconds={row.seconds[part]} />)}
    </tr>
  );
}

function Cell({ seconds }: { seconds: number | null }) {
  return <td class="number" data-value={seconds ?? undefined}>{figure(seconds === null ? null : 1000 * seconds, 3)}</td>;
}
