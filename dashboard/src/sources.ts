// The validation sources of a job, from the names of its series. Pure.

/** The names of the sources; empty if there is one without a name. As in `glasshouse/metric_direction.py`. */
export function sourcesOf(series: readonly string[]): Set<string> {
  if (series.includes("validation/loss")) return new Set();
  return new Set(series.flatMap((name) => /^validation\/([^/]+)\/loss$/.exec(name)?.[1] ?? []));
}

/** The name of a validation series without its prefix and its source: `validation/clean/accuracy` is `accuracy`. */
export function metricOf(series: string, sources: ReadonlySet<string>): string {
  const [first, ...rest] = series.replace("validation/", "").split("/");
  return rest.length && sources.has(first!) ? rest.join("/") : [first, ...rest].join("/");
}
