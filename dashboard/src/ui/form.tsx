// A form generated from a JSON Schema: a view of a JSON value. Unknown fields are shown as JSON and kept.
import { type ComponentChildren, createContext } from "preact";
import { useContext, useId, useRef, useState } from "preact/hooks";

import type { FieldProblem } from "../api/http";
import { readList, readLoose, readNumber, writeList, writeLoose } from "../spec/loose";
import { getAt, isObject, type Json, type JsonObject, same, under } from "../spec/pointer";
import { blank, type Field, type Property, variantName, variantOf } from "../spec/schema";
import { Prose } from "./prose";

export interface Form {
  value: Json;
  /** Undefined removes the value. */
  set(pointer: string, value: Json | undefined): void;
  problems: readonly FieldProblem[];
  /** A property with what the catalog adds to the schema. */
  property(owner: Field, property: Property, value: JsonObject): Property & { list?: string | undefined };
  /** A custom editor for this pointer; undefined: the one from the schema. */
  instead(field: Field, pointer: string): ComponentChildren | undefined;
}

export const FormContext = createContext<Form | null>(null);

export function useForm(): Form {
  const form = useContext(FormContext);
  if (!form) throw new Error("A field must be inside a form.");
  return form;
}

/** The element id of a field. */
export const idOf = (pointer: string) => `at${pointer}`;

interface Edited {
  field: Field;
  pointer: string;
  label: string;
  required?: boolean;
  /** The id of a datalist with completions. */
  list?: string | undefined;
}

export function Edit(props: Edited) {
  const form = useForm();
  const own = form.instead(props.field, props.pointer);
  if (own !== undefined) return <>{own}</>;
  const { field, pointer } = props;
  const value = getAt(form.value, pointer);
  const isUnset = value === undefined || value === null;
  if (isUnset && !props.required && isNested(field) && (field.nullable || field.kind === "variants")) return <Unset {...props} />;
  switch (field.kind) {
    case "group": return <Group {...props} field={field} />;
    case "list": return <List {...props} field={field} />;
    case "map": return <Entries {...props} field={field} />;
    case "variants": return <Variants {...props} field={field} />;
    case "switch": return field.nullable ? <Choice {...props} options={[true, false]} /> : <Switch {...props} />;
    case "choice": return isFixed(field, value) ? <Problems at={pointer} /> : <Choice {...props} options={field.options} />;
    case "plain list": return field.item.kind === "choice" ? <Several {...props} options={field.item.options} /> : <Line {...props} />;
    default: return <Line {...props} />;
  }
}

const isNested = (field: Field) => ["group", "list", "map", "variants"].includes(field.kind);
const isFixed = (field: Field, value: Json | undefined) =>
  field.kind === "choice" && field.options.length === 1 && (value === undefined ? field.fallback !== undefined : same(value, field.options[0]));

/** The problems of a field; `deep`: also those of anything in it. */
export function Problems({ at, deep = false, id }: { at: string; deep?: boolean; id?: string }) {
  const found = problemsAt(useForm().problems, at, deep);
  if (!found.length) return null;
  return <p class="wrong" id={id}>{found.map((one) => one.detail).join(" ")}</p>;
}

function problemsAt(problems: readonly FieldProblem[], at: string, deep: boolean): FieldProblem[] {
  return problems.filter((one) => one.pointer === at || (deep && one.pointer.startsWith(`${at}/`)));
}

/** Fields with ids, which need more width. */
const IDS: ReadonlySet<string> = new Set(["dataset", "checkpoint", "job", "parent"]);

