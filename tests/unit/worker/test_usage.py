import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from worker.attempt.records import Shipment, Sorter
from worker.devices import hardware
from worker.devices.usage import EVERY_S, GpuUsageReader, Usage

BURNER = """
import sys, threading, time
block = bytearray(b"x" * 200_000_000)
threads = [threading.Thread(target=time.sleep, args=(60,), daemon=True) for _ in range(3)]
[thread.start() for thread in threads]
print("ready", flush=True)
end = time.process_time() + 0.6
while time.process_time() < end: pass
print("burnt", flush=True)
sys.stdin.readline()
with open(sys.argv[1], "wb", buffering=0) as file:
    file.write(b"y" * 20_000_000)
    import os; os.fsync(file.fileno())
print("written", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def burner(tmp_path):
    """A process of its own group that holds 200 MB and burns 0.6 s of one core when told."""
    process = subprocess.Popen(
        [sys.executable, "-c", BURNER, str(tmp_path / "written")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    yield process
    process.kill()
    process.communicate()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_figures_are_those_of_a_job_that_uses_known_amounts(burner, tmp_path):
    assert burner.stdout.readline() == "ready\n"
    clock = Clock()
    began = time.process_time()
    usage = Usage(burner.pid, clock=clock)
    assert usage.figures() == {}
    assert burner.stdout.readline() == "burnt\n"
    clock.now += 2.0
    figures = usage.figures()
    # 0.6 s of a core, some of it before the first look, in what the clock says were 2 s
    assert 10 <= figures["system/cpu_percent"] <= 35
    assert 200e6 <= figures["system/memory_bytes"] <= 260e6
    assert figures["system/threads"] == 4
    assert figures["system/disk_write_bytes_per_s"] < 1e6
    assert usage.figures() == {}, "a second has not passed"
    burner.stdin.write("\n")
    burner.stdin.flush()
    assert burner.stdout.readline() == "written\n"
    clock.now += 2.0
    figures = usage.figures()
    assert figures["system/disk_write_bytes_per_s"] == pytest.approx(10e6, rel=0.1)
    assert figures["system/cpu_percent"] < 20
    assert figures["system/host_network_sent_bytes_per_s"] >= 0
    assert time.process_time() - began < 1.0, "looking is cheap"
    usage.close()


def test_processes_that_the_job_started_count_and_those_of_others_do_not(tmp_path):
    script = (
        "import subprocess; p = subprocess.Popen(['sleep', '60']); print(1, flush=True); p.wait()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, process_group=0
    )
    try:
        parent.stdout.readline()
        clock = Clock()
        usage = Usage(parent.pid, clock=clock)
        clock.now += EVERY_S
        assert usage.figures()["system/threads"] == 2
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()
    clock.now += EVERY_S
    assert usage.figures() == {}, "the job has ended"


def test_a_job_that_has_reported_no_step_has_no_figures_yet(tmp_path):
    claim = SimpleNamespace(job="job_1", attempt=1)
    sorter = Sorter(claim, "me", tmp_path)  # pyright: ignore[reportArgumentType]
    shipment = Shipment()
    sorter.add_usage({"system/threads": 2.0}, shipment)
    assert shipment.batch.metrics == []
    record = {"type": "metrics", "at": "2026-01-01T00:00:00.000Z", "step": 7, "epoch": 1}
    shipment = sorter.sort([record | {"values": {"loss": 1.0}}], (0, 10))
    sorter.add_usage({"system/threads": 2.0}, shipment)
    row = {"step": 7, "epoch": 1, "name": "system/threads", "value": 2.0}
    assert shipment.batch.metrics[1] == row
    assert shipment.batch.events[1].type == "metrics"
    assert list(shipment.batch.job["summary"]) == ["loss"]


class Nvml:
    """What the driver's library says of two devices, the second of which tells little."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=(handle + 1) * 10, total=100)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        if handle == 1:
            raise self.NVMLError
        return SimpleNamespace(gpu=40)

    def nvmlDeviceGetTemperature(self, handle: int, _sensor: int) -> int:  # noqa: N802
        return 50 + handle

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return 30_000


def test_figures_of_several_devices_are_joined_and_what_one_does_not_report_is_omitted():
    assert hardware.usage(Nvml(), [0, 1]) == {
        "gpu_memory_used_bytes": 30,
        "gpu_memory_total_bytes": 200,
        "gpu_percent": 40,
        "gpu_celsius": 51,
        "gpu_watts": 60,
    }


def test_devices_that_cannot_be_queried_give_no_metrics():
    reader = GpuUsageReader(["GPU-none"])
    try:
        assert reader.newest() == {}
    finally:
        reader.close()
