import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.fleet.workers import FoundDevice
from models.settings import Settings
from worker.app import configuration, make_app
from worker.devices import hardware, inventory

settings = Settings(redis_url="unix:///tmp/v.sock", worker_name="w1")


def test_a_message_is_a_wakeup_and_nothing_else():
    found = make_app(settings).conf
    assert found.accept_content == ["json"]
    assert found.task_serializer == "json"
    assert found.result_backend is None
    assert found.task_ignore_result is True
    assert found.task_acks_late is False
    assert found.task_reject_on_worker_lost is False
    assert found.worker_prefetch_multiplier == 1
    assert found.worker_disable_prefetch is True
    assert found.task_time_limit is None
    assert found.task_soft_time_limit is None
    assert found.broker_connection_max_retries is None
    assert found.broker_connection_retry_on_startup is True
    assert found.worker_cancel_long_running_tasks_on_connection_loss is False
    assert [queue.name for queue in found.task_queues] == [
        "glasshouse.dispatch",
        "glasshouse.worker.w1",
    ]


def test_every_setting_is_one_that_celery_knows():
    from celery.app.defaults import NAMESPACES, flatten

    known = {name for name, _ in flatten(NAMESPACES)}
    assert set(configuration(settings)) <= known


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("worker.process", ("torch", "numpy", "fastapi", "pynvml")),
        ("worker.__main__", ("torch", "numpy", "sqlalchemy", "celery")),  # it delays the start
        (
            "worker.devices.hardware",
            ("sqlalchemy", "pydantic", "numpy", "models"),
        ),  # it runs each minute
    ],
)
@pytest.mark.long
def test_a_process_imports_no_more_than_it_needs(module: str, absent: tuple[str, ...]):
    program = f"import sys, {module}\nprint([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


def test_the_inventory_lists_a_device_per_core():
    devices, info = inventory.ask(settings.model_copy(update={"cpu_cores": 3}))
    assert [device.id for device in devices if device.kind == "cpu"] == ["cpu:0", "cpu:1", "cpu:2"]
    assert info["memory_bytes"] > 0


def test_a_core_is_called_by_its_processor_s_model_where_the_system_reports_it(tmp_path: Path):
    told = tmp_path / "cpuinfo"
    told.write_text(
        "processor\t: 0\nmodel\t\t: 207\nmodel name\t: A Chip 9: fast\n\nprocessor\t: 1\n"
    )
    silent = tmp_path / "of an ARM"
    silent.write_text("processor\t: 0\nBogoMIPS\t: 48.00\n")
    if sys.platform != "darwin":
        assert inventory.processor_name(told) == "A Chip 9: fast"
        for unknown in (silent, tmp_path / "absent"):
            name = inventory.processor_name(unknown)
            assert name == (platform.processor() or platform.machine())
    assert inventory.cpu_devices(1)[0].name == inventory.processor_name()


def test_an_inventory_that_fails_makes_cuda_devices_unhealthy():
    known = [
        *inventory.cpu_devices(1),
        inventory.FoundDevice("cuda:0", "cuda", 0, "a device", uuid="GPU-1"),
    ]
    core, device = inventory.mark_unhealthy(known, "it hung")
    assert core.healthy
    assert not device.healthy
    assert "it hung" in (device.reason or "")


def test_torchs_version_is_read_without_importing_it():
    import torch

    assert hardware.torch_version() == (torch.__version__, torch.version.cuda is not None)


class NVMLError(Exception):
    pass


def handle_of(index: int) -> str:
    if index == 2:
        raise NVMLError("GPU is lost")
    return f"d{index}"


def part_of(handle: str, index: int) -> str:
    if index == 2:
        raise NVMLError("Not Found")
    return f"{handle}m{index}"


NVML = SimpleNamespace(
    NVMLError=NVMLError,
    NVML_DEVICE_MIG_ENABLE=1,
    nvmlDeviceGetCount=lambda: 3,
    nvmlDeviceGetHandleByIndex=handle_of,
    nvmlDeviceGetMigMode=lambda handle: (1, 1) if handle == "d1" else (0, 0),
    nvmlDeviceGetMaxMigDeviceCount=lambda handle: 3,
    nvmlDeviceGetMigDeviceHandleByIndex=part_of,
    nvmlDeviceGetName=lambda handle: "H200",
    nvmlDeviceGetUUID=lambda handle: f"MIG-{handle}" if "m" in handle else f"GPU-{handle}",
    nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 * 2**30),
)
"""The driver's library with a whole device, one split in two, and one that fell off the bus."""


def test_mig_instances_are_devices_and_a_lost_one_is_listed_as_unhealthy():
    found = [FoundDevice(**device) for device in hardware.listed(NVML).devices]
    assert [device.id for device in found] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [device.uuid for device in found[:3]] == ["GPU-d0", "MIG-d1m0", "MIG-d1m1"]
    assert "lost" in (found[3].reason or "") or "not built" in (found[3].reason or "")
    assert not found[3].healthy


def test_a_torch_for_the_cpu_makes_cuda_devices_unhealthy():
    import torch

    if torch.version.cuda is None:
        assert all(
            "not built for CUDA" in device["reason"] for device in hardware.listed(NVML).devices
        )
