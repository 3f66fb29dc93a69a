// Mean and standard deviation of several lines over their steps.

export interface Line {
  xs: number[];
  ys: (number | null)[];
}

export interface Spread {
  xs: number[];
  mean: (number | null)[];
  /** Sample standard deviation of the lines (0 for one line). */
  std: (number | null)[];
  /** The number of lines with a value at this step. */
  lines: number[];
}

/**
 * Mean and standard deviation at every step of any line. Thinned lines have values at different steps: a line is
 * interpolated linearly between its steps and not counted outside of them.
 */
export function spread(lines: Line[]): Spread {
  const xs = [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
  const read = lines.map((line) => along(line, xs));
  const found: Spread = { xs, mean: [], std: [], lines: [] };
  xs.forEach((_, place) => {
    const values = read.map((line) => line[place]).filter((one): one is number => one !== null && one !== undefined && Number.isFinite(one));
    const mean = values.reduce((sum, one) => sum + one, 0) / values.length;
    const square = values.reduce((sum, one) => sum + (one - mean) ** 2, 0);
    found.lines.push(values.length);
    found.mean.push(values.length ? mean : null);
    found.std.push(values.length ? Math.sqrt(square / Math.max(1, values.length - 1)) : null);
  });
  return found;
}

/** A line's values at these steps, interpolated linearly; null outside of its own. Both are ascending. */
export function along(line: Line, xs: number[]): (number | null)[] {
  const points = line.xs.map((x, place) => [x, line.ys[place] ?? null] as const).filter((point): point is readonly [number, number] => point[1] !== null);
  let next = 0;
  return xs.map((x) => {
    while (next < points.length && points[next]![0] < x) next += 1;
    const right = points[next];
    if (!right) return null;
    if (right[0] === x) return right[1];
    const left = points[next - 1];
    if (!left) return null;
    return left[1] + ((right[1] - left[1]) * (x - left[0])) / (right[0] - left[0]);
  });
}
