// The layers and parameters that a probe matched: few are listed, many are in a collapsed list.
import { count } from "../../../format";

const FEW = 6;

export function Matched({ names }: { names: readonly string[] }) {
  if (names.length <= FEW) return <div class="muted">matched {names.join(", ") || "nothing"}</div>;
  return (
    <details class="muted">
      <summary>matched {count(names.length)}</summary>
      <div class="matched">{names.slice(0, 500).join(", ")}{names.length > 500 && ` and ${names.length - 500} more`}</div>
    </details>
  );
}
