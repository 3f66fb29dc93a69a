"""The ring, the copies into it and the files out of it."""

import errno
import json
import os
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from engine.probes.tensors import drain
from engine.probes.tensors import ring as ring_module
from engine.probes.tensors.captures import CapturePiece, Captures
from engine.probes.tensors.drain import LocalDrain, file_names, write_file
from engine.probes.tensors.ring import HEADER_BYTES, Producer, Ring
from tests.unit.engine.runs import captured, losses, of_type, run, spec

PAGE = 4096


def bytes_of(ring: Ring, position: int, size: int) -> bytes:
    return bytes(ring.read(position, size))


# --- the ring --------------------------------------------------------------------------------


@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 3 * PAGE), st.sampled_from([1, 4, 8, PAGE]), st.integers(0, 4)),
        max_size=60,
    ),
    num_bytes=st.sampled_from([PAGE, 2 * PAGE, 5 * PAGE]),
)
def test_nothing_is_written_over_before_it_is_released(
    sizes: list[tuple[int, int, int]], num_bytes: int
) -> None:
    """Whatever the sizes and however far behind the consumer is."""
    ring = Ring.private(num_bytes)
    producer = Producer(ring)
    waiting: list[tuple[int, bytes, int]] = []
    for number, (size, align, num_taken) in enumerate(sizes):
        position = producer.reserve(size, align)
        if position is not None:
            content = bytes([number % 255 + 1]) * size
            place = ring.place(position)
            assert position % align == place % align == 0
            assert place >= HEADER_BYTES
            assert place + size <= HEADER_BYTES + num_bytes
            ring.memory[place : place + size] = content
            waiting.append((position, content, producer.head))
        elif not waiting:
            assert size > num_bytes
        for _ in range(min(num_taken, len(waiting))):
            position, content, end = waiting.pop(0)
            assert bytes_of(ring, position, len(content)) == content
            ring.release(end)
    for position, content, _ in waiting:
        assert bytes_of(ring, position, len(content)) == content


def test_an_emptied_ring_is_used_from_its_beginning_again():
    ring = Ring.private(4 * PAGE)
    producer = Producer(ring)
    places = []
    for _ in range(5):
        position = producer.reserve(PAGE + 1)
        assert position is not None
        places.append(ring.place(position))
        ring.release(producer.head)
    assert places == [HEADER_BYTES] * 5


def test_a_full_ring_has_no_room_until_something_is_released():
    ring = Ring.private(2 * PAGE)
    producer = Producer(ring)
    assert producer.reserve(PAGE) == 0
    end = producer.head
    assert producer.reserve(PAGE) == PAGE
    assert producer.reserve(1) is None
    ring.release(end)
    assert producer.reserve(PAGE) == 2 * PAGE
    assert producer.reserve(1) is None


def test_room_that_was_not_used_is_given_back():
    producer = Producer(Ring.private(PAGE))
    position = producer.reserve(PAGE)
    assert position is not None
    producer.take_back(position)
    assert producer.reserve(PAGE) is not None


def test_another_process_sees_the_same_memory_and_its_position():
    ring = Ring.shared(PAGE)
    other = Ring.open(ring.name or "")
    ring.memory[HEADER_BYTES : HEADER_BYTES + 3] = b"abc"
    assert bytes_of(other, 0, 3) == b"abc"
    other.release(77)
    assert ring.released == 77
    other.release(5)
    assert ring.released == 77
    ring.close()
    with pytest.raises(OSError, match=ring.name):
        Ring.open(ring.name or "")
    assert bytes_of(other, 0, 3) == b"abc"


def test_the_memory_of_a_closed_ring_is_free_although_somebody_still_has_the_ring():
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:captures")

    before, ring = mappings(), Ring.shared(PAGE)
    assert mappings() == before + 1
    ring.release(9)
    reading = ring.read(0, 4)
    ring.close()
    assert mappings() == before + 1  # until nobody reads from it any more
    reading.release()
    ring.close()
    assert mappings() == before
    assert ring.released == 9


def test_a_ring_is_no_larger_than_an_eighth_of_what_is_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ring_module, "_available_bytes", lambda: 80 * 2**20)
    assert ring_module.default_num_bytes() == 10 * 2**20
    assert ring_module.default_num_bytes(2 * PAGE + 5) == 2 * PAGE
    monkeypatch.setattr(ring_module, "_available_bytes", lambda: None)
    assert ring_module.default_num_bytes() == ring_module.NUM_BYTES
    assert ring_module.default_num_bytes(1) == PAGE


@pytest.mark.parametrize(("position", "size"), [(-1, 4), (0, PAGE + 1), (PAGE - 1, 2), (0, -1)])
def test_what_is_not_in_the_ring_is_not_read(position: int, size: int):
    with pytest.raises(ValueError, match="not in the ring"):
        Ring.private(PAGE).read(position, size)