/** An input with its label, help and problems. */
function Entry({ field, pointer, label, required, input }: Edited & { input: (attributes: object) => ComponentChildren }) {
  const id = useId();
  const wrong = problemsAt(useForm().problems, pointer, true).length > 0;
  const described = [field.help && `${id}-help`, wrong && `${id}-wrong`].filter(Boolean).join(" ");
  const attributes = { "aria-invalid": wrong || undefined, "aria-describedby": described || undefined };
  return (
    <div class={`entry${IDS.has(label) ? " long" : ""}`} id={idOf(pointer)}>
      <label class="field"><span>{label}{required && <abbr title="required"> *</abbr>}</span>{input(attributes)}</label>
      {field.help && <small class="help" id={`${id}-help`}><Prose text={field.help} /></small>}
      <Problems at={pointer} deep id={`${id}-wrong`} />
    </div>
  );
}

type Format = { read(text: string): Json | undefined; write(value: Json | undefined): string };
const FORMATS: Record<string, Format> = {
  text: { read: (text) => text || undefined, write: (value) => (typeof value === "string" ? value : writeLoose(value)) },
  integer: { read: readNumber, write: writeLoose },
  number: { read: readNumber, write: writeLoose },
  json: { read: readLoose, write: writeLoose },
};

function formatOf(field: Field): Format {
  if (field.kind !== "plain list") return FORMATS[field.kind] ?? FORMATS["json"]!;
  const isNumeric = field.item.kind !== "text";
  return { read: (text) => readList(text, isNumeric), write: writeList };
}

/** Whether null means the same as unset. */
const isUnsetNull = (field: Field, value: Json | undefined) => value === null && field.nullable && (field.fallback ?? null) === null;

function Line(props: Edited) {
  const form = useForm();
  const { field, pointer, list } = props;
  const value = getAt(form.value, pointer);
  const { read, write } = formatOf(field);
  const [draft, setDraft] = useState<string | null>(null);
  // Keep the typed text while it equals the value: "0.0" before it becomes "0.01".
  const shown = draft !== null && same(read(draft), value) ? draft : isUnsetNull(field, value) ? "" : write(value);
  const type = (text: string) => {
    setDraft(text);
    form.set(pointer, read(text));
  };
  const hint = field.fallback === undefined || field.fallback === null ? undefined : write(field.fallback);
  return (
    <Entry {...props} input={(attributes) => (
      <input {...attributes} value={shown} list={list} placeholder={hint} autocomplete="off" spellcheck={false}
        inputMode={field.kind === "integer" ? "numeric" : undefined}
        onInput={(event) => type(event.currentTarget.value)} onBlur={() => setDraft(null)} />
    )} />
  );
}

function Switch(props: Edited) {
  const form = useForm();
  const { field, pointer, label } = props;
  const value = getAt(form.value, pointer) ?? field.fallback ?? false;
  const id = useId();
  return (
    <div class="entry check" id={idOf(pointer)}>
      <label><input type="checkbox" checked={value === true} aria-describedby={field.help ? id : undefined}
        onChange={(event) => form.set(pointer, event.currentTarget.checked === field.fallback ? undefined : event.currentTarget.checked)} /> {label}</label>
      {field.help && <small class="help" id={id}><Prose text={field.help} /></small>}
      <Problems at={pointer} deep />
    </div>
  );
}

export function Choice({ options, ...props }: Edited & { options: Json[] }) {
  const form = useForm();
  const { field, pointer } = props;
  const value = getAt(form.value, pointer);
  const at = options.findIndex((one) => same(one, value));
  const isOther = at < 0 && value !== undefined && value !== null;
  const choose = (index: string) => form.set(pointer, index === "" ? undefined : options[+index]);
  return (
    <Entry {...props} input={(attributes) => (
      <select {...attributes} value={isOther ? "other" : at < 0 ? "" : at} onChange={(event) => choose(event.currentTarget.value)}>
        {(!props.required || at < 0) && <option value="">{field.fallback === undefined || field.fallback === null ? "–" : `default: ${writeLoose(field.fallback)}`}</option>}
        {isOther && <option value="other">{writeLoose(value)}</option>}
        {options.map((one, index) => <option key={index} value={index}>{writeLoose(one)}</option>)}
      </select>
    )} />
  );
}

