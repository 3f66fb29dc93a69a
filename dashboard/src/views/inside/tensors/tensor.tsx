// A captured tensor at a step: feature maps, filters, a matrix; its statistics, values and files.
import { useEffect, useMemo, useState } from "preact/hooks";

import { Grid, Legend } from "../../../charts/grid";
import { ask, BASE, Problem, withQuery } from "../../../api/http";
import { useLive } from "../../../api/live";
import { num, type Page } from "../../../api/types";
import { bytes, count, figure } from "../../../format";
import { useQuery } from "../../../query";
import { Loading, ProblemBox } from "../../../ui/state";
import { pathOf, type Summary, useCaptures } from "./captures";
import type { TensorProps } from "../statistics/statistics";
import { type Capture, kindName } from "../kinds";
import { useRank } from "../ranks";
import { BadFile, readNpy, type Tensor } from "./npy";
import { Scrubber } from "../statistics/scrubber";
import { placeOfStep } from "../statistics/histogram-axis";
import { stepOf } from "../statistics/steps";
import { selectedAxes, indexText, OF_BATCHES, rangeOf, sliceOf, tilesOf } from "./tiles";
import { Values } from "./values";
import { WatchThis } from "../probes/watch";

export function TensorView({ job, tensor, kind }: TensorProps) {
  const [query, change] = useQuery();
  const rank = useRank(job);
  const captures = useCaptures(job, tensor, kind, rank);
  const steps = useMemo(() => [...new Set(captures.rows.map((row) => row.step))].sort((a, b) => a - b), [captures.rows]);
  if (captures.problem && !captures.rows.length) return <ProblemBox problem={captures.problem} />;
  if (!captures.isRead) return <Loading what="Loading the captures" />;
  if (!steps.length) return <WatchThis job={job} tensor={tensor} kind={kind} want="full" every={50} rank={rank} what="No captured values" />;
  const step = stepOf(query.get("step"));
  const at = steps[placeOfStep(steps, step)]!;
  const capture = captures.rows.filter((row) => row.step === at).sort((a, b) => +(b.phase === "train") - +(a.phase === "train")).at(0)!;
  return (
    <div class="stack">
      <Scrubber steps={steps} step={step} what="Captured step" onStep={(one) => change({ step: one === null ? null : String(one) })} />
      <About capture={capture} />
      <Picture key={capture.shape.join(",")} capture={capture} />
      <Values capture={capture} />
    </div>
  );
}

function About({ capture }: { capture: Capture }) {
  const { value } = useLive<Summary>(pathOf(capture, {}), Infinity);
  const file = (format: string) => `${BASE}/${pathOf(capture, { format })}`;
  const name = `${capture.layer}-${capture.kind}-${capture.step}${capture.rank === null ? "" : `-rank${capture.rank}`}`;
  const part = capture.form === "full" ? "whole" : `${capture.form}${capture.slice ? ` [${capture.slice}]` : ""} of ${capture.captured_from.join(" × ")}`;
  return (
    <div class="card spread">
      <div>
        <p><b>{capture.shape.join(" × ") || "scalar"}</b> {capture.dtype}, {part}, {bytes(capture.size_bytes)}{capture.phase === "evaluate" && ", evaluation"}{capture.rank !== null && `, of rank ${capture.rank}`}</p>
        {value && <p class="muted" data-of="figures">{["mean", "std", "min", "max", "l2", "zeros", "nan", "inf"].map((one) => `${one} ${figure(num(value.stats[one]))}`).join(" · ")}</p>}
      </div>
      <span class="row">Download
        <a class="button" href={file("npy")} download={`${name}.npy`}>npy</a>
        <a class="button" href={file("safetensors")} download={`${name}.safetensors`}>safetensors</a>
        {capture.shape.length > 0 && <a class="button" href={file("png")} download={`${name}.png`}>png</a>}
      </span>
    </div>
  );
}