# --- files -----------------------------------------------------------------------------------


def tensors() -> dict[str, torch.Tensor]:
    normal = torch.randn(3, 700, generator=torch.Generator().manual_seed(0))
    return {
        "float32": normal,
        "float64": normal.double(),
        "float16": normal.half(),
        "bfloat16": normal.bfloat16(),
        "int64": torch.arange(-5, 9),
        "int8": torch.arange(-5, 8, dtype=torch.int8),
        "uint8": torch.arange(9, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "complex64": torch.complex(normal, -normal),
        "conjugate": torch.complex(normal, -normal).conj(),
        "transposed": normal.t()[::3],
        "expanded": torch.tensor([1.5, 2.5]).expand(4, 2),
        "channels last": torch.arange(120.0)
        .reshape(2, 3, 4, 5)
        .contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(-2.5),
        "nothing": torch.empty(0, 3),
        "holes": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "sparse": torch.eye(3).to_sparse(),
        "with gradient": torch.nn.Parameter(torch.ones(5)),
        "large": torch.arange(700_000.0),
    }


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    wanted = wanted.detach().to_dense() if wanted.is_sparse else wanted.detach()
    wanted = wanted.resolve_conj().contiguous()
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    raw = [item.contiguous().reshape(-1).view(torch.uint8) for item in (found, wanted)]
    return torch.equal(*raw) if found.numel() else True


def test_every_type_and_shape_is_read_back_bit_for_bit(tmp_path: Path):
    seen: list[dict[str, Any]] = []
    captures = Captures(tmp_path, seen.append)
    for name, tensor in tensors().items():
        assert captures.offer(CapturePiece(7, name, "output"), tensor)
    captures.finish_step()
    captures.close()
    (record,) = seen
    assert (record["type"], record["step"], record["phase"]) == ("captures", 7, "train")
    assert record["file"] == "captures/7.safetensors"
    found = captured(seen, tmp_path)
    for name, tensor in tensors().items():
        assert same(found[7, name, "output"], tensor), name
    with safe_open(tmp_path / record["file"], "pt") as file:  # pyright: ignore[reportUnknownVariableType]
        assert file.metadata()["step"] == "7"
    for entry in record["tensors"]:
        assert entry["captured_from"] == entry["shape"]
        assert (entry["form"], entry["slice"]) == ("full", None)


def test_a_type_without_a_name_in_files_is_refused_and_takes_no_room(tmp_path: Path):
    captures = Captures(tmp_path, print)
    with pytest.raises(TypeError, match="complex128"):
        captures.offer(CapturePiece(0, "a", "output"), torch.zeros(1, dtype=torch.complex128))
    captures.close()


def test_a_captured_tensor_is_the_one_of_that_moment(tmp_path: Path):
    seen: list[dict[str, Any]] = []
    captures = Captures(tmp_path, seen.append)
    tensor = torch.arange(6.0).reshape(2, 3).t()
    captures.offer(CapturePiece(0, "a", "output"), tensor)
    tensor.zero_()
    captures.close()
    assert captured(seen, tmp_path)[0, "a", "output"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_part_of_a_tensor_says_what_it_is(tmp_path: Path):
    seen: list[dict[str, Any]] = []
    captures = Captures(tmp_path, seen.append)
    whole = torch.arange(12.0).reshape(3, 4)
    about = {"form": "slice", "slice": ":,::2", "captured_from": (3, 4), "phase": "evaluate"}
    captures.offer(CapturePiece(2, "a", "output", **about), whole[:, ::2])
    captures.offer(CapturePiece(2, "a", "output"), whole)
    captures.close()
    part, full = seen
    assert (part["phase"], full["phase"]) == ("evaluate", "train")
    assert part["tensors"][0]["captured_from"] == [3, 4]
    assert part["tensors"][0]["slice"] == ":,::2"
    kept = load_file(tmp_path / part["file"])[part["tensors"][0]["tensor"]]
    assert torch.equal(kept, whole[:, ::2])


def test_the_same_tensor_twice_in_a_step_has_two_names():
    entries = [{"layer": "a", "kind": "output"}, {"layer": "a", "kind": "output"}]
    assert file_names(entries) == ["a/output", "a/output#2"]


def test_wide_elements_come_first_so_that_all_are_aligned(tmp_path: Path):
    seen: list[dict[str, Any]] = []
    captures = Captures(tmp_path, seen.append)
    captures.offer(CapturePiece(0, "a", "output"), torch.ones(3, dtype=torch.uint8))
    captures.offer(CapturePiece(0, "b", "output"), torch.ones(3, dtype=torch.float64))
    captures.close()
    raw = (tmp_path / "captures/0.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    assert (8 + size) % 8 == 0
    header = json.loads(raw[8 : 8 + size])
    assert header["b/output"]["data_offsets"] == [0, 24]
    assert len(raw) == 8 + size + 27


@pytest.mark.parametrize("size", [0, 1, PAGE, 3 * 2**20 + 5])
def test_a_file_without_room_for_its_header_goes_through_the_page_cache(tmp_path: Path, size: int):
    ring = Ring.private(4 * 2**20)
    content = os.urandom(size)
    ring.memory[HEADER_BYTES : HEADER_BYTES + size] = content
    entry = {"layer": "a", "kind": "param", "shape": [size], "dtype": "uint8", "size_bytes": size}
    record = {"step": 0, "phase": "train", "tensors": [{**entry, "position": 0}]}
    write_file(tmp_path / "x", record, ring)
    assert bytes(load_file(tmp_path / "x")["a/param"].tolist()) == content
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_that_bypasses_no_cache_gets_the_file_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
):
    """As some of FUSE's: they refuse to open such a file, or to write to it."""
    num_refused = 0
    known = getattr(os, refused)

    def refusing(first: Any, second: Any, *rest: Any) -> int:
        nonlocal num_refused
        is_direct = refused == "write" or bool(second & drain._DIRECT)
        if drain._DIRECT and is_direct and not num_refused:
            num_refused += 1
            raise OSError(errno.EINVAL, "refused")
        return known(first, second, *rest)

    monkeypatch.setattr(os, refused, refusing)
    seen: list[dict[str, Any]] = []
    captures = Captures(tmp_path, seen.append)
    captures.offer(CapturePiece(0, "a", "output"), torch.arange(5000))
    captures.close()
    assert num_refused == bool(drain._DIRECT)
    assert of_type(seen, "dropped") == []
    assert torch.equal(captured(seen, tmp_path)[0, "a", "output"], torch.arange(5000))


@pytest.mark.parametrize("sizes", [[5, 3000, 70_000], [1], [2**18 + 1, 0, 7]])
def test_a_file_that_lies_in_the_ring_as_it_is_wanted_is_written_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
):
    if not drain._DIRECT:
        pytest.skip("this system cannot bypass its page cache")

    def through_the_cache(*_given: object) -> None:
        raise AssertionError("it went through the page cache")

    monkeypatch.setattr(drain, "_width", through_the_cache)
    seen: list[dict[str, Any]] = []
    captures = Captures(tmp_path, seen.append)
    for step in range(3):
        for number, size in enumerate(sizes):
            captures.offer(CapturePiece(step, f"l{number}", "output"), torch.arange(size) + step)
        captures.finish_step()
    captures.close()
    assert of_type(seen, "dropped") == []
    found = captured(seen, tmp_path)
    for step in range(3):
        for number, size in enumerate(sizes):
            assert torch.equal(found[step, f"l{number}", "output"], torch.arange(size) + step)


@pytest.mark.parametrize("num_pages", [1, 2])
def test_a_header_in_the_last_pages_of_a_lap_is_no_part_of_the_piece(
    tmp_path: Path, num_pages: int
):
    """The tensor after it is at the ring's beginning, whatever its position says."""
    ring = Ring.private(8 * PAGE)
    content = os.urandom(PAGE)
    ring.memory[HEADER_BYTES : HEADER_BYTES + PAGE] = content
    entry = {"layer": "a", "kind": "param", "shape": [PAGE], "dtype": "uint8", "size_bytes": PAGE}
    head = ((8 - num_pages) * PAGE, num_pages * PAGE)
    tensors = [{**entry, "position": 8 * PAGE}]
    write_file(
        tmp_path / "x", {"step": 0, "phase": "train", "tensors": tensors, "head": head}, ring
    )
    assert bytes(load_file(tmp_path / "x")["a/param"].tolist()) == content


def test_a_header_that_needs_more_room_than_there_is_goes_round(tmp_path: Path):
    seen: list[dict[str, Any]] = []
    captures = Captures(tmp_path, seen.append)
    for step in range(2):
        for number in range(300):
            captures.offer(
                CapturePiece(step, f"{'l' * 100}{number}", "output"), torch.tensor([number, step])
            )
        captures.finish_step()
    captures.close()
    found = captured(seen, tmp_path)
    assert len(found) == 600
    for (step, layer, _), tensor in found.items():
        assert tensor.tolist() == [int(layer.lstrip("l")), step]


# --- a full ring -----------------------------------------------------------------------------


def dropped(seen: list[dict[str, Any]]) -> int:
    return sum(record["count"] for record in seen if record["type"] == "dropped")


class Slow(LocalDrain):
    """A disk that takes its time."""

    pause_s = 0.02

    def _store(self, record: dict[str, Any]) -> dict[str, Any]:
        time.sleep(self.pause_s)
        return super()._store(record)


def test_what_is_offered_is_stored_or_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.probes.tensors.captures.LocalDrain", Slow)
    seen: list[dict[str, Any]] = []
    captures = Captures(tmp_path, seen.append, num_bytes=8 * PAGE)
    num_offered = 0
    for step in range(60):
        for number in range(3):
            captures.offer(
                CapturePiece(step, f"l{number}", "output"), torch.full((700,), 3.0 * step + number)
            )
            num_offered += 1
        captures.finish_step()
    captures.close()
    found, num_dropped = captured(seen, tmp_path), dropped(seen)
    assert 0 < num_dropped < num_offered
    assert len(found) + num_dropped == num_offered
    for (step, layer, _), tensor in found.items():
        assert torch.equal(tensor, torch.full((700,), 3.0 * step + int(layer[1:])))


def test_what_is_larger_than_the_ring_is_dropped_and_nothing_waits_for_it(tmp_path: Path):
    seen: list[dict[str, Any]] = []
    captures = Captures(tmp_path, seen.append, num_bytes=PAGE)
    assert not captures.offer(CapturePiece(0, "a", "output", lossless=True), torch.zeros(PAGE))
    assert captures.take_waited_s() == 0
    captures.close()
    assert dropped(seen) == 1


def test_lossless_waits_and_says_how_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.probes.tensors.captures.LocalDrain", Slow)
    seen: list[dict[str, Any]] = []
    captures = Captures(tmp_path, seen.append, num_bytes=4 * PAGE)
    for step in range(6):
        for number in range(3):  # more than the ring holds: a step leaves in several lots
            values = torch.full((2000,), float(10 * step + number))
            assert captures.offer(CapturePiece(step, f"l{number}", "output", lossless=True), values)
        captures.finish_step()
    waited = captures.take_waited_s()
    captures.close()
    assert dropped(seen) == 0
    assert waited >= 6 * Slow.pause_s
    found = captured(seen, tmp_path)
    assert len(found) == 18
    assert all(
        tensor[0] == 10 * step + int(layer[1:]) for (step, layer, _), tensor in found.items()
    )


def test_waiting_ends_when_the_job_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Slow, "pause_s", 1.0)
    monkeypatch.setattr("engine.probes.tensors.captures.LocalDrain", Slow)
    over = threading.Event()
    seen: list[dict[str, Any]] = []
    captures = Captures(tmp_path, seen.append, num_bytes=PAGE, is_over=over.is_set)
    assert captures.offer(CapturePiece(0, "a", "output", lossless=True), torch.zeros(1000))
    threading.Timer(0.05, over.set).start()
    began = time.monotonic()
    assert not captures.offer(CapturePiece(0, "b", "output", lossless=True), torch.zeros(1000))
    assert time.monotonic() - began < 0.9
    captures.close()
    assert dropped(seen) == 1


