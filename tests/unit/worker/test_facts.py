"""What the driver's library and the system report of devices, and what they may answer instead."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from api.schemas.inspection import DEVICE_FACTS, DeviceProcess, Interconnect
from worker.devices import facts, hardware


class NVMLError(Exception):
    pass


def told(**more: Any) -> SimpleNamespace:
    """A driver's library that knows all facts of two devices."""
    known = {
        "NVMLError": NVMLError,
        "NVML_DEVICE_MIG_ENABLE": 1,
        "nvmlDeviceGetHandleByIndex": lambda index: f"d{index}",
        "nvmlDeviceGetName": lambda handle: b"H200",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetMigMode": lambda handle: (0, 0),
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80, used=30),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=90),
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
        "nvmlDeviceGetPowerUsage": lambda handle: 350_500,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            SimpleNamespace(pid=7, usedGpuMemory=20),
            SimpleNamespace(pid=8, usedGpuMemory=None),
        ],
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceIsMigDeviceHandle": lambda handle: 0,
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=b"00000000:3B:00.0"),
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 1,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 8,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetNvLinkState": lambda handle, link: link < 4,
        "nvmlDeviceGetP2PStatus": lambda one, other, index: 0,
        "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: 30,
        "nvmlSystemGetDriverVersion": lambda: b"535.129.03",
        "nvmlSystemGetCudaDriverVersion": lambda: 12_020,
    }
    return SimpleNamespace(**{**known, **more})


def test_the_facts_of_a_device_are_those_of_the_driver():
    found = hardware.listed(told())
    assert found.versions == {"driver": "535.129.03", "driver_cuda": "12.2"}
    assert found.devices[0]["name"] == "H200"
    told_of = found.facts["cuda:0"]
    assert told_of["memory_used_bytes"] == 30
    assert told_of["utilization_percent"] == 90
    assert told_of["temperature_celsius"] == 61
    assert told_of["power_watts"] == 350.5
    assert told_of["processes"] == [
        {"pid": 7, "memory_bytes": 20},
        {"pid": 8, "memory_bytes": None},
    ]
    assert told_of["compute_capability"] == "9.0"
    assert told_of["mig"] == "disabled"
    assert told_of["interconnect"] == {
        "pci_bus": "00000000:3B:00.0",
        "pcie_generation": 1,
        "pcie_lanes": 8,
        "pcie_max_generation": 5,
        "pcie_max_lanes": 16,
        "nvlinks": 4,
        "peers": {"cuda:1": "nvlink"},
    }
    apart = hardware.listed(told(nvmlDeviceGetP2PStatus=lambda one, other, index: 1))
    assert apart.facts["cuda:1"]["interconnect"]["peers"] == {"cuda:0": "host_bridge"}
    json.dumps(found)


def fails(*_arguments: Any) -> Any:
    raise NVMLError("Insufficient Permissions")


@pytest.mark.parametrize(
    "answer", [fails, lambda *_: None, lambda *_: "?", lambda *_: object(), lambda *_: [object()]]
)
def test_a_driver_that_answers_nothing_useful_hides_no_device(answer: Any):
    listing = ("Count", "HandleByIndex", "MigMode", "Name", "UUID")
    kept = {f"nvmlDeviceGet{name}" for name in listing}
    whole = told()
    odd = {name: answer for name in vars(whole) if name.startswith("nvml") and name not in kept}
    odd["nvmlDeviceGetMemoryInfo"] = lambda handle: SimpleNamespace(total=80, used=answer())
    found = hardware.listed(told(**odd))
    assert [device["id"] for device in found.devices] == ["cuda:0", "cuda:1"]
    json.dumps(found)
    for told_of in found.facts.values():
        Facts.model_validate(told_of)


class Facts(BaseModel):
    """The types of the facts, as the API documents them."""

    memory_used_bytes: int | None
    utilization_percent: float | None
    temperature_celsius: float | None
    power_watts: float | None
    processes: list[DeviceProcess] | None
    compute_capability: str | None
    mig: str | None
    numa_node: int | None
    interconnect: Interconnect


def test_every_fact_that_the_api_documents_is_reported():
    assert hardware.listed(told()).facts["cuda:0"].keys() == set(DEVICE_FACTS)
    assert Facts.model_fields.keys() == set(DEVICE_FACTS)


def test_numa_nodes_are_read_from_the_system(tmp_path: Path):
    assert facts.numa_nodes(tmp_path / "none") is None
    for number, cpus in ((0, "0-7"), (10, "8-15")):
        node = tmp_path / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(f"{cpus}\n")
        (node / "meminfo").write_text(f"Node {number} MemTotal:  1024 kB\nNode 0 MemFree: 1 kB\n")
    (tmp_path / "node2").mkdir()
    assert facts.numa_nodes(tmp_path) == [
        {"node": 0, "cpus": "0-7", "memory_bytes": 1 << 20},
        {"node": 2, "cpus": None, "memory_bytes": None},
        {"node": 10, "cpus": "8-15", "memory_bytes": 1 << 20},
    ]
