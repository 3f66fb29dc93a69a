// The range of a logarithmic axis. Pure.

const MOST_POWERS = 20; // under the highest; what is less lies on the ground

/** Powers of ten around the finite values that are not zero; the lowest is under the smallest, so that each bar is seen. */
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
