// The range of a logarithmic axis. Pure.

const MOST_POWERS = 20; // below the highest; smaller values are at the bottom

/** Powers of ten around the finite nonzero values; the lowest is below the smallest value, so that each bar is visible. */
export function powersAround(values: readonly (number | null)[]): [low: number, high: number] {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null || !(value > 0) || !Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return [-1, 1];
  const last = Math.ceil(Math.log10(high));
  return [Math.max(last - MOST_POWERS, Math.ceil(Math.log10(low)) - 1, -323), last === Math.ceil(Math.log10(low)) - 1 ? last + 1 : last];
}
