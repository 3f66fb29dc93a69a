"""Finds the hardware of a machine: ``python -m worker.devices.hardware`` prints it as JSON.

With ``--follow UUID…`` it prints the usage of these CUDA devices instead, each second. NVML keeps
state and can hang, so the worker never loads it and runs this process instead. It runs every minute
on every host, so it imports nothing of the service, reads torch's ``version.py`` as text, and
imports numpy only to measure a core.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from worker.devices import facts

_MEASURE_S = 0.15
_WIDTH = 512
_FOLLOW_EVERY_S = 1.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


_USAGE: dict[str, tuple[Callable[[Any, Any], float], Callable[[list[float]], float]]] = {
    "gpu_memory_used_bytes": (lambda nvml, one: nvml.nvmlDeviceGetMemoryInfo(one).used, sum),
    "gpu_memory_total_bytes": (lambda nvml, one: nvml.nvmlDeviceGetMemoryInfo(one).total, sum),
    "gpu_percent": (lambda nvml, one: nvml.nvmlDeviceGetUtilizationRates(one).gpu, _mean),
    "gpu_celsius": (
        lambda nvml, one: nvml.nvmlDeviceGetTemperature(one, nvml.NVML_TEMPERATURE_GPU),
        max,
    ),
    "gpu_watts": (lambda nvml, one: nvml.nvmlDeviceGetPowerUsage(one) / 1000, sum),
}
"""How a value is read from one device, and how the values of several devices are joined."""


class CudaInventory(NamedTuple):
    """What NVML reports."""

    devices: list[dict[str, Any]] = []  # noqa: RUF012 (an empty one is never changed)
    """A MIG instance is a device."""
    facts: dict[str, dict[str, Any]] = {}  # noqa: RUF012
    """By the id of the device."""
    versions: dict[str, str | None] = {}  # noqa: RUF012


def cuda_inventory() -> CudaInventory:
    """Return the CUDA devices, their facts, and the driver's versions. No driver: none."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return CudaInventory()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return CudaInventory()
    try:
        return listed(nvml)
    finally:
        nvml.nvmlShutdown()


def listed(nvml: Any) -> CudaInventory:
    """Return what NVML reports; a device that it cannot query is unhealthy and has no facts."""
    found: list[dict[str, Any]] = []
    handles: dict[str, Any] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            for part in _parts(nvml, handle):
                found.append(_device(nvml, part, len(found)))
                handles[found[-1]["id"]] = part
        except nvml.NVMLError as error:
            found.append(_broken(len(found), str(error)))
    version, built = torch_version()
    if not built:
        reason = f"torch {version} is not built for CUDA"
        found = [device | {"healthy": False, "reason": reason} for device in found]
    return CudaInventory(found, facts.of_devices(nvml, handles), facts.driver_versions(nvml))


def _parts(nvml: Any, handle: Any) -> list[Any]:
    """Return the MIG instances of a device in MIG mode, else the device itself."""
    try:
        split = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:
        return [handle]  # older devices have no MIG mode
    if not split:
        return [handle]
    parts: list[Any] = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except nvml.NVMLError:
            continue  # no instance has this index
    return parts


def _device(nvml: Any, handle: Any, number: int) -> dict[str, Any]:
    return {
        "id": f"cuda:{number}",
        "kind": "cuda",
        "number": number,
        "name": facts.text(nvml.nvmlDeviceGetName(handle)),
        "uuid": facts.text(nvml.nvmlDeviceGetUUID(handle)),
        "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    }


def _broken(number: int, reason: str) -> dict[str, Any]:
    what = {"id": f"cuda:{number}", "kind": "cuda", "number": number, "name": "unknown"}
    return what | {"healthy": False, "reason": reason}


def torch_version() -> tuple[str | None, bool]:
    """Return the version of torch and whether it is built for CUDA, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, False
    path = Path(spec.origin).with_name("version.py")
    text = path.read_text() if path.exists() else ""
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*=\s*(.+)$", text, re.MULTILINE)
    built = cuda is not None and cuda.group(1).strip() != "None"
    return (version.group(1) if version else None), built


def _version(package: str) -> str | None:
    """Return the installed version of a package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def core_flops() -> float:
    """Return the FLOP/s of this core: the best of short matrix products, despite other load."""
    import numpy as np  # noqa: PLC0415 (only to measure)

    with_itself = np.ones((_WIDTH, _WIDTH), np.float32)
    product = np.empty_like(with_itself)
    best_s, end = float("inf"), time.perf_counter() + _MEASURE_S
    while (began := time.perf_counter()) < end:
        np.matmul(with_itself, with_itself, out=product)
        best_s = min(best_s, time.perf_counter() - began)
    return 2 * _WIDTH**3 / best_s


def usage(nvml: Any, handles: Sequence[Any]) -> dict[str, float]:
    """Return sums of memory and power, the mean load, and the highest temperature of devices.

    Values that a device does not report are missing: a MIG instance has no load of its own.
    """
    figures: dict[str, float] = {}
    for name, (ask, join) in _USAGE.items():
        values: list[float] = []
        for handle in handles:
            with contextlib.suppress(nvml.NVMLError):
                values.append(float(ask(nvml, handle)))
        if values:
            figures[name] = join(values)
    return figures


def follow(uuids: Sequence[str]) -> int:
    """Print the usage of devices until the reader is gone."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    except Exception:  # noqa: BLE001, RUF100 (no driver, no library, no such device)
        return 1
    threading.Thread(target=_end_with_reader, daemon=True).start()
    while True:
        sys.stdout.write(json.dumps(usage(nvml, handles)) + "\n")
        sys.stdout.flush()
        time.sleep(_FOLLOW_EVERY_S)


def _end_with_reader() -> None:
    """End when the pipe from the reader closes, however the reader ended."""
    sys.stdin.read()
    os._exit(0)


def main() -> int:
    """Print the hardware other than cores; with ``--measure``, also the FLOP/s of a core."""
    parser = argparse.ArgumentParser(prog="python -m worker.devices.hardware", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="see how fast a core is")
    parser.add_argument("--follow", nargs="+", metavar="UUID", help="print the usage of devices")
    arguments = parser.parse_args()
    if arguments.follow:
        return follow(arguments.follow)
    measured = {"core_flops": core_flops()} if arguments.measure else {}
    cuda = cuda_inventory()
    info = {
        **facts.of_host(),
        "measured_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "devices": cuda.facts,
        "versions": cuda.versions,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch_version()[0],
        "triton": _version("triton"),
        **measured,
    }
    sys.stdout.write(json.dumps({"devices": cuda.devices, "info": info}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
