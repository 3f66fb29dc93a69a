// The inputs of the form for one row: images by file, drop or numbers, texts, classes and numbers.
import { useId, useState } from "preact/hooks";

import type { FieldProblem } from "../../api/http";
import { type Picture, pictureOf } from "./images";
import type { Entry } from "./inputs";

/** What was entered: a text, or an image. */
export type Entered = string | Picture;

interface Props {
  entry: Entry;
  value: Entered;
  onValue(value: Entered): void;
  problems: readonly FieldProblem[];
}

export function EntryField(props: Props) {
  const { entry, problems } = props;
  const [asNumbers, setAsNumbers] = useState(false);
  const id = useId();
  const isImage = entry.kind === "image" && !asNumbers;
  const hint = isImage ? "" : [entry.hint, entry.optional && "empty: a missing value"].filter(Boolean).join("; ");
  const described = [hint && `${id}-hint`, problems.length && `${id}-wrong`].filter(Boolean).join(" ") || undefined;
  const toggle = () => {
    setAsNumbers(!asNumbers);
    props.onValue("");
  };
  return (
    <div class={entry.kind === "number" || entry.kind === "class" ? "entry" : "entry wide"}>
      {isImage ? <ImageInput {...props} described={described} /> : <TextInput {...props} described={described} />}
      {hint && <small class="muted" id={`${id}-hint`}>{hint}</small>}
      {entry.kind === "image" && <div><button type="button" class="small" onClick={toggle}>{asNumbers ? "Select a file instead" : "Enter numbers instead"}</button></div>}
      {problems.length > 0 && <p class="wrong" id={`${id}-wrong`}>{problems.map((one) => one.detail.replace(/^row 0: /, "")).join(" ")}</p>}
    </div>
  );
}

interface Described extends Props { described: string | undefined }

function TextInput({ entry, value, onValue, problems, described }: Described) {
  const text = typeof value === "string" ? value : "";
  const attributes = { value: text, "aria-invalid": problems.length > 0 || undefined, "aria-describedby": described };
  const input = entry.kind === "class" ? (
    <select {...attributes} onChange={(event) => onValue(event.currentTarget.value)}>
      <option value="">–</option>
      {entry.options.map((one) => <option key={one} value={String(one)}>{one}</option>)}
    </select>
  ) : entry.kind === "number" ? (
    <input {...attributes} inputMode="decimal" autocomplete="off" onInput={(event) => onValue(event.currentTarget.value)} />
  ) : (
    <textarea {...attributes} rows={entry.kind === "text" ? 3 : 4} class={entry.kind === "text" ? "" : "code"} spellcheck={entry.kind === "text"} onInput={(event) => onValue(event.currentTarget.value)} />
  );
  return <label class="field"><span>{entry.column}</span>{input}</label>;
}

function ImageInput({ entry, value, onValue, problems, described }: Described) {
  const [over, setOver] = useState(false);
  const [problem, setProblem] = useState<string | null>(null);
  const take = async (file: Blob | undefined) => {
    setOver(false);
    if (!file) return;
    try {
      onValue(await pictureOf(file, entry.width, entry.height));
      setProblem(null);
    } catch (error) {
      setProblem((error as Error).message);
      onValue("");
    }
  };
  const drag = (event: DragEvent) => {
    event.preventDefault();
    setOver(true);
  };
  const drop = (event: DragEvent) => {
    event.preventDefault();
    void take(event.dataTransfer?.files[0]);
  };
  const picture = typeof value === "string" ? null : value;
  return (
    <div class={over ? "drop over" : "drop"} onDragOver={drag} onDragLeave={() => setOver(false)} onDrop={drop}>
      <label class="field">
        <span>{entry.column}: an image of {entry.width} × {entry.height} pixels{entry.channels === 1 && ", gray"}; select a file or drop one here</span>
        <input type="file" accept="image/*" aria-invalid={problems.length > 0 || undefined} aria-describedby={described} onChange={(event) => void take(event.currentTarget.files?.[0])} />
      </label>
      {picture && <img class="picture" src={picture.url} alt={`${entry.column}, as it is sent`} style={{ height: `${Math.min(128, 8 * Math.max(8, entry.height))}px` }} />}
      {picture?.note && <p class="muted small">{picture.note}</p>}
      {problem && <p class="wrong" role="alert">{problem}</p>}
    </div>
  );
}
