// The overhead of watching, in words. Pure.
import { percent } from "../../format";

/** The overhead of watching and its budget. A budget applies only to the probes that have one. */
export function costText(fraction: number | null, budget: number | null, unbudgeted: number | null): string {
  const whole = `${percent(fraction, 1)} of a step`;
  if (fraction === null) return whole;
  if (budget === null) return `${whole}, no budget set`;
  if (!unbudgeted) return `${whole}, budget ${percent(budget, 1)}`;
  return `${whole}: ${percent(fraction - unbudgeted, 1)} of a ${percent(budget, 1)} budget, ${percent(unbudgeted, 1)} by probes without a budget`;
}
