// What the driver reports of a device, in words. A fact that it does not report is not shown.
import type { Device } from "../../api/types";
import { bytes } from "../../format";

export function factsOf(device: Device): string[] {
  const link = device.interconnect;
  const known: [unknown, string][] = [
    [device.memory_used_bytes, `${bytes(device.memory_used_bytes)} used`],
    [device.utilization_percent, `${device.utilization_percent} % busy`],
    [device.temperature_celsius, `${device.temperature_celsius} °C`],
    [device.processes, `processes: ${device.processes?.length}`],
    [device.compute_capability, `compute capability ${device.compute_capability}`],
    [device.mig, `MIG ${device.mig}`],
    [link?.pcie_generation, `PCIe ${link?.pcie_generation} x${link?.pcie_lanes ?? "?"}`],
    [link?.nvlinks, `NVLinks: ${link?.nvlinks}`],
    [device.numa_node, `NUMA node ${device.numa_node}`],
  ];
  return known.filter(([fact]) => fact !== null && fact !== undefined).map(([, words]) => words);
}
