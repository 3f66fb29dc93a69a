// Predicted against true classes. Pure.

export interface Confusion {
  /** True and predicted classes, ascending. */
  classes: number[];
  /** Rows by true class, columns by predicted. */
  counts: number[][];
  right: number;
  total: number;
}

export function confusion(truth: readonly number[], predicted: readonly number[]): Confusion {
  const classes = [...new Set([...truth, ...predicted])].sort((a, b) => a - b);
  const place = new Map(classes.map((one, index) => [one, index]));
  const counts = classes.map(() => classes.map(() => 0));
  let right = 0;
  truth.forEach((one, row) => {
    const guess = predicted[row]!;
    counts[place.get(one)!]![place.get(guess)!]! += 1;
    if (one === guess) right += 1;
  });
  return { classes, counts, right, total: truth.length };
}

/** Mistakes first, by descending probability; then correct rows, by ascending probability. */
export function worstFirst(truth: readonly number[] | null, predicted: readonly number[], probs: readonly number[] | null): number[] {
  const isWrong = (row: number) => truth !== null && truth[row] !== predicted[row];
  const sure = (row: number) => probs?.[row] ?? 0;
  const before = (a: number, b: number) => +isWrong(b) - +isWrong(a) || (isWrong(a) ? sure(b) - sure(a) : sure(a) - sure(b)) || a - b;
  return predicted.map((_, row) => row).sort(before);
}
