// The filters of the log, as they are in the address of the page and in requests.

export interface Filters {
  rank: string | null;
  level: string | null;
  since: string | null;
  /** A text or a regular expression; empty: all lines. */
  search: string;
  isPattern: boolean;
}

export const LEVELS = ["info", "warning", "error"] as const;
export const TIMES = { "10m": "10 minutes", "1h": "1 hour", "1d": "1 day" } as const;

const SPECIAL = /[\\^$.|?*+()[\]{}]/g;

/** The regular expression that matches a text. */
export const escaped = (text: string): string => text.replace(SPECIAL, "\\$&");

/** `text` is a text to search, `grep` a regular expression, as in the API. */
export function filtersOf(query: URLSearchParams): Filters {
  const [text, grep] = [query.get("text"), query.get("grep")];
  return { rank: query.get("rank"), level: query.get("level"), since: query.get("since"), search: text ?? grep ?? "", isPattern: text === null && grep !== null };
}

/** The parameters of a request for the log. */
export function parametersOf({ rank, level, since, search, isPattern }: Filters) {
  return { rank, level, since, grep: isPattern ? search : escaped(search) };
}

/** What the lines have in common, for people. */
export function searchText({ search, isPattern }: Filters): string {
  if (!search) return "";
  return isPattern ? ` that match “${search}”` : ` that contain “${search}”`;
}