function Several({ field, pointer, label, options }: Edited & { options: Json[] }) {
  const form = useForm();
  const given = getAt(form.value, pointer);
  const chosen = Array.isArray(given) ? given : Array.isArray(field.fallback) ? field.fallback : [];
  const has = (one: Json) => chosen.some((other) => same(one, other));
  const toggle = (one: Json) => form.set(pointer, options.filter((other) => has(other) !== same(one, other)));
  return (
    <fieldset class="plain" id={idOf(pointer)}>
      <legend>{label}</legend>
      <div class="row">
        {options.map((one) => <label key={String(one)}><input type="checkbox" checked={has(one)} onChange={() => toggle(one)} /> {String(one)}</label>)}
      </div>
      <Problems at={pointer} deep />
    </fieldset>
  );
}

function Unset({ field, pointer, label }: Edited) {
  const form = useForm();
  return (
    <div class="entry" id={idOf(pointer)}>
      <button type="button" class="small" title={field.help.replaceAll("`", "")} onClick={() => form.set(pointer, blank(field))}>+ {label}</button>
      <Problems at={pointer} deep />
    </div>
  );
}

type Of<Kind extends Field["kind"]> = Omit<Edited, "field"> & { field: Extract<Field, { kind: Kind }> };

/** A fieldset; an optional one can be removed. */
function Frame({ pointer, label, field, required, children }: Edited & { children: ComponentChildren }) {
  const form = useForm();
  const isOptional = !required && getAt(form.value, pointer) !== undefined;
  return (
    <fieldset id={idOf(pointer)} class="frame">
      <legend>{label}{isOptional && <button type="button" class="plain" aria-label={`Remove ${label}`} title="Remove" onClick={() => form.set(pointer, undefined)}>×</button>}</legend>
      {field.kind === "group" && field.help && <p class="muted small"><Prose text={field.help.split("\n\n")[0] ?? ""} /></p>}
      <Problems at={pointer} />
      {children}
    </fieldset>
  );
}

function Group({ field, pointer, ...props }: Of<"group">) {
  return <Frame {...props} field={field} pointer={pointer}><Properties field={field} pointer={pointer} /></Frame>;
}

const FIRST = 4;
const EAGER: Record<string, readonly string[]> = {
  Data: ["train", "validation", "fields", "batch_size", "shuffle"],
  Probe: ["layers", "kinds", "every", "want"],
  Checkpoint: ["every_epochs", "every_steps", "keep_last"],
};

/** The properties of a group: the important ones, and the others collapsed. */
export function Properties({ field, pointer, only }: { field: Extract<Field, { kind: "group" }>; pointer: string; only?: (name: string) => boolean }) {
  const form = useForm();
  const value = objectAt(form.value, pointer);
  const properties = field.properties.filter((one) => !only || only(one.name)).map((one) => form.property(field, one, value));
  const unknown = Object.keys(value).filter((name) => (!only || only(name)) && !field.properties.some((one) => one.name === name));
  const shown = useRef(new Set<string>()); // a field that was shown stays, also when it is cleared
  const eager = EAGER[field.title];
  properties.forEach((one, at) => {
    const matters = only || one.required || one.name in value || properties.length <= FIRST + 2 || (eager ? eager.includes(one.name) : at < FIRST);
    if (matters || problemsAt(form.problems, under(pointer, one.name), true).length) shown.current.add(one.name);
  });
  const row = (one: Property & { list?: string | undefined }) => <Edit key={one.name} {...one} label={one.name} pointer={under(pointer, one.name)} />;
  const others = properties.filter((one) => !shown.current.has(one.name));
  return (
    <>
      <div class="fields">
        {properties.filter((one) => shown.current.has(one.name)).map(row)}
        {unknown.map((name) => <Unknown key={name} pointer={under(pointer, name)} name={name} />)}
      </div>
      {others.length > 0 && <details class="more"><summary>{others.length} more</summary><div class="fields">{others.map(row)}</div></details>}
    </>
  );
}

