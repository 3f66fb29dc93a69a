// What is known of a metric by its name. Pure.

const LOWER_IS_BETTER = /loss|error|diff|perplexity|divergence|distance|mse|mae|wer|cer/i;

/** Whether the lowest value of a metric is its best. */
export function isLowerBetter(name: string): boolean {
  return LOWER_IS_BETTER.test(name);
}
