// What is chosen lives in the address, so that a link shows the same.
import { useLocation } from "preact-iso";

export interface Query {
  get(key: string): string | null;
  /** Change some of it; what is null or empty is left out. The way back skips such changes. */
  set(changes: Record<string, string | null>): void;
}

export function useQuery(): Query {
  const { path, query, route } = useLocation();
  return {
    get: (key) => query[key] ?? null,
    set(changes) {
      const next = new URLSearchParams(location.search);
      for (const [key, value] of Object.entries(changes)) value ? next.set(key, value) : next.delete(key);
      const text = next.toString();
      route(text ? `${path}?${text}` : path, true);
    },
  };
}
