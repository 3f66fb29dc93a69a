"""The engine's parts that read from an accelerator or write to it wait where they must.

Each is broken once, and the simulated accelerator shows it.
"""

import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.__main__ import _device as local_device
from engine.core import device, readback
from engine.core.readback import Readback
from engine.core.snapshot import Staging, take
from engine.core.timing import DeviceClock, clock_of
from engine.data.columns import loaded
from engine.learner.side_effects import Randomness
from engine.probes.tensors.captures import CapturePiece, Captures
from engine.training.memory import guard_memory
from glasshouse.errors import SpecFailed
from glasshouse.spec import Devices, MemoryGuard

DEVICE = torch.device("simulated", 0)
OTHER = torch.device("simulated", 1)
module = torch.get_device_module("simulated")


class Hasty(Readback):
    """Does not wait for the event."""

    def _hand_on(self, entry: Any) -> None:
        _, then = entry
        then()


def read_back(reader: Readback) -> list[list[float]]:
    found: list[list[float]] = []
    for number in range(5):
        x = torch.full((2,), float(number), device=DEVICE)
        reader.put([x * 2, x.sum()], found.append)
    reader.poll()
    reader.drain()
    return found


def test_numbers_are_read_when_they_have_arrived():
    expected = [[2.0 * n, 2.0 * n, 2.0 * n] for n in range(5)]
    assert read_back(Readback(DEVICE)) == expected
    hasty = read_back(Hasty(DEVICE))
    assert len(hasty) == 5
    assert all(math.isnan(value) for values in hasty for value in values)


def test_reading_back_does_not_wait_until_it_is_asked_to():
    waits, found = module.num_waits(), []
    reader = Readback(DEVICE)
    for number in range(20):
        reader.put([torch.full((), float(number), device=DEVICE)], found.append)
        reader.poll()
    assert module.num_waits() == waits
    assert found == [[float(n)] for n in range(19)]
    reader.drain()
    assert found[-1] == [19.0]
    assert module.num_waits() == waits + 1


def test_no_more_values_wait_than_the_limit(monkeypatch: Any):
    monkeypatch.setattr(readback, "_MAX_WAITING", 3)
    reader, found = Readback(DEVICE), []
    for number in range(5):
        reader.put([torch.full((), float(number), device=DEVICE)], found.append)
    assert found == [[0.0], [1.0]]
    reader.drain()


def test_values_of_another_device_are_read_on_its_own_stream():
    found: list[list[float]] = []
    reader = Readback(OTHER)
    torch.accelerator.set_device_index(1)
    reader.put([torch.ones(2, device=OTHER) * 3], found.append)
    reader.drain()
    assert found == [[3.0, 3.0]]


def test_values_of_several_devices_are_read_together():
    found: list[list[float]] = []
    reader = Readback(OTHER, is_home=True)
    numbers = [torch.full((2,), 3.0), torch.full((), 5.0), torch.full((1,), 7.0)]
    there = [x.to(device) * 2 for x, device in zip(numbers, (DEVICE, OTHER, DEVICE), strict=True)]
    reader.put(there, found.append)
    reader.drain()
    assert found == [[6.0, 6.0, 10.0, 14.0]]


# --- whole tensors -------------------------------------------------------------------------------


def captured(tmp_path: Path, kind: type[Captures]) -> dict[str, torch.Tensor]:
    records: list[dict[str, Any]] = []
    captures = kind(tmp_path, records.append, num_bytes=2**20)
    for step in range(2):
        x = torch.full((4,), float(step), device=DEVICE)
        captures.offer(CapturePiece(step, "fc", "output"), x + 1)
        captures.finish_step()
    captures.close()
    found = [record for record in records if record["type"] == "captures"]
    return {
        str(record["step"]): load_file(tmp_path / record["file"])[entry["tensor"]]
        for record in found
        for entry in record["tensors"]
    }


class HastyCaptures(Captures):
    """Sends tensors of a device at once."""

    def _close(self, batch: Any) -> None:
        batch.end = self._producer.head
        self._send(batch)


def test_whole_tensors_are_written_when_they_have_arrived(tmp_path: Path):
    found = captured(tmp_path / "a", Captures)
    assert {step: x.tolist() for step, x in found.items()} == {"0": [1.0] * 4, "1": [2.0] * 4}
    hasty = captured(tmp_path / "b", HastyCaptures)
    assert hasty.keys() == found.keys()
    assert all(x.isnan().all() for x in hasty.values())


@pytest.mark.parametrize("last", [DEVICE, OTHER])
def test_whole_tensors_of_two_devices_are_written_when_all_have_arrived(
    last: torch.device, tmp_path: Path
):
    """The event of one device says nothing of the other, which has more to do."""
    records: list[dict[str, Any]] = []
    captures = Captures(tmp_path, records.append, num_bytes=2**20)
    first = OTHER if last == DEVICE else DEVICE
    for one in (last, first):
        x = torch.ones(4, device=one)
        captures.offer(CapturePiece(0, f"on_{one.index}", "output"), x * 2)
    captures.finish_step()
    torch.accelerator.synchronize(first)
    captures.poll()
    assert not records, "the last device has not run yet"
    captures.close()
    (record,) = [record for record in records if record["type"] == "captures"]
    tensors = load_file(tmp_path / record["file"])
    assert [x.tolist() for x in tensors.values()] == [[2.0] * 4] * 2


