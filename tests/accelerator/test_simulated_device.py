"""The simulated accelerator fails where CUDA would: each of the ways is seen here."""

import ctypes
import errno
import os
from pathlib import Path

import pytest
import torch

from engine.training.failures import StepFailed, classify
from glasshouse.errors import DataFailed, OutOfMemory
from tests.accelerator.exclusions import EXCLUDED, reason_for

ENGINE_TESTS = Path(__file__).parents[1] / "unit" / "engine"
GPU_TESTS = Path(__file__).parents[1] / "gpu"
DEVICE = torch.device("simulated", 0)
OTHER = torch.device("simulated", 1)
module = torch.get_device_module("simulated")


def ones(num: int = 3, device: torch.device = DEVICE) -> torch.Tensor:
    return torch.ones(num, device=device)


def landing(num: int = 3) -> torch.Tensor:
    return torch.empty(num, pin_memory=True)


# --- the queue -----------------------------------------------------------------------------------


def test_operations_run_when_the_host_waits_and_not_before():
    torch.accelerator.synchronize()
    before = module.num_run()
    x = ones() * 2 + 1
    assert module.num_run() == before
    assert module.num_queued(0) == 3
    assert x.tolist() == [3.0, 3.0, 3.0]
    assert module.num_run() == before + 4  # and the copy
    assert module.num_queued(0) == 0


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: torch.accelerator.synchronize(),
        lambda x: torch.accelerator.current_stream().synchronize(),
        lambda x: torch.accelerator.current_stream().record_event().synchronize(),
        lambda x: x.cpu(),
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: bool((x > 0).all()),
    ],
)
def test_whatever_waits_runs_the_queue(wait):
    x = ones() + 1
    assert module.num_queued(0) > 0
    waits = module.num_waits()
    wait(x)
    assert module.num_queued(0) == 0
    assert module.num_waits() == waits + 1


def test_the_queues_of_two_devices_are_their_own():
    x, y = ones() + 1, ones(3, OTHER) + 2
    x.cpu()
    assert (module.num_queued(0), module.num_queued(1)) == (0, 2)
    assert y.to(DEVICE).tolist() == [3.0] * 3


def test_a_stream_waits_for_an_event_of_another():
    first, second = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    x = ones() + 1
    event = first.record_event()
    second.wait_event(event)
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(second)
    y = x * 3
    torch.accelerator.set_stream(before)
    assert not event.query()
    second.synchronize()
    assert event.query()
    assert y.tolist() == [6.0] * 3


def test_a_stream_that_does_not_wait_reads_what_is_not_there_yet():
    x = ones() + 1
    before = torch.accelerator.current_stream()
    second = torch.Stream(DEVICE)
    torch.accelerator.set_stream(second)
    y = x * 3
    second.synchronize()
    torch.accelerator.set_stream(before)
    assert y.cpu().isnan().all()


def test_events_measure_the_time_of_the_operations_between_them():
    began, ended = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    began.record()
    x = torch.randn(400, 400, device=DEVICE)
    (x @ x).sum()
    ended.record()
    with pytest.raises(RuntimeError, match="completed"):
        began.elapsed_time(ended)
    ended.synchronize()
    assert began.elapsed_time(ended) > 0
    without = torch.Event(DEVICE)
    without.record()
    without.synchronize()
    with pytest.raises((RuntimeError, ValueError), match="timing"):
        began.elapsed_time(without)


def test_a_device_continues_between_two_questions_of_the_host():
    ones()
    event = torch.accelerator.current_stream().record_event()
    assert [event.query() for _ in range(2)] == [False, True]


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.numpy(),
        memoryview,
        lambda x: torch.frombuffer(x, dtype=torch.float32),
    ],
)
def test_the_host_does_not_read_its_memory(read):
    with pytest.raises((TypeError, ValueError)):
        read(ones())


def test_its_addresses_cannot_be_read():
    x = ones()
    torch.accelerator.synchronize()
    reading, writing = os.pipe()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.write(writing, ctypes.c_void_p(x.data_ptr()), 4) == -1
    assert ctypes.get_errno() == errno.EFAULT
    os.close(reading)
    os.close(writing)


def test_memory_that_nothing_was_written_to_is_poisoned():
    assert torch.empty(4, device=DEVICE).cpu().isnan().all()
    assert landing().isnan().all()
    assert torch.empty(2, dtype=torch.int64, device=DEVICE).tolist() == [-1, -1]


def test_a_host_read_without_waiting_gets_no_values():
    found = landing().fill_(0.5)
    found.copy_(ones() * 7, non_blocking=True)
    assert found.isnan().all()
    event = torch.accelerator.current_stream().record_event()
    assert found.isnan().all()
    event.synchronize()
    assert found.tolist() == [7.0] * 3


def test_memory_that_is_not_pinned_is_copied_before_the_call_returns():
    found = torch.zeros(3).copy_(ones() * 7, non_blocking=True)
    assert found.tolist() == [7.0] * 3
    given = torch.ones(3)
    arrived = given.to(DEVICE, non_blocking=True)
    given.fill_(9.0)
    assert arrived.tolist() == [1.0] * 3