function Picture({ capture }: { capture: Capture }) {
  const [query, change] = useQuery();
  const axes = selectedAxes(capture.shape, capture.kind);
  const places = (query.get("at") ?? "").split(".").map(Number);
  const at = capture.shape.slice(0, axes).map((length, axis) => Math.max(0, Math.min(length - 1, places[axis] || 0)));
  const { slice, stride } = sliceOf(capture.shape, capture.kind, at);
  const { tensor, problem } = useNpy(pathOf(capture, { format: "npy", slice }));
  const apart = query.get("colors") === "apart";
  const tiles = useMemo(() => (tensor ? tilesOf(tensor) : null), [tensor]);
  const range = useMemo(() => (tensor ? rangeOf(tensor.values) : null), [tensor]);
  const choose = (axis: number, place: number) => change({ at: at.map((one, n) => (n === axis ? place : one)).join(".") });
  return (
    <section class="card stack">
      <div class="row">
        {at.map((place, axis) => <AxisChoice key={axis} name={OF_BATCHES.has(capture.kind) && axis === 0 ? "Example" : `Axis ${axis}`} length={capture.shape[axis]!} place={place} onChoose={(to) => choose(axis, to)} />)}
        {OF_BATCHES.has(capture.kind) && axes > 0 && <RowOf capture={capture} example={at[0]!} />}
        {tiles && tiles.starts.length > 1 && (
          <label class="field"><span>Colors</span>
            <select value={apart ? "apart" : "one"} onChange={(event) => change({ colors: event.currentTarget.value === "apart" ? "apart" : null })}>
              <option value="one">one scale</option>
              <option value="apart">one scale per image</option>
            </select>
          </label>
        )}
      </div>
      {problem ? <ProblemBox problem={problem} /> : !tensor || !tiles || !range ? <Loading what="Loading the tensor" /> : !tensor.values.length ? <p class="muted">The tensor is empty.</p> : (
        <>
          {!apart && <Legend low={range.low} high={range.high} />}
          <Grid tensor={tensor} tiles={tiles} apart={apart} indexText={(n) => indexText(tensor.shape, n, at, stride)} label={sentence(capture, tiles.starts.length, tiles.height, tiles.width, range)} />
          <p class="muted">
            {tiles.total > tiles.starts.length && `The first ${tiles.starts.length} of ${count(tiles.total)} images. `}
            {stride > 1 && `One of every ${stride} rows and columns is shown. `}
            {range.nan > 0 && <span data-of="nan"><span class="swatch-nan" aria-hidden="true" /> {count(range.nan)} NaN. </span>}
            {range.inf > 0 && <span data-of="inf"><span class="swatch-inf" aria-hidden="true" /> {count(range.inf)} Inf. </span>}
            {range.low < 0 ? "Blue is negative, red is positive." : "Lighter is larger."}
          </p>
        </>
      )}
    </section>
  );
}

function sentence(capture: Capture, number: number, height: number, width: number, range: ReturnType<typeof rangeOf>): string {
  const odd = range.nan + range.inf ? `, ${range.nan} NaN and ${range.inf} Inf` : "";
  return `${kindName(capture.kind)} of ${capture.layer} at step ${capture.step}: ${number} ${number === 1 ? "image" : "images"} of ${height} by ${width} values, up to ${figure(range.high)}${odd}`;
}

function AxisChoice({ name, length, place, onChoose }: { name: string; length: number; place: number; onChoose: (place: number) => void }) {
  return (
    <label class="field"><span>{name} (of {count(length)})</span>
      <input type="number" min={0} max={length - 1} value={place} onInput={(event) => event.currentTarget.validity.valid && event.currentTarget.value && onChoose(Number(event.currentTarget.value))} />
    </label>
  );
}

/** The data row of the example, if the job captured `loss.rows` at that step. */
function RowOf({ capture, example }: { capture: Capture; example: number }) {
  const whole = capture.form === "full" && capture.slice === null;
  const { value } = useLive<Page<Capture>>(whole ? withQuery(`jobs/${capture.job}/captures`, { layer: "loss.rows", kind: "output", step: capture.step, phase: capture.phase, rank: capture.rank }) : null, Infinity);
  const rows = value?.data[0];
  const { value: row } = useLive<Summary>(rows ? pathOf(rows, { slice: String(example) }) : null, Infinity);
  if (!rows || typeof row?.values !== "number") return null;
  return <span data-of="row">Row <b>{count(row.values)}</b> of its split</span>;
}

/** The tensor at a path; the newest request wins, and the previous tensor stays until it has loaded. */
function useNpy(path: string): { tensor: Tensor | null; problem: Problem | null } {
  const [state, setState] = useState<{ tensor: Tensor | null; problem: Problem | null }>({ tensor: null, problem: null });
  useEffect(() => {
    const stopped = new AbortController();
    ask(path, { headers: { Accept: "*/*" }, signal: stopped.signal })
      .then((answer) => answer.arrayBuffer())
      .then((buffer) => setState({ tensor: readNpy(buffer), problem: null }))
      .catch((error) => {
        if (stopped.signal.aborted) return;
        const problem = error instanceof Problem ? error : new Problem(0, "unreadable", error instanceof BadFile ? error.message : "The tensor could not be read.");
        setState({ tensor: null, problem });
      });
    return () => stopped.abort();
  }, [path]);
  return state;
}
