// The health of a layer: a sign and a word, and on hover or focus every rule with its values.
import { signal } from "@preact/signals";

import { SIGNS, type Verdict } from "./health";

interface Tip { verdict: Verdict; name: string; x: number; y: number }

const tip = signal<Tip | null>(null);
const ID = "rules-of-layer";

export function Light({ verdict, name }: { verdict: Verdict; name: string }) {
  const [sign, word] = SIGNS[verdict.level];
  const show = (event: Event) => {
    const box = (event.currentTarget as HTMLElement).getBoundingClientRect();
    tip.value = { verdict, name, x: box.left, y: box.bottom };
  };
  const hide = () => (tip.value = null);
  return (
    <button class={`light ${verdict.level}`} data-level={verdict.level} aria-describedby={tip.value?.verdict === verdict ? ID : undefined}
      onMouseEnter={show} onFocus={show} onClick={show} onMouseLeave={hide} onBlur={hide} onKeyDown={(event) => event.key === "Escape" && hide()}>
      <span aria-hidden="true">{sign}</span> {word}<span class="only-readers"> {name}</span>
    </button>
  );
}

/** One per view, outside the table, whose scroll box would clip it. */
export function LightTip() {
  const shown = tip.value;
  if (!shown) return null;
  const below = shown.y < innerHeight - 260;
  const style = { left: `${Math.max(8, Math.min(shown.x, innerWidth - 380))}px`, ...(below ? { top: `${shown.y + 4}px` } : { bottom: `${innerHeight - shown.y + 30}px` }) };
  return (
    <div id={ID} role="tooltip" class="light-tip" style={style}>
      <p><strong>{shown.name}</strong></p>
      <Rules verdict={shown.verdict} />
    </div>
  );
}

export function Rules({ verdict }: { verdict: Verdict }) {
  return (
    <ul class="rules">
      {verdict.findings.map((one) => (
        <li key={one.rule}><span class={`sign ${one.level}`} aria-hidden="true">{SIGNS[one.level][0]}</span> <b>{one.rule}</b> ({SIGNS[one.level][1]}): {one.text}.</li>
      ))}
      {verdict.skipped.map((one) => (
        <li key={one.rule} class="muted"><span aria-hidden="true">{SIGNS.unknown[0]}</span> <b>{one.rule}</b>: not evaluated; needs {one.needs}.</li>
      ))}
    </ul>
  );
}
