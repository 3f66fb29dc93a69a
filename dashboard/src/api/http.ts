// Requests to the API with the session cookie. Responses are JSON; errors are problem documents.
import { signal } from "@preact/signals";

export const BASE = "/api/v1";

/** "ok"; "lost": the service does not respond; "locked": there is no session, or it has ended. */
export const connection = signal<"ok" | "lost" | "locked">("ok");

export interface FieldProblem {
  pointer: string;
  detail: string;
  code: string;
}

/** An error response (RFC 9457), or no response. */
export class Problem extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    detail: string,
    readonly hint: string | null = null,
    readonly errors: FieldProblem[] = [],
    readonly page: string | null = null,
  ) {
    super(detail);
  }
}

export interface Ask {
  method?: "GET" | "POST" | "PATCH" | "PUT" | "DELETE";
  /** Sent as JSON unless it is binary. */
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal;
}

/** The raw response. Throws a Problem for an error status. */
export async function ask(path: string, { method = "GET", body, headers = {}, signal }: Ask = {}): Promise<Response> {
  const raw = body instanceof Blob || body instanceof ArrayBuffer;
  const sent: RequestInit = { method, headers: { Accept: "application/json", ...headers }, credentials: "same-origin" };
  if (body !== undefined) {
    sent.body = raw ? body : JSON.stringify(body);
    if (!raw) sent.headers = { "Content-Type": "application/json", ...sent.headers };
  }
  if (signal) sent.signal = signal;
  let answer: Response;
  try {
    answer = await fetch(path.startsWith("/") ? path : `${BASE}/${path}`, sent);
  } catch (error) {
    if (signal?.aborted) throw error;
    connection.value = "lost";
    throw new Problem(0, "unreachable", "The service is unavailable.");
  }
  if (answer.status === 401) connection.value = "locked";
  else if (connection.value === "lost") connection.value = "ok";
  if (answer.ok || answer.status === 304) return answer;
  throw await problemOf(answer);
}

async function problemOf(answer: Response): Promise<Problem> {
  try {
    const found = await answer.json();
    return new Problem(answer.status, found.code, found.detail, found.hint ?? null, found.errors ?? [], found.type ?? null);
  } catch {
    return new Problem(answer.status, "unknown", `The service responded with status ${answer.status}.`);
  }
}

export async function get<T>(path: string, options: Ask = {}): Promise<T> {
  return (await ask(path, options)).json() as Promise<T>;
}

export async function post<T>(path: string, body?: unknown, headers?: Record<string, string>): Promise<T> {
  const answer = await ask(path, headers ? { method: "POST", body: body ?? {}, headers } : { method: "POST", body: body ?? {} });
  return answer.status === 204 ? (undefined as T) : (answer.json() as Promise<T>);
}

/** The path with a query; null, undefined and empty values are omitted, lists are repeated. */
export function withQuery(path: string, query: Record<string, string | number | boolean | string[] | null | undefined>): string {
  const pairs = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (value === null || value === undefined || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) pairs.append(key, String(one));
  }
  const text = pairs.toString();
  return text ? `${path}?${text}` : path;
}
