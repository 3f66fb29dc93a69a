// A button whose deed is asked for once more. The dialog is the browser's: Escape closes it, the focus comes back.
import { useRef } from "preact/hooks";

interface Asked { word: string; question: string; act(): unknown; label?: string }

export function Confirm({ word, question, act, label }: Asked) {
  const dialog = useRef<HTMLDialogElement>(null);
  const close = () => dialog.current?.close();
  const sure = async () => {
    close();
    await act();
  };
  return (
    <>
      <button type="button" class="danger" aria-label={label} onClick={() => dialog.current?.showModal()}>{word}</button>
      <dialog ref={dialog} aria-label={label ?? word}>
        <p>{question}</p>
        <div class="row">
          <button type="button" class="danger" onClick={sure}>{word}</button>
          <button type="button" onClick={close}>Leave it</button>
        </div>
      </dialog>
    </>
  );
}
