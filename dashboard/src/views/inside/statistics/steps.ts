/** A step in the URL; null if there is none. */
export function stepOf(text: string | null): number | null {
  return text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null;
}
