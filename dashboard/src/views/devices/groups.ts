// Consecutive equal devices share one row: 128 cores are not 128 rows.
import type { Device } from "../../api/types";

export interface Group { ids: string; num: number; device: Device }

export function grouped(devices: Device[]): Group[] {
  const groups: Device[][] = [];
  for (const device of devices) {
    const last = groups.at(-1);
    if (last && alike(last.at(-1)!, device)) last.push(device);
    else groups.push([device]);
  }
  return groups.map((all) => ({ ids: all.length > 1 ? `${all[0]!.id} … ${all.at(-1)!.id}` : all[0]!.id, num: all.length, device: all[0]! }));
}

function alike(a: Device, b: Device): boolean {
  const same = (["kind", "name", "memory_bytes", "state", "job", "reason"] as const).every((key) => a[key] === b[key]);
  return same && a.kind === "cpu" && b.number === a.number + 1;
}
