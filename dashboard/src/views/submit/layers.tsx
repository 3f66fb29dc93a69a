// The network as a paged list of layers; each is a collapsible row.
import { useEffect, useState } from "preact/hooks";

import { count } from "../../format";
import { writeLoose } from "../../spec/loose";
import { isObject, type Json, type JsonObject, under } from "../../spec/pointer";
import type { Field } from "../../spec/schema";
import { Edit, idOf, Problems, Properties, useForm } from "../../ui/form";
import { jumpTarget } from "./jump";
import type { PlannedLayer } from "./layer_table";

const AT = "/network/layers";
const PAGE = 50;
const BASIC = ["name", "type", "inputs"];

interface Layers { layers: Json[]; field: Extract<Field, { kind: "group" }>; planned: PlannedLayer[] }

export function LayerList({ layers, field, planned }: Layers) {
  const form = useForm();
  const [page, setPage] = useState(0);
  // Rows are recreated after layers moved, or a row would show what was typed into another.
  const [made, setMade] = useState<{ times: number; open: number | null }>({ times: 0, open: null });
  const last = Math.max(0, Math.ceil(layers.length / PAGE) - 1);
  const from = Math.min(page, last) * PAGE;
  useEffect(() => {
    const wanted = /^\/network\/layers\/(\d+)/.exec(jumpTarget.value ?? "");
    if (wanted) setPage(Math.floor(+wanted[1]! / PAGE));
  }, [jumpTarget.value]);
  const byName = new Map(planned.map((one) => [one.name, one]));
  const put = (list: Json[], open: number | null = null) => {
    setMade({ times: made.times + 1, open });
    form.set(AT, list);
  };
  const insert = (at: number) => {
    put(layers.toSpliced(at, 0, { name: freeName(layers), type: "Linear" }), at);
    setPage(Math.floor(at / PAGE));
  };
  const move = (at: number, by: number) => {
    const others = layers.toSpliced(at, 1);
    put(others.toSpliced(at + by, 0, layers[at]!), at + by);
  };
  return (
    <div id={idOf(AT)}>
      <Problems at={AT} />
      {layers.length > PAGE && <Pager {...{ page: Math.min(page, last), last, setPage }} num={layers.length} />}
      {layers.slice(from, from + PAGE).map((layer, index) => {
        const at = from + index;
        return (
          <LayerRow key={`${made.times} ${at}`} {...{ at, layer, field }} isOpen={made.open === at} planned={byName.get(nameOf(layer))}
            isFirst={at === 0} isLast={at === layers.length - 1}
            remove={() => put(layers.toSpliced(at, 1))} insert={() => insert(at + 1)} move={(by) => move(at, by)} />
        );
      })}
      <button type="button" onClick={() => insert(layers.length)}>Add a layer</button>
    </div>
  );
}

interface Row {
  at: number;
  layer: Json;
  field: Extract<Field, { kind: "group" }>;
  planned: PlannedLayer | undefined;
  isOpen: boolean;
  isFirst: boolean;
  isLast: boolean;
  remove(): void;
  insert(): void;
  move(by: number): void;
}

function LayerRow({ at, layer, field, planned, isOpen, isFirst, isLast, remove, insert, move }: Row) {
  const form = useForm();
  const pointer = under(AT, at);
  const value: JsonObject = isObject(layer) ? layer : {};
  const isWrong = form.problems.some((one) => one.pointer === pointer || one.pointer.startsWith(`${pointer}/`));
  const [open, setOpen] = useState(isOpen);
  const args = form.property(field, field.properties.find((one) => one.name === "args")!, value);
  return (
    <details class={isWrong ? "layer bad" : "layer"} id={idOf(pointer)} open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <strong>{nameOf(layer) || "?"}</strong> <span class="mono">{callText(value)}</span>
        {planned && <span class="muted small end">{shape(planned)} · {count(planned.parameters)} parameters</span>}
        {isWrong && <span class="badge bad">error</span>}
      </summary>
      <Problems at={pointer} />
      {open && (
        <div class="stack">
          <Properties field={field} pointer={pointer} only={(name) => BASIC.includes(name)} />
          <Edit {...args} label="args" pointer={under(pointer, "args")} />
          <Options field={field} pointer={pointer} value={value} />
          <div class="row">
            <button type="button" onClick={insert}>Insert after</button>
            <button type="button" disabled={isFirst} onClick={() => move(-1)}>Move up</button>
            <button type="button" disabled={isLast} onClick={() => move(1)}>Move down</button>
            <button type="button" class="danger" onClick={remove}>Remove</button>
          </div>
        </div>
      )}
    </details>
  );
}

/** The options of a layer besides its arguments. */
function Options({ field, pointer, value }: { field: Row["field"]; pointer: string; value: JsonObject }) {
  const others = (name: string) => !BASIC.includes(name) && name !== "args";
  const num = Object.keys(value).filter(others).length;
  const [open, setOpen] = useState(num > 0);
  return (
    <details class="more" open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Layer options{num > 0 && ` (${num} set)`}</summary>
      {open && <Properties field={field} pointer={pointer} only={others} />}
    </details>
  );
}

interface Paging { page: number; last: number; num: number; setPage(page: number): void }

function Pager({ page, last, num, setPage }: Paging) {
  return (
    <div class="row" style={{ marginBottom: ".5rem" }}>
      <button type="button" disabled={page === 0} onClick={() => setPage(page - 1)}>Previous</button>
      <span>Layers {page * PAGE + 1} to {Math.min(num, (page + 1) * PAGE)} of {count(num)}</span>
      <button type="button" disabled={page === last} onClick={() => setPage(page + 1)}>Next</button>
    </div>
  );
}

const nameOf = (layer: Json) => (isObject(layer) && typeof layer["name"] === "string" ? layer["name"] : "");
const shape = (planned: PlannedLayer) => (planned.output_shape ? planned.output_shape.join(" × ") : "");

/** Conv2d(out_channels=16, kernel_size=3) */
function callText(layer: JsonObject): string {
  const args = isObject(layer["args"]) ? Object.entries(layer["args"]).map(([name, value]) => `${name}=${writeLoose(value)}`) : [];
  const type = layer["type"] ?? (layer["shared_with"] ? `shared with ${String(layer["shared_with"])}` : "?");
  return `${String(type)}(${args.join(", ")})`;
}

function freeName(layers: Json[]): string {
  const taken = new Set(layers.map(nameOf));
  for (let at = layers.length + 1; ; at += 1) if (!taken.has(`layer${at}`)) return `layer${at}`;
}