# --- staging memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [slice(3, 40), torch.tensor([5, 1, 1, 63])])
def test_rows_come_to_the_device_as_they_are_while_it_is_busy(rows: Any, monkeypatch: Any):
    values = torch.randn(64, 10)

    def several() -> list[bool]:
        waits = module.num_waits()
        there = [loaded.gathered(values + n, rows, DEVICE) for n in range(5)]
        assert module.num_waits() == waits
        return [torch.equal(x.cpu(), (values + n)[rows]) for n, x in enumerate(there)]

    assert several() == [True] * 5
    pinned, shared = loaded._pinned, deque[torch.Tensor]()

    def reused(values: torch.Tensor, rows_B: Any) -> torch.Tensor:
        found = pinned(values, rows_B)
        shared.append(shared[0].copy_(found) if shared else found)
        return shared[0]

    monkeypatch.setattr(loaded, "_pinned", reused)
    assert several() == [False] * 4 + [True]


class Part:
    def __init__(self) -> None:
        self.value = torch.zeros(100, device=DEVICE)

    def state(self) -> dict[str, Any]:
        return {"value": self.value}

    def restore(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_a_copy_is_of_the_moment_at_which_it_was_asked_for():
    part, staging, waits = Part(), Staging(), module.num_waits()
    part.value.fill_(1.0)
    snapshot = take({"part": part}, {}, staging)
    part.value.fill_(2.0)
    assert module.num_waits() == waits
    assert snapshot.device == "simulated"
    assert snapshot.tensors["part"]["value"].isnan().all()
    snapshot.wait()
    assert (snapshot.tensors["part"]["value"] == 1.0).all()
    again = take({"part": part}, {}, staging)  # in the same memory
    assert (snapshot.tensors["part"]["value"] != 1.0).all()
    again.wait()
    assert (again.tensors["part"]["value"] == 2.0).all()


class TwoParts(Part):
    def __init__(self) -> None:
        super().__init__()
        self.other = torch.zeros(100, device=OTHER)

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "other": self.other}


def test_a_copy_of_two_devices_waits_for_both():
    part = TwoParts()
    part.value.fill_(1.0)
    part.other.fill_(2.0)
    snapshot = take({"part": part}, {})
    snapshot.wait()
    found = snapshot.tensors["part"]
    assert (found["value"] == 1.0).all()
    assert (found["other"] == 2.0).all()


# --- what else the engine asks of it -------------------------------------------------------------


def test_its_time_is_measured_by_events_in_its_queue():
    clock = clock_of(DEVICE)
    assert isinstance(clock, DeviceClock)
    x, waits = torch.randn(300, 300, device=DEVICE), module.num_waits()
    for _ in range(3):
        x = x @ x
    clock.mark("forward")
    clock.end_step(4)
    assert clock.take() == {}
    assert module.num_waits() == waits
    laps = clock.take(wait=True)
    assert laps["num_steps"] == 1
    assert laps["forward"] > 0


def test_a_clock_measures_its_device_whichever_is_the_current_one():
    clock = clock_of(OTHER)
    x = torch.randn(100, 100, device=OTHER)
    with torch.accelerator.device_index(0):
        x = x @ x
        clock.mark("forward")
    with torch.accelerator.device_index(1):
        x = x @ x
        clock.mark("backward")
    clock.end_step(1)
    laps = clock.take(wait=True)
    assert laps["forward"] > 0
    assert laps["backward"] > 0


def test_random_states_are_saved_and_restored_without_waiting():
    torch.manual_seed(7)
    waits = module.num_waits()
    randomness = Randomness.now(DEVICE)
    first = torch.rand(4, device=DEVICE)
    randomness.restore()
    second = torch.rand(4, device=DEVICE)
    assert module.num_waits() == waits
    assert torch.equal(first.cpu(), second.cpu())
    device.seed_all(7)
    assert torch.equal(torch.rand(4, device=OTHER).cpu(), first.cpu())


def test_its_memory_is_capped_and_known():
    torch.ones(1, device=DEVICE)
    assert device.visible() == device.in_use() == [DEVICE, OTHER]
    module.set_capacity(2**26)
    guard_memory(MemoryGuard.model_validate({"cap_fraction": 0.25}), DEVICE)
    assert device.memory_caps() == {DEVICE: 0.25, OTHER: 1.0}
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**25, dtype=torch.uint8, device=DEVICE)
    free = device.free_bytes(DEVICE)
    held = torch.empty(2**20, dtype=torch.uint8, device=DEVICE)
    assert free is not None
    assert free - (device.free_bytes(DEVICE) or 0) == held.nbytes
    assert (device.peak_bytes() or 0) >= held.nbytes


def test_a_backend_without_a_feature_does_without(monkeypatch: Any):
    """As torch.mps, which has neither; the module is otherwise that of the simulated device."""
    for name in ("mem_get_info", "set_per_process_memory_fraction", "is_bf16_supported"):
        monkeypatch.setattr(type(module), name, property(_missing))
    monkeypatch.setattr(type(module), "get_per_process_memory_fraction", property(_missing))
    assert device.free_bytes(DEVICE) is None
    assert device.memory_caps() == {}
    assert not device.multiplies_bfloat16(DEVICE)
    with pytest.raises(SpecFailed, match="cap_fraction"):
        device.cap_memory(DEVICE, 0.5)


def _missing(_: object) -> Any:
    raise AttributeError


def test_a_device_that_the_spec_cannot_name_is_not_taken_for_auto():
    assert device.visible()
    assert local_device(Devices())["type"] == "cpu"