def test_a_file_that_cannot_be_written_is_counted(tmp_path: Path):
    seen: list[dict[str, Any]] = []
    captures = Captures(tmp_path, seen.append)
    captures.offer(CapturePiece(0, "a", "output"), torch.ones(3))
    (tmp_path / "captures").rmdir()
    captures.offer(CapturePiece(0, "b", "output"), torch.ones(3))
    captures.close()
    (record,) = seen
    assert (record["type"], record["count"]) == ("dropped", 2)
    assert "FileNotFoundError" in record["what"]


# --- training --------------------------------------------------------------------------------

EVERYTHING = {
    "layers": ["*"],
    "kinds": ["output", "output_grad", "param", "param_grad"],
    "every": 1,
    "want": ["full"],
}


@pytest.mark.parametrize("lossless", [False, True])
def test_a_slow_disk_changes_no_bit_and_every_tensor_is_stored_or_counted(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lossless: bool
):
    plain = run(tmp_path / "plain", spec(), digits)
    monkeypatch.setattr("engine.probes.tensors.captures.LocalDrain", Slow)
    monkeypatch.setattr("engine.probes.tensors.captures.default_num_bytes", lambda: 600_000)
    probes = [{**EVERYTHING, "lossless": lossless}]
    records = run(tmp_path / "watched", spec(probes=probes), digits)
    assert losses(records) == losses(plain)
    weights = [
        load_file(tmp_path / name / of_type(found, "checkpoint")[-1]["dir"] / "model.safetensors")
        for name, found in (("plain", plain), ("watched", records))
    ]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    num_stored = sum(len(record["tensors"]) for record in of_type(records, "captures"))
    counted = of_type(records, "dropped")
    assert num_stored + sum(record["count"] for record in counted) == 10 * (2 * 6 + 2 * 4)
    waits = [record["values"].get("time/lossless_wait") for record in of_type(records, "metrics")]
    assert bool(counted) is not lossless
    assert any(waits) is lossless
