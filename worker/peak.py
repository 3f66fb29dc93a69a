"""How many float32 operations a second a device can do at most: what a job's rate is held against.

A CPU core is measured, once, when its worker starts and nothing runs yet (`worker.hardware`). CUDA
devices are known by their names; of one that is not, and of a MIG instance, nothing is said.
"""

from collections.abc import Sequence
from typing import Any

from models.tables import Device

_TERA = {
    "NVIDIA H200": 66.9,
    "NVIDIA H100 80GB HBM3": 66.9,
    "NVIDIA H100 PCIe": 51.2,
    "NVIDIA A100-SXM4-40GB": 19.5,
    "NVIDIA A100-SXM4-80GB": 19.5,
    "NVIDIA A100-PCIE-40GB": 19.5,
    "NVIDIA A100 80GB PCIe": 19.5,
    "NVIDIA A40": 37.4,
    "NVIDIA A30": 10.3,
    "NVIDIA A10": 31.2,
    "NVIDIA L40S": 91.6,
    "NVIDIA L40": 90.5,
    "NVIDIA L4": 30.3,
    "NVIDIA GeForce RTX 4090": 82.6,
    "NVIDIA GeForce RTX 3090": 35.6,
    "Tesla T4": 8.1,
    "Tesla V100-SXM2-16GB": 15.7,
    "Tesla V100-SXM2-32GB": 15.7,
    "Tesla V100-PCIE-16GB": 14.0,
    "Tesla V100-PCIE-32GB": 14.0,
}
"""By the maker's data sheets, float32 without tensor cores."""


def peak_flops(held: Sequence[Device], info: dict[str, Any]) -> float | None:
    """What a job's devices can do together; None where it is not known of one of them."""
    each = [
        info.get("core_flops") if device.kind == "cpu" else _cuda(device.name) for device in held
    ]
    known = [flops for flops in each if flops is not None]
    return sum(known) if len(known) == len(each) else None


def _cuda(name: str) -> float | None:
    tera = _TERA.get(name)
    return None if tera is None else tera * 1e12
