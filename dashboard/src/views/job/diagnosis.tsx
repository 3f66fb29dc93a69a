// The result of a diagnose job: the verdict, what was found, and what was measured.
import { ended, type Job } from "../../api/types";
import { bytes, figure } from "../../format";
import { Scroll } from "../../ui/scroll";
import { Empty } from "../../ui/state";
import { Failure } from "./logs/failure";

interface Measured { op: string; size_bytes: number; ranks: number[] | null; time_s: number; bandwidth_bytes_per_s: number; bus_bandwidth_bytes_per_s: number; correct: boolean }
interface Copy { rank: number; from: string; to: string; size_bytes: number; time_s: number; bandwidth_bytes_per_s: number; correct: boolean }
interface Finding { id: string; severity: "info" | "warning" | "problem"; summary: string; causes: { text: string }[]; remedies: { text: string }[] }
interface Result { verdict: string; findings: Finding[]; collectives: Measured[]; latency_s: Record<string, number>; memory: { copies: Copy[] }; versions: Record<string, string | null> }

export function Diagnosis({ job }: { job: Job }) {
  const result = job.result as Result | null | undefined;
  return (
    <div class="stack">
      <Failure job={job} />
      {result ? <Found result={result} /> : <Empty><p>{ended(job) ? "No result." : "The result is shown when the job has ended."}</p></Empty>}
    </div>
  );
}

function Found({ result }: { result: Result }) {
  return (
    <>
      <section class="card stack" aria-label="Verdict">
        <h2>Verdict</h2>
        <p>{result.verdict}</p>
        {result.findings.map((one) => <FindingLine key={one.id} finding={one} />)}
      </section>
      {result.collectives.length > 0 && <Collectives measured={result.collectives} />}
      <Copies copies={result.memory.copies} />
      <Versions versions={result.versions} />
    </>
  );
}

const SEVERITY: Record<Finding["severity"], string> = { info: "", warning: "warn", problem: "bad" };

function FindingLine({ finding }: { finding: Finding }) {
  return (
    <div>
      <span class={`badge ${SEVERITY[finding.severity]}`}>{finding.severity}</span> {finding.summary}
      <ul>{[...finding.causes, ...finding.remedies].map((one) => <li key={one.text}>{one.text}</li>)}</ul>
    </div>
  );
}

function Right({ correct }: { correct: boolean }) {
  return <span class={`badge ${correct ? "good" : "bad"}`}>{correct ? "correct" : "wrong"}</span>;
}

function micro(seconds: number): string {
  return `${figure(seconds * 1e6)} µs`;
}

function Collectives({ measured }: { measured: readonly Measured[] }) {
  return (
    <section class="card" aria-label="Messages">
      <h2>Messages</h2>
      <Scroll label="Messages">
        <table>
          <caption class="only-readers">Messages between the processes</caption>
          <thead><tr><th>Operation</th><th>Processes</th><th class="number">Size</th><th class="number">Time</th><th class="number">Bandwidth</th><th class="number">Bus bandwidth</th><th>Values</th></tr></thead>
          <tbody>
            {measured.map((one) => (
              <tr key={`${one.op} ${one.size_bytes} ${one.ranks}`}>
                <td class="mono">{one.op}</td>
                <td>{one.ranks ? one.ranks.join(" and ") : "all"}</td>
                <td class="number">{bytes(one.size_bytes)}</td>
                <td class="number">{micro(one.time_s)}</td>
                <td class="number">{bytes(one.bandwidth_bytes_per_s)}/s</td>
                <td class="number">{bytes(one.bus_bandwidth_bytes_per_s)}/s</td>
                <td><Right correct={one.correct} /></td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </section>
  );
}

function Copies({ copies }: { copies: readonly Copy[] }) {
  return (
    <section class="card" aria-label="Memory">
      <h2>Copies in memory</h2>
      <Scroll label="Copies in memory">
        <table>
          <caption class="only-readers">Copies in memory</caption>
          <thead><tr><th>Process</th><th>From</th><th>To</th><th class="number">Size</th><th class="number">Time</th><th class="number">Bandwidth</th><th>Values</th></tr></thead>
          <tbody>
            {copies.map((one) => (
              <tr key={`${one.rank} ${one.from} ${one.to}`}>
                <td>{one.rank}</td>
                <td>{one.from}</td>
                <td>{one.to}</td>
                <td class="number">{bytes(one.size_bytes)}</td>
                <td class="number">{micro(one.time_s)}</td>
                <td class="number">{bytes(one.bandwidth_bytes_per_s)}/s</td>
                <td><Right correct={one.correct} /></td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </section>
  );
}

function Versions({ versions }: { versions: Record<string, string | null> }) {
  return (
    <section class="card" aria-label="Versions">
      <h2>Versions</h2>
      <dl class="facts">
        {Object.entries(versions).flatMap(([name, version]) => (version ? [<dt key={name}>{name}</dt>, <dd key={`${name} is`}>{version}</dd>] : []))}
      </dl>
    </section>
  );
}