function objectAt(whole: Json, pointer: string): JsonObject {
  const value = getAt(whole, pointer);
  return isObject(value) ? value : {};
}

const ANYTHING: Field = { kind: "json", title: "", help: "", nullable: true, fallback: undefined };

function Unknown({ pointer, name }: { pointer: string; name: string }) {
  const form = useForm();
  return (
    <div class="row unknown">
      <Line field={ANYTHING} pointer={pointer} label={`${name} (unknown field)`} />
      <button type="button" class="plain" aria-label={`Remove ${name}`} onClick={() => form.set(pointer, undefined)}>×</button>
    </div>
  );
}

function List({ field, pointer, label, ...props }: Of<"list">) {
  const form = useForm();
  const items = getAt(form.value, pointer);
  const all = Array.isArray(items) ? items : [];
  const one = label.endsWith("ss") ? label : label.replace(/s$/, "");
  return (
    <Frame {...props} field={field} pointer={pointer} label={label}>
      {all.map((_, at) => <Edit key={at} field={field.item} pointer={under(pointer, at)} label={`${one} ${at + 1}`} />)}
      <button type="button" onClick={() => form.set(pointer, [...all, blank(field.item)])}>Add {one}</button>
    </Frame>
  );
}

function Entries({ field, pointer, label, ...props }: Of<"map">) {
  const form = useForm();
  const value = objectAt(form.value, pointer);
  const names = Object.keys(value);
  const rename = (old: string, name: string) => {
    if (name && !(name in value)) form.set(pointer, Object.fromEntries(Object.entries(value).map(([key, one]) => [key === old ? name : key, one])));
  };
  const add = () => form.set(pointer, { ...value, [free(names)]: blank(field.item) });
  return (
    <Frame {...props} field={field} pointer={pointer} label={label}>
      {names.map((name) => (
        <div class="pair" key={name}>
          <label class="field"><span>name</span><input value={name} autocomplete="off" onChange={(event) => rename(name, event.currentTarget.value.trim())} /></label>
          <Edit field={field.item} pointer={under(pointer, name)} label={name} required={!isNested(field.item)} />
          {!isNested(field.item) && <button type="button" class="plain" aria-label={`Remove ${name}`} onClick={() => form.set(under(pointer, name), undefined)}>×</button>}
        </div>
      ))}
      <button type="button" onClick={add}>Add to {label}</button>
    </Frame>
  );
}

function free(names: string[]): string {
  for (let at = names.length + 1; ; at += 1) if (!names.includes(`name${at}`)) return `name${at}`;
}

function Variants({ field, pointer, label, required }: Of<"variants">) {
  const form = useForm();
  const value = getAt(form.value, pointer);
  const isUnset = !required && (value === undefined || value === null);
  const at = isUnset ? -1 : variantOf(field.variants, value);
  const chosen = field.variants[at];
  const choose = (index: number) => form.set(pointer, index < 0 ? undefined : converted(field.variants[index]!, value));
  const id = useId();
  return (
    <div class="variants" id={idOf(pointer)}>
      <label for={id}>{label}</label>
      <select id={id} value={at} onChange={(event) => choose(+event.currentTarget.value)}>
        {!required && <option value={-1}>–</option>}
        {field.variants.map((one, index) => <option key={index} value={index}>{variantName(one)}</option>)}
      </select>
      {chosen && <Edit field={chosen} pointer={pointer} label={label} required />}
    </div>
  );
}

/** As much of a value as the other variant accepts. */
function converted(to: Field, value: Json | undefined): Json {
  if ((to.kind === "list" || to.kind === "plain list") && isObject(value)) return [value];
  if (to.kind === "map" && isObject(value)) return { [free([])]: value };
  const one = Array.isArray(value) ? value[0] : value;
  if (to.kind !== "group" || !isObject(one)) return blank(to);
  const kept = Object.entries(one).filter(([name]) => name !== "type" && to.properties.some((property) => property.name === name));
  return { ...(blank(to) as JsonObject), ...Object.fromEntries(kept) };
}
