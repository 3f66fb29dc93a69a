"""Reads the usage of CUDA devices: ``python -m worker.devices.gpus UUID…`` prints JSON each second.

NVML keeps state and can hang, so the worker never loads it and runs this process instead. If the
process hangs or ends, there are no more values, and nothing waits for it.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

EVERY_S = 1.0
_STALE_S = 5.0


class GpuUsageReader:
    """The supervisor's handle of the process."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._newest: tuple[float, dict[str, float]] = (0.0, {})
        self._process = subprocess.Popen(  # noqa: S603 (a list, of identifiers of devices)
            [sys.executable, "-m", "worker.devices.gpus", *uuids],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        threading.Thread(target=self._follow, name="gpus", daemon=True).start()

    def newest(self) -> dict[str, float]:
        """Return the newest values; empty if they are older than 5 s."""
        at, figures = self._newest
        return dict(figures) if time.monotonic() - at < _STALE_S else {}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _follow(self) -> None:
        out, into = self._process.stdout, self._process.stdin
        if out is None or into is None:
            return
        with out, into:
            for line in out:
                with contextlib.suppress(ValueError):
                    self._newest = (time.monotonic(), json.loads(line))


def read(nvml: Any, handles: Sequence[Any]) -> dict[str, float]:
    """Return sums of memory and power, the mean load, and the highest temperature of devices.

    Values that a device does not report are missing: a MIG instance has no load of its own.
    """
    found: dict[str, list[float]] = {}
    for handle in handles:
        for name, ask in _questions(nvml, handle).items():
            with contextlib.suppress(nvml.NVMLError):
                found.setdefault(name, []).append(float(ask()))
    return {name: _JOINED.get(name, sum)(values) for name, values in found.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _questions(nvml: Any, handle: Any) -> dict[str, Callable[[], Any]]:
    return {
        "gpu_memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "gpu_memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
        "gpu_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "gpu_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "gpu_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    }


_JOINED: dict[str, Any] = {"gpu_percent": _mean, "gpu_celsius": max}


def main(uuids: Sequence[str]) -> int:
    """Print values until the reader is gone."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    except Exception:  # noqa: BLE001, RUF100 (no driver, no library, no such device)
        return 1
    threading.Thread(target=_end_with_reader, daemon=True).start()
    while True:
        sys.stdout.write(json.dumps(read(nvml, handles)) + "\n")
        sys.stdout.flush()
        time.sleep(EVERY_S)


def _end_with_reader() -> None:
    """End when the pipe from the reader closes, however the reader ended."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
