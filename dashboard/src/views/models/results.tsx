// What a prediction says of one row: classes with probability bars, and other outputs as values.
import { useState } from "preact/hooks";

import { count, figure, percent } from "../../format";
import { type Answer, outputsOf, type Scored, scoresOf, valuesOf } from "./answers";

const TOP = 5;
const SOME = 20;

export function Results({ answer, row = 0 }: { answer: Answer; row?: number }) {
  return (
    <div class="stack" role="status" aria-label="Prediction">
      {outputsOf(answer).map((output) => {
        const scores = scoresOf(answer, output, row);
        return scores ? <Classes key={output} output={output} scores={scores} /> : <Values key={output} output={output} values={valuesOf(answer, output, row)} />;
      })}
      {(answer.non_finite ?? []).length > 0 && <p class="wrong">NaN or Inf in {answer.non_finite!.join(", ")}.</p>}
      <p class="muted">{answeredBy(answer)}</p>
    </div>
  );
}

/** "handwriting:2 answered in 12 ms (0.1 ms in the queue, 1.2 ms of computation)" */
export function answeredBy({ model, version, totalMs, queueMs, computeMs }: Answer): string {
  const parts = [queueMs !== null && `${figure(queueMs, 2)} ms in the queue`, computeMs !== null && `${figure(computeMs, 2)} ms of computation`].filter(Boolean);
  return `${model}:${version} answered in ${figure(totalMs, 3)} ms${parts.length ? ` (${parts.join(", ")})` : ""}.`;
}

function Classes({ output, scores }: { output: string; scores: readonly Scored[] }) {
  const [all, setAll] = useState(false);
  const best = scores[0]!;
  return (
    <div class="stack">
      <p><span class="muted">{output}</span> <strong class="big">{best.name}</strong> {percent(best.prob, 1)}</p>
      <table class="bars">
        <caption class="only-readers">Probabilities of {output}</caption>
        <tbody>
          {(all ? scores : scores.slice(0, TOP)).map((one) => (
            <tr key={one.name}>
              <th scope="row">{one.name}</th>
              <td class="wide"><i aria-hidden="true" style={{ width: `${100 * (one.prob ?? 0)}%` }} /></td>
              <td class="number">{percent(one.prob, 1)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {scores.length > TOP && <div><button type="button" class="small" aria-expanded={all} onClick={() => setAll(!all)}>{all ? `Show the top ${TOP}` : `Show all ${count(scores.length)}`}</button></div>}
    </div>
  );
}

function Values({ output, values }: { output: string; values: readonly number[] }) {
  const [all, setAll] = useState(false);
  return (
    <div>
      <p><span class="muted">{output}</span> <code>{(all ? values : values.slice(0, SOME)).map((one) => figure(one, 5)).join(", ")}{!all && values.length > SOME && " …"}</code></p>
      {values.length > SOME && <button type="button" class="small" aria-expanded={all} onClick={() => setAll(!all)}>{all ? "Show fewer" : `Show all ${count(values.length)}`}</button>}
    </div>
  );
}
