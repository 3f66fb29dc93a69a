"""Lists the devices of this worker: its CPU cores, and what `worker.devices.hardware` finds."""

import contextlib
import dataclasses
import functools
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

from models.fleet.workers import FoundDevice
from models.settings import Settings

TIMEOUT_S = 30.0
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CPUINFO = Path("/proc/cpuinfo")
_SYSCTL = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
_SINGLE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment of the measuring process: it must measure one core, not all."""


def cpu_devices(cores: int) -> list[FoundDevice]:
    """Return one device per core that jobs may use. A device is a share of the CPU, not pinned."""
    name = processor_name()
    return [FoundDevice(f"cpu:{number}", "cpu", number, name) for number in range(cores)]


@functools.cache
def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the processor's model if the system reports it, else its architecture: ``x86_64``."""
    name = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "darwin":
            name = subprocess.run(  # noqa: S603 (a list)
                _SYSCTL, capture_output=True, text=True, check=True, timeout=TIMEOUT_S
            ).stdout.strip()
        else:
            text = cpuinfo.read_text(errors="replace")
            found = re.search(r"^model name\s*:[ \t]*(.+?)\s*$", text, re.MULTILINE)
            name = found[1] if found else ""
    return name or platform.processor() or platform.machine()


def num_cores(settings: Settings) -> int:
    """Return how many cores jobs may use: as configured, else those this process may run on."""
    if settings.cpu_cores is not None:
        return settings.cpu_cores
    may = getattr(os, "sched_getaffinity", None)
    cores = len(may(0)) if may is not None else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no limit, or no cgroup of version 2
        quota, period = map(int, _QUOTA.read_text().split())
        cores = max(1, min(cores, math.ceil(quota / period)))
    return cores


def ask(settings: Settings, *, measure: bool = False) -> tuple[list[FoundDevice], dict[str, Any]]:
    """Return the devices and facts about the host; a process of its own finds the CUDA devices.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: it failed or hung.
    """
    done = subprocess.run(  # noqa: S603 (a list)
        [sys.executable, "-m", "worker.devices.hardware", *(["--measure"] if measure else [])],
        env={**os.environ, **_SINGLE_THREAD},
        capture_output=True,
        check=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    found = json.loads(done.stdout)
    devices = [FoundDevice(**device) for device in found["devices"]]
    cores, info = num_cores(settings), found["info"]
    info["cpu"] |= {"name": processor_name(), "job_cores": cores}
    return cpu_devices(cores) + devices, info


def mark_unhealthy(known: list[FoundDevice], reason: str) -> list[FoundDevice]:
    """Return the last inventory after the next one failed: its CUDA devices are unhealthy."""
    reason = f"the inventory failed: {reason}"
    return mark_withheld(known, {one.id: reason for one in known if one.kind == "cuda"})


def mark_withheld(found: list[FoundDevice], held: Mapping[str, str]) -> list[FoundDevice]:
    """Return an inventory in which the devices in ``held`` are unhealthy, with the reason."""
    return [
        dataclasses.replace(device, healthy=False, reason=held[device.id])
        if device.id in held
        else device
        for device in found
    ]
