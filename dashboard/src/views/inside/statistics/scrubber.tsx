// Selects one of the available steps: with a slider, one by one, or the newest.
import { placeOfStep } from "./histogram-axis";

interface Props { steps: readonly number[]; step: number | null; onStep: (step: number | null) => void; what?: string }

/** `step` null: follow the newest. */
export function Scrubber({ steps, step, onStep, what = "Step" }: Props) {
  if (!steps.length) return null;
  const place = placeOfStep(steps, step);
  const go = (to: number) => onStep(steps[Math.max(0, Math.min(steps.length - 1, to))]!);
  return (
    <div class="row scrubber">
      <label class="row grow"><span>{what} <output class="step">{step ?? steps.at(-1)}</output></span>
        <input type="range" min={0} max={steps.length - 1} value={place} onInput={(event) => go(Number(event.currentTarget.value))} aria-valuetext={`step ${step ?? steps.at(-1)}`} />
      </label>
      <button onClick={() => go(place - 1)} disabled={place === 0} aria-label="Previous step">◀</button>
      <button onClick={() => go(place + 1)} disabled={place >= steps.length - 1} aria-label="Next step">▶</button>
      <button aria-pressed={step === null} onClick={() => onStep(null)}>Newest</button>
    </div>
  );
}
