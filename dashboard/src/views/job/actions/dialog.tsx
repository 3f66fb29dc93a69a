// A modal dialog: Escape and the close button close it, and the focus returns to where it was.
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";

export function Dialog({ title, onClose, children }: { title: string; onClose(): void; children: ComponentChildren }) {
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const back = document.activeElement;
    element.current?.showModal();
    element.current?.querySelector<HTMLElement>("input, select, textarea, pre[tabindex]")?.focus(); // not the close button
    return () => back instanceof HTMLElement && back.focus();
  }, []);
  return (
    <dialog ref={element} aria-label={title} onClose={onClose}>
      <div class="stack">
        <div class="spread"><h2>{title}</h2><button class="plain" aria-label="Close" onClick={onClose}>✕</button></div>
        {children}
      </div>
    </dialog>
  );
}

/** The buttons at the end of a dialog's form. */
export function Ending({ does, busy, danger, dismiss = "Cancel", onClose }: { does: string; busy: boolean; danger?: boolean; dismiss?: string; onClose(): void }) {
  return (
    <div class="row end">
      <button type="button" onClick={onClose}>{dismiss}</button>
      <button class={danger ? "danger" : "primary"} disabled={busy}>{does}</button>
    </div>
  );
}
