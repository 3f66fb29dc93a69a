"""What the engine needs of a device, with only the CPU: `tests/accelerator` has the rest."""

import pytest
import torch
from torch.distributed.distributed_c10d import Backend, BackendConfig

from engine.__main__ import _device
from engine.checkpoint.training_state import Generators
from engine.core import device
from engine.core.timing import HostClock, clock_of
from engine.distributed.group import backends
from engine.training.failures import classify
from glasshouse.errors import DeviceFailed, OutOfMemory
from glasshouse.spec import Devices

CPU = torch.device("cpu")
NO_ACCELERATOR = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")


def test_an_assignment_names_the_first_visible_device():
    assert device.named("cpu") == CPU
    assert device.named("cuda") == torch.device("cuda", 0)
    assert [device.is_accelerator(device.named(kind)) for kind in ("cpu", "meta", "xpu")] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")],
)
def test_processes_have_a_backend_for_messages_of_the_host_beside_that_of_the_device(
    kind, expected, monkeypatch
):
    """Without a name, torch creates that of the accelerator only."""
    assert backends(torch.device(kind)) == expected
    found = BackendConfig(Backend(expected)).get_device_backend_map()
    assert {"cpu", kind} <= found.keys()
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device(kind))
    assert [*BackendConfig(Backend("undefined")).get_device_backend_map()] == [kind]


@NO_ACCELERATOR
def test_the_cpu_has_nothing_of_an_accelerator():
    assert device.visible() == device.in_use() == []
    assert device.memory_caps() == {}
    assert device.peak_bytes() is None
    device.synchronize(CPU)
    device.seed_all(1)
    assert isinstance(clock_of(CPU), HostClock)


@NO_ACCELERATOR
def test_a_checkpoint_of_a_device_that_is_missing_restores_the_cpus_generator():
    torch.manual_seed(5)
    saved = {**Generators().state(), "cuda.0": torch.zeros(16, dtype=torch.uint8)}
    expected = torch.rand(3)
    torch.manual_seed(6)
    Generators().restore(saved)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", OutOfMemory),
        ("HIP error: out of memory", OutOfMemory),
        ("MPS backend out of memory (MPS allocated: 1.00 GB)", OutOfMemory),
        ("HIP error: an illegal memory access was encountered", DeviceFailed),
        ("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", DeviceFailed),
    ],
)
def test_the_failures_of_each_backend_have_the_same_names(text: str, kind: type):
    failure = classify(RuntimeError(text))
    assert type(failure) is kind
    if kind is OutOfMemory:
        assert failure.as_dict()["memory"]["where"] == "device"


def test_a_job_on_cuda_without_the_service_has_the_threads_that_it_names():
    assert _device(Devices(type="cuda", threads=2)) == {"type": "cuda", "threads": 2}
    assert _device(Devices(type="cuda")) == {"type": "cuda", "threads": None}
