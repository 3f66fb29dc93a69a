// A secret that is shown only once.
import { toast } from "./toast";

interface Props { title: string; secret: string; hint: string; done(): void }

export function Once({ title, secret, hint, done }: Props) {
  return (
    <div class="note" role="alert">
      <p><strong>{title}</strong> {hint}</p>
      <p><code class="secret" tabIndex={0}>{secret}</code></p>
      <div class="row">
        <button type="button" class="primary" onClick={() => copy(secret)}>Copy</button>
        <button type="button" onClick={done}>Done</button>
      </div>
    </div>
  );
}

/** Over plain HTTP the browser has no clipboard API: the user selects the text. */
export async function copy(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied");
  } catch {
    toast("The browser does not allow copying. Select the text and copy it.", true);
  }
}
