"""Finds the hardware of a machine: ``python -m worker.devices.hardware`` prints it as JSON.

NVML keeps state and can hang, so the worker never loads it and runs this short-lived process
instead. It runs every minute on every host, so it imports nothing of the service, reads torch's
``version.py`` as text, and imports numpy only to measure a core.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import psutil

_MEASURE_S = 0.15
_WIDTH = 512


def cuda_devices() -> list[dict[str, Any]]:
    """Return the CUDA devices that NVML lists; a MIG instance is a device. No driver: none."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return listed(nvml)
    finally:
        nvml.nvmlShutdown()


def listed(nvml: Any) -> list[dict[str, Any]]:
    """Return the devices that NVML lists; one that it cannot query is unhealthy."""
    found: list[dict[str, Any]] = []
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
    return [device | {"healthy": False, "reason": reason} for device in found]


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
        "name": _text(nvml.nvmlDeviceGetName(handle)),
        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
        "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    }


def _broken(number: int, reason: str) -> dict[str, Any]:
    what = {"id": f"cuda:{number}", "kind": "cuda", "number": number, "name": "unknown"}
    return what | {"healthy": False, "reason": reason}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


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


def main() -> int:
    """Print the hardware other than cores; with ``--measure``, also the FLOP/s of a core."""
    parser = argparse.ArgumentParser(prog="python -m worker.devices.hardware", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="see how fast a core is")
    measured = {"core_flops": core_flops()} if parser.parse_args().measure else {}
    info = {
        "memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch_version()[0],
        "triton": _version("triton"),
        **measured,
    }
    sys.stdout.write(json.dumps({"devices": cuda_devices(), "info": info}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
