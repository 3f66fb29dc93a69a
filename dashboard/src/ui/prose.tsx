// Text in which `backticks` mark code, as the descriptions of the API have them.

/** The text, with the parts between backticks as `<code>`. */
export function Prose({ text }: { text: string }) {
  return <>{text.split("`").map((part, index) => (index % 2 ? <code key={index}>{part}</code> : part))}</>;
}
