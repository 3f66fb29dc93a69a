"""What hardware a machine has: ``python -m worker.inventory`` prints it as JSON and ends.

A short-lived process: NVML keeps state and can hang, so the worker asks it from outside and
never loads it. torch is not imported; its ``version.py`` is read as text.
"""

import dataclasses
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from models.settings import Settings
from models.workers import FoundDevice
from worker import peak

TIMEOUT_S = 30.0
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cpu_devices(cores: int) -> list[FoundDevice]:
    """One device per core that jobs may use; a core is a share of the processor, not a place."""
    name = platform.processor() or platform.machine()
    return [FoundDevice(f"cpu:{number}", "cpu", number, name) for number in range(cores)]


def num_cores(settings: Settings) -> int:
    """Cores that jobs may use: as configured, else what this process may run on."""
    if settings.cpu_cores is not None:
        return settings.cpu_cores
    may = getattr(os, "sched_getaffinity", None)
    cores = len(may(0)) if may is not None else os.cpu_count() or 1
    return max(1, min(cores, _quota_cores() or cores))


def cuda_devices() -> list[FoundDevice]:
    """CUDA devices through NVML, by UUID; a MIG instance is a device. No driver: none."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001, RUF100 (no driver, no library: a machine without CUDA)
        return []
    try:
        return listed(nvml)
    finally:
        nvml.nvmlShutdown()


def take(*, measure: bool = False) -> dict[str, Any]:
    """The inventory as the process prints it; with ``measure``, also what a core can do."""
    settings = Settings()
    measured = {"core_flops": peak.core_flops()} if measure else {}
    devices = cpu_devices(num_cores(settings)) + cuda_devices()
    return {
        "devices": [dataclasses.asdict(device) for device in devices],
        "info": {
            "memory_bytes": psutil.virtual_memory().total,
            "platform": platform.platform(),
            "python": platform.python_version(),
            "torch": torch_version()[0],
            **measured,
        },
    }


def ask(*, measure: bool = False) -> tuple[list[FoundDevice], dict[str, Any]]:
    """Take the inventory in a process of its own.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: it failed or hung.
    """
    done = subprocess.run(  # noqa: S603 (a list)
        [sys.executable, "-m", "worker.inventory", *(["--measure"] if measure else [])],
        env=peak.single_threaded(),
        capture_output=True,
        check=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    found = json.loads(done.stdout)
    return [FoundDevice(**device) for device in found["devices"]], found["info"]


def distrusted(known: list[FoundDevice], reason: str) -> list[FoundDevice]:
    """What stays of an inventory when the next one fails: its CUDA devices are not healthy."""
    return [
        dataclasses.replace(device, healthy=False, reason=f"the inventory failed: {reason}")
        if device.kind == "cuda"
        else device
        for device in known
    ]


def withheld(found: list[FoundDevice], held: Mapping[str, str]) -> list[FoundDevice]:
    """An inventory in which the devices that something still has are not healthy, with why."""
    return [
        dataclasses.replace(device, healthy=False, reason=held[device.id])
        if device.id in held
        else device
        for device in found
    ]


def torch_version() -> tuple[str | None, bool]:
    """The installed torch and whether it is built for CUDA, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, False
    path = Path(spec.origin).with_name("version.py")
    text = path.read_text() if path.exists() else ""
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*=\s*(.+)$", text, re.MULTILINE)
    built = cuda is not None and cuda.group(1).strip() != "None"
    return (version.group(1) if version else None), built


def listed(nvml: Any) -> list[FoundDevice]:
    """The devices that the driver's library lists; one that it cannot speak to is unhealthy."""
    found: list[FoundDevice] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            for part in _parts(nvml, handle):
                found.append(_device(nvml, part, len(found)))
        except nvml.NVMLError as error:
            found.append(_broken(len(found), str(error)))
    version, built = torch_version()
    if built:
        return found
    reason = f"torch {version} is not built for CUDA"
    return [dataclasses.replace(device, healthy=False, reason=reason) for device in found]


def _parts(nvml: Any, handle: Any) -> list[Any]:
    """The MIG instances of a device that is split, else the device itself."""
    try:
        split = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:
        return [handle]  # older devices cannot be split
    if not split:
        return [handle]
    parts: list[Any] = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except nvml.NVMLError:
            continue  # this place holds no instance
    return parts


def _device(nvml: Any, handle: Any, number: int) -> FoundDevice:
    return FoundDevice(
        id=f"cuda:{number}",
        kind="cuda",
        number=number,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _broken(number: int, reason: str) -> FoundDevice:
    name = "unknown"
    return FoundDevice(f"cuda:{number}", "cuda", number, name, healthy=False, reason=reason)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _quota_cores() -> int | None:
    try:
        quota, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else math.ceil(int(quota) / int(period))


def main() -> int:
    """Print the inventory."""
    sys.stdout.write(json.dumps(take(measure="--measure" in sys.argv)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