def test_staging_memory_that_is_reused_too_early_changes_what_arrives():
    staging = landing().fill_(1.0)
    first = staging.to(DEVICE, non_blocking=True)
    staging.fill_(2.0)
    assert first.tolist() == [2.0] * 3
    second = staging.to(DEVICE, non_blocking=True)
    torch.accelerator.synchronize()
    staging.fill_(3.0)
    assert second.tolist() == [2.0] * 3


def test_staging_memory_that_is_freed_lives_until_it_was_read():
    arrived = [landing(1000).fill_(n).to(DEVICE, non_blocking=True) for n in range(20)]
    assert [float(x.mean()) for x in arrived] == [*map(float, range(20))]


@pytest.mark.parametrize("other", [torch.ones(3), ones(3, OTHER)], ids=["cpu", "simulated:1"])
def test_tensors_of_two_devices_are_not_mixed(other):
    for mixed in (
        lambda: ones() + other,
        lambda: torch.cat([ones(), other]),
        lambda: torch.nn.functional.mse_loss(ones(), other),
        lambda: torch.where(ones() > 0, ones(), other),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mixed()


def test_a_number_of_the_host_may_be_an_operand():
    number = torch.tensor(2.0)
    doubled = ones() * number
    number.fill_(5.0)
    assert doubled.tolist() == [2.0] * 3


@pytest.mark.parametrize("index", [2, 7])
def test_a_device_that_does_not_exist_is_refused(index):
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device=f"simulated:{index}")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.accelerator.set_device_index(index)
    event = torch.Event(DEVICE)
    event.record(torch.accelerator.current_stream(DEVICE))
    with pytest.raises(RuntimeError, match=r"device"):
        event.record(torch.accelerator.current_stream(OTHER))


def test_an_index_out_of_range_is_reported_at_the_next_wait():
    layer = torch.nn.Embedding(4, 2).to(DEVICE)
    layer(torch.tensor([9], device=DEVICE))
    with pytest.raises(RuntimeError, match="device-side assert") as raised:
        torch.accelerator.synchronize()
    assert isinstance(classify(StepFailed(0, raised.value)), DataFailed)
    torch.accelerator.synchronize()


def test_wrong_shapes_are_reported_by_the_call():
    with pytest.raises(RuntimeError):
        ones(3) @ ones(4)
    with pytest.raises(RuntimeError):
        ones(3) + ones(4)


def test_memory_has_a_limit_and_its_values_are_reported():
    module.set_capacity(2**24)
    held = torch.empty(2**22, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(2**24, dtype=torch.uint8, device=DEVICE)
    failure = classify(StepFailed(3, raised.value))
    assert isinstance(failure, OutOfMemory)
    memory = failure.as_dict()["memory"]
    assert (memory["where"], memory["requested_bytes"]) == ("device", 2**24)
    assert memory["limit_bytes"] == 2**24
    assert 0 < memory["free_bytes"] <= 2**24 - held.nbytes
    assert memory["peak_bytes"] >= held.nbytes
    torch.empty(2**24, dtype=torch.uint8, device=OTHER)  # the other has its own


def test_memory_is_free_once_the_operations_that_use_it_have_run():
    module.set_capacity(module.memory_allocated(0) + 2**22)
    for number in range(40):
        torch.full((2**20,), number, dtype=torch.uint8, device=DEVICE)


# --- random numbers ------------------------------------------------------------------------------


def test_each_device_has_a_generator_of_its_own():
    torch.manual_seed(4)
    assert torch.equal(torch.rand(5, device=DEVICE).cpu(), torch.rand(5, device=OTHER).cpu())
    state = module.get_rng_state(OTHER)
    torch.rand(5, device=DEVICE)
    assert torch.equal(module.get_rng_state(OTHER), state)
    assert not torch.equal(module.get_rng_state(DEVICE), state)


def test_the_state_of_a_generator_is_that_after_the_queued_operations():
    torch.manual_seed(4)
    torch.rand(5, device=DEVICE)
    state, waits = module.get_rng_state(DEVICE), module.num_waits()
    second = torch.rand(5, device=DEVICE)
    module.set_rng_state(state, DEVICE)
    again = torch.rand(5, device=DEVICE)
    assert module.num_waits() == waits
    assert torch.equal(second.cpu(), again.cpu())


def test_it_can_draw_what_the_cpu_draws():
    module.draw_as_host()
    for drawn in (
        lambda device: torch.randn(7, device=device),
        lambda device: torch.nn.functional.dropout(torch.ones(50, device=device), 0.3),
        lambda device: torch.rand(3, 2, device=device).bernoulli(),
    ):
        torch.manual_seed(6)
        expected = [drawn("cpu"), drawn("cpu")]
        torch.manual_seed(6)
        found = [drawn(DEVICE), drawn(DEVICE)]
        assert all(torch.equal(x, y.cpu()) for x, y in zip(expected, found, strict=True))


# --- what does not run on it ---------------------------------------------------------------------


def test_each_excluded_test_exists():
    for start in EXCLUDED:
        file, _, test = start.partition("::")
        paths = [one for one in (ENGINE_TESTS / file, GPU_TESTS / file) if one.exists()]
        assert paths, start
        text = "".join(path.read_text() for path in paths)
        name, _, _ = test.partition("[")
        assert f"def {name}" in text or not name, start
    assert reason_for("tests/unit/engine/test_killed.py::test_any") is not None
    assert reason_for("tests/unit/engine/test_training.py::test_any") is None
