// Format numbers, sizes and times.

/** Four significant digits: 0.3125, 12.5, 1.20e-7; NaN and Inf by name. */
export function figure(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "Inf" : "−Inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e6 || size < 1e-4 ? value.toExponential(digits - 2) : String(+value.toPrecision(digits));
  return text.replace("-", "−").replace("e+", "e").replace("e−", "e-");
}

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 }); // expensive to create, and used thousands of times

/** 12,345 */
export function count(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : WHOLE.format(value);
}

/** 1.5 MB; a kB is 1000 bytes. */
export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let left = value;
  while (left >= 1000 && unit < units.length - 1) {
    left /= 1000;
    unit += 1;
  }
  return `${unit && left < 100 ? left.toFixed(1) : Math.round(left)} ${units[unit]}`;
}

/** 45 s, 3 min 20 s, 2 h 05 min, 3 d 4 h */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const s = Math.max(0, seconds);
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.round(s)} s`;
  const whole = Math.round(s);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  const minutes = Math.round(s / 60);
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  const hours = Math.round(s / 3600);
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** "just now", "5 min ago", "on 3 Nov 14:05" */
export function ago(at: string | null | undefined, now = Date.now()): string {
  if (!at) return "–";
  const past = (now - Date.parse(at)) / 1000;
  if (past < 10) return "just now";
  if (past < 60) return `${Math.round(past)} s ago`;
  if (past < 3600) return `${Math.round(past / 60)} min ago`;
  if (past < 24 * 3600) return `${Math.round(past / 3600)} h ago`;
  return new Date(at).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}

export function percent(fraction: number | null | undefined, digits = 0): string {
  return fraction === null || fraction === undefined ? "–" : `${(fraction * 100).toFixed(digits)} %`;
}
