// The layers of the plan with their output shapes, parameters and FLOPs, paged.
import { useState } from "preact/hooks";

import type { Plan } from "../../api/types";
import { count } from "../../format";
import { Scroll } from "../../ui/scroll";

export interface PlannedLayer {
  name: string;
  type: string;
  output_shape: (number | string)[] | null;
  parameters: number;
  trainable: boolean;
  flops: number | null;
}

const PAGE = 100;

export const layersOf = (plan: Plan | null): PlannedLayer[] => (plan?.layers ?? []) as unknown as PlannedLayer[];

export function LayerTable({ plan }: { plan: Plan }) {
  const layers = layersOf(plan);
  const [shown, setShown] = useState(PAGE);
  return (
    <Scroll label="Layers">
      <table>
        <caption class="only-readers">Layers</caption>
        <thead><tr><th>Layer</th><th>Type</th><th class="number">Output shape</th><th class="number">Parameters</th><th class="number">FLOPs</th></tr></thead>
        <tbody>
          {layers.slice(0, shown).map((layer) => (
            <tr key={layer.name}>
              <td class="mono">{layer.name}</td>
              <td>{layer.type}</td>
              <td class="number nowrap">{layer.output_shape ? layer.output_shape.join(" × ") || "1" : "–"}</td>
              <td class="number">{count(layer.parameters)}{!layer.trainable && layer.parameters > 0 && " (frozen)"}</td>
              <td class="number">{count(layer.flops ?? 0)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {layers.length > shown && <button type="button" onClick={() => setShown(shown + PAGE)}>{count(layers.length - shown)} more layers</button>}
    </Scroll>
  );
}
