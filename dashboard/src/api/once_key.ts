// An idempotency key: a request that is sent twice creates one resource.

// Not randomUUID: browsers have it only over HTTPS and on localhost.
export function onceKey(): Record<string, string> {
  const bytes = [...crypto.getRandomValues(new Uint8Array(16))];
  return { "Idempotency-Key": `page-${bytes.map((one) => one.toString(16).padStart(2, "0")).join("")}` };
}
