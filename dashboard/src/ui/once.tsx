// A secret that is shown this once: to be copied now.
import { say } from "./toast";

interface Told { title: string; secret: string; hint: string; done(): void }

export function Once({ title, secret, hint, done }: Told) {
  return (
    <div class="note" role="alert">
      <p><strong>{title}</strong> {hint}</p>
      <p><code class="secret" tabIndex={0}>{secret}</code></p>
      <div class="row">
        <button type="button" class="primary" onClick={() => copy(secret)}>Copy</button>
        <button type="button" onClick={done}>I have it</button>
      </div>
    </div>
  );
}

/** Where the page came over plain http the browser has no clipboard for it: the text is there to be marked. */
export async function copy(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied");
  } catch {
    say("The browser does not let the page copy: mark the text and copy it yourself.", true);
  }
}
