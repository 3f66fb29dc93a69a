// The options of a view are in the URL, so that a link shows the same.
import { useLocation } from "preact-iso";

export type Query = Record<string, string | null | undefined>;

/** The query's parameters, and a function that changes some of them (null removes one). */
export function useQuery(): [URLSearchParams, (changes: Query, push?: boolean) => void] {
  const { path, query, route } = useLocation();
  const params = new URLSearchParams(Object.entries(query));
  const change = (changes: Query, push = false) => {
    const wanted = new URLSearchParams(location.search);
    for (const [key, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") wanted.delete(key);
      else wanted.set(key, value);
    }
    const text = wanted.toString();
    route(text ? `${path}?${text}` : path, !push);
  };
  return [params, change];
}
