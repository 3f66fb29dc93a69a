"""What `worker.devices.hardware` reports besides the list of devices: facts that change or explain.

NVML answers for CUDA devices. What it refuses, does not know or answers with something else is
None: a fact that is missing never hides a device.
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")
_TOPOLOGY = {
    0: "same_board",
    10: "pcie_switch",
    20: "pcie_switches",
    30: "host_bridge",
    40: "numa_node",
    50: "system",
}
"""The paths between two devices by NVML's ``nvmlGpuTopologyLevel_t``, the nearest first."""
_MAX_NVLINKS = 18
_MOST_PROCESSES = 100
_P2P_NVLINK, _P2P_OK = 2, 0
"""NVML's ``NVML_P2P_CAPS_INDEX_NVLINK`` and ``NVML_P2P_STATUS_OK``."""


def ask(read: Callable[[], Any]) -> Any:
    """Return a fact; None if reading it fails in any way: a driver may do anything."""
    try:
        return read()
    except Exception:  # noqa: BLE001, RUF100 (NVML's errors, missing functions, odd answers)
        return None


def text(value: Any) -> str:
    """Return a text of NVML, which older bindings return as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


# --- CUDA devices --------------------------------------------------------------------------------


def of_devices(nvml: Any, handles: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the facts of each device by its id: ``cuda:0``."""
    found = {name: of_device(nvml, handle) for name, handle in handles.items()}
    for name, facts in found.items():
        facts["interconnect"]["peers"] = {
            other: path
            for other, handle in handles.items()
            if other != name and (path := _path(nvml, handles[name], handle)) is not None
        }
    return found


def of_device(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the facts of one device, or of a MIG instance; every key is there."""
    pci = ask(lambda: text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    return {
        "memory_used_bytes": ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
        "utilization_percent": ask(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        "temperature_celsius": ask(
            lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        ),
        "power_watts": ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        "processes": ask(lambda: _processes(nvml, handle)),
        "compute_capability": ask(lambda: _capability(nvml, handle)),
        "mig": _mig(nvml, handle),
        "numa_node": ask(lambda: _node_of(pci)),
        "interconnect": {
            "pci_bus": pci,
            "pcie_generation": ask(lambda: int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))),
            "pcie_lanes": ask(lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))),
            "pcie_max_generation": ask(
                lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
            ),
            "pcie_max_lanes": ask(lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))),
            "nvlinks": _nvlinks(nvml, handle),
            "peers": {},
        },
    }


def _processes(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    """Return the processes that compute on a device, those of other users too."""
    found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)[:_MOST_PROCESSES]
    return [
        {"pid": int(one.pid), "memory_bytes": ask(lambda one=one: int(one.usedGpuMemory))}
        for one in found
    ]


def _capability(nvml: Any, handle: Any) -> str:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return f"{int(major)}.{int(minor)}"


def _mig(nvml: Any, handle: Any) -> str | None:
    """Return ``instance``, ``enabled`` or ``disabled``; None: the device has no MIG mode."""
    if ask(lambda: nvml.nvmlDeviceIsMigDeviceHandle(handle)):
        return "instance"
    mode = ask(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    return None if mode is None else "enabled" if mode else "disabled"


def _nvlinks(nvml: Any, handle: Any) -> int | None:
    """Return the number of active NVLinks; None: NVML does not report them."""
    states = [
        ask(lambda link=link: nvml.nvmlDeviceGetNvLinkState(handle, link))
        for link in range(_MAX_NVLINKS)
    ]
    known = [state for state in states if state is not None]
    return sum(bool(state) for state in known) if known else None


def _path(nvml: Any, one: Any, other: Any) -> str | None:
    """Return how two devices are connected: ``nvlink``, or the nearest thing that they share."""
    if ask(lambda: nvml.nvmlDeviceGetP2PStatus(one, other, _P2P_NVLINK) == _P2P_OK):
        return "nvlink"
    return _TOPOLOGY.get(ask(lambda: int(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))))


def _node_of(pci: str | None) -> int | None:
    """Return the NUMA node of a PCI device; None: the system has one node, or does not say."""
    if pci is None:
        return None
    domain, bus, device = pci.lower().split(":")  # NVML writes the domain with 8 digits
    found = int((_PCI / f"{domain[-4:]}:{bus}:{device}" / "numa_node").read_text())
    return None if found < 0 else found


def driver_versions(nvml: Any) -> dict[str, str | None]:
    """Return the version of the driver, and the newest CUDA that it supports."""
    number = ask(lambda: int(nvml.nvmlSystemGetCudaDriverVersion()))
    return {
        "driver": ask(lambda: text(nvml.nvmlSystemGetDriverVersion())),
        "driver_cuda": None if number is None else f"{number // 1000}.{number % 1000 // 10}",
    }


# --- the host ------------------------------------------------------------------------------------


def of_host() -> dict[str, Any]:
    """Return the facts of the processors and the memory."""
    memory = psutil.virtual_memory()
    return {
        "cpu": {
            "cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(),
            "numa_nodes": numa_nodes(),
        },
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
    }


def numa_nodes(directory: Path = _NODES) -> list[dict[str, Any]] | None:
    """Return each node's ``node``, ``cpus`` (``0-7,16-23``) and ``memory_bytes``, as Linux says.

    None: the system does not report nodes.
    """
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        paths = [path for path in directory.iterdir() if re.fullmatch(r"node\d+", path.name)]
        for path in sorted(paths, key=lambda path: int(path.name[4:])):
            said = ask(lambda path=path: (path / "meminfo").read_text())
            total = re.search(r"MemTotal:\s*(\d+) kB", said or "")
            found.append(
                {
                    "node": int(path.name[4:]),
                    "cpus": ask(lambda path=path: (path / "cpulist").read_text().strip()),
                    "memory_bytes": None if total is None else int(total[1]) * 1024,
                }
            )
    return found or None
