"""Usage of CUDA devices: ``python -m worker.devices.gpus UUID…`` prints a JSON line a second.

A process of its own: NVML keeps state and can hang, so the worker asks it from outside and never
loads it. One that hangs or ends gives no more figures, and nobody waits for it.
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
    """The process as the supervisor holds it."""

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
        """The newest figures; empty where there are none of the last seconds."""
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
    """The figures of devices: sums of memory and power, the mean load, the highest temperature.

    What a device does not tell (a MIG instance has no load of its own) is left out.
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
    """Print figures until the reader is gone."""
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
    """The pipe from the reader ends with it, however that ends."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
