// A button that asks for confirmation. The dialog is the browser's: Escape closes it, and the focus returns.
import { useRef } from "preact/hooks";

interface Props { word: string; question: string; act(): unknown; label?: string }

export function Confirm({ word, question, act, label }: Props) {
  const dialog = useRef<HTMLDialogElement>(null);
  const close = () => dialog.current?.close();
  const confirmed = async () => {
    close();
    await act();
  };
  return (
    <>
      <button type="button" class="danger" aria-label={label} onClick={() => dialog.current?.showModal()}>{word}</button>
      <dialog ref={dialog} aria-label={label ?? word}>
        <p>{question}</p>
        <div class="row">
          <button type="button" class="danger" onClick={confirmed}>{word}</button>
          <button type="button" onClick={close}>Cancel</button>
        </div>
      </dialog>
    </>
  );
}
