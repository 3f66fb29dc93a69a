// A key for a request that makes something: sent twice it makes one thing.

// Not randomUUID: browsers have it over https and on this machine only.
export function onceKey(): Record<string, string> {
  const bytes = [...crypto.getRandomValues(new Uint8Array(16))];
  return { "Idempotency-Key": `page-${bytes.map((one) => one.toString(16).padStart(2, "0")).join("")}` };
}
