// Colors of values: dark to light for values of one sign, blue over white to red around zero. Computed.

export type Rgb = readonly [red: number, green: number, blue: number];

/** The colors of NaN and Inf. Charts also hatch them: never by color alone. */
export const NAN: Rgb = [255, 0, 255];
export const INFINITE: Rgb = [0, 200, 0];

// A polynomial through the colors of viridis; off by less than 2 of 255.
const VIRIDIS: readonly Rgb[] = [
  [0.2777, 0.0054, 0.3341], [0.1051, 1.4046, 1.3846], [-0.3309, 0.2148, 0.0951], [-4.6342, -5.7991, -19.3324],
  [6.2283, 14.1799, 56.6906], [4.7764, -13.7451, -65.353], [-5.4355, 4.6459, 26.3124],
];

const clamp = (value: number) => Math.max(0, Math.min(255, Math.round(value)));

function viridis(at: number): Rgb {
  const channel = (which: 0 | 1 | 2) => clamp(255 * VIRIDIS.reduceRight((sum, factors) => sum * at + factors[which], 0));
  return [channel(0), channel(1), channel(2)];
}

const COLD: Rgb = [24, 78, 160];
const HOT: Rgb = [178, 24, 43];

function around(at: number): Rgb {
  const end = at < 0.5 ? COLD : HOT;
  const far = Math.abs(at - 0.5) * 2;
  const bent = far ** 0.8;
  return [0, 1, 2].map((channel) => clamp(247 + (end[channel]! - 247) * bent)) as unknown as Rgb;
}

const table = (color: (at: number) => Rgb) => Array.from({ length: 256 }, (_, n) => color(n / 255));
const ONE_SIGN = table(viridis);
const TWO_SIGNS = table(around);

/** The color at 0 … 1. */
export function sequential(at: number): Rgb {
  return ONE_SIGN[clamp(at * 255)]!;
}

/** The color of a value between low and high; around zero where low is negative. */
export function colorOf(value: number, low: number, high: number): Rgb {
  if (Number.isNaN(value)) return NAN;
  if (!Number.isFinite(value)) return INFINITE;
  const at = high > low ? (value - low) / (high - low) : low < 0 ? 0.5 : 0;
  return (low < 0 ? TWO_SIGNS : ONE_SIGN)[clamp(at * 255)]!;
}

export function css([red, green, blue]: Rgb): string {
  return `rgb(${red} ${green} ${blue})`;
}
