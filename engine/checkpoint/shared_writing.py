"""Write one checkpoint with several processes, each of which has a part of the tensors.

The files are those that one process would write: each process writes the bytes of its parts into
the same files, at the places that they have in the whole tensors. So any number of processes, with
any strategy, reads them. Process 0 creates the files and computes their digests; nothing is sent
but the names and shapes. The processes write in threads, which tell each other through torch's
store.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.core.precision import dtype_name
from engine.core.safetensors_writer import PIECE, Layout, described, layout_of, memory_of
from engine.core.shards import Place
from engine.core.snapshot import Parts, Snapshot, State, StatefulInParts
from engine.distributed.group import Group
from glasshouse.failpoints import failpoint

_GIVEN_UP = ""
"""What process 0 posts instead of a directory."""


class Agreed(NamedTuple):
    """What the processes have agreed on for one checkpoint."""

    number: int
    """Of the checkpoints of this run, counted from 0; the name under which messages are posted."""
    with_held: bool
    """Whether the state that is held is written first."""
    files: dict[str, Layout]
    """The layout of the file of each part that has tensors."""


@dataclass
class SharedWriter:
    """The processes that write the checkpoints of one job, seen from one of them."""

    group: Group
    _num_agreed: int = field(default=0, init=False)

    def agree(self, snapshot: Snapshot, parts: Parts, *, with_held: bool) -> Agreed:
        """Agree on the files of a checkpoint. Collective.

        ``with_held`` of process 0 counts. In process 0 the JSON values of the snapshot become those
        of all processes.
        """
        apart = {name: part for name, part in parts.items() if isinstance(part, StatefulInParts)}
        own = {"kinds": _kinds(snapshot), "rest": {name: snapshot.rest[name] for name in apart}}
        found = self.group.gather(own)
        news: dict[str, Any] = {}
        if self.group.is_first:
            for name, part in apart.items():
                snapshot.rest[name] = part.join([one["rest"][name] for one in found])
            kinds: dict[str, State] = {}
            for one in found:
                for name, tensors in one["kinds"].items():
                    kinds[name] = kinds.get(name, {}) | tensors
            news = {"with_held": with_held, "kinds": kinds}
        news = self.group.broadcast(news)
        number, self._num_agreed = self._num_agreed, self._num_agreed + 1
        files = {name: layout_of(tensors) for name, tensors in news["kinds"].items() if tensors}
        return Agreed(number, bool(news["with_held"]), files)

    def write(
        self, agreed: Agreed, directory: Path, snapshot: Snapshot
    ) -> dict[str, dict[str, Any]]:
        """Write the files of all tensors, in process 0; return their sizes and digests.

        Raises:
            OSError: a process could not write its part.
        """
        for name, layout in agreed.files.items():
            _create(_path(directory, name), layout)
        self._post(agreed, "directory", str(directory))
        _write_own(directory, snapshot, agreed)
        for rank in range(1, self.group.size):
            if problem := self._read(agreed, rank, rank):
                raise OSError(f"process {rank} could not write its part: {problem}")
        failpoint("checkpoint.sync")
        paths = [_path(directory, name) for name in agreed.files]
        return {path.name: described(path) for path in paths}

    def give_up(self, agreed: Agreed) -> None:
        """Tell the other processes not to write, if they have not begun."""
        self._post(agreed, "directory", _GIVEN_UP)

    def write_own(self, snapshot: Snapshot, agreed: Agreed) -> None:
        """Write this process's part, in any other process. Process 0 reports what fails."""
        directory = self._read(agreed, "directory", 0)
        if directory == _GIVEN_UP:
            return
        problem = ""
        try:
            snapshot.wait()
            _write_own(Path(directory), snapshot, agreed)
        except Exception as error:
            problem = repr(error)[:500]
        self._post(agreed, self.group.rank, problem)

    def _post(self, agreed: Agreed, what: str | int, text: str) -> None:
        self.group.post(f"checkpoint/{agreed.number}/{what}", text)

    def _read(self, agreed: Agreed, what: str | int, sender: int) -> str:
        return self.group.read(f"checkpoint/{agreed.number}/{what}", sender)


def _kinds(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Return the dtype and the shape of each whole tensor, by part and name."""
    found: dict[str, dict[str, Any]] = {}
    for name, tensors in snapshot.tensors.items():
        places = snapshot.places[name]
        shapes = {
            key: places[key].shape if key in places else x.shape for key, x in tensors.items()
        }
        found[name] = {key: [dtype_name(x.dtype), [*shapes[key]]] for key, x in tensors.items()}
    return found


def _path(directory: Path, part: str) -> Path:
    return directory / f"{part}.safetensors"


def _create(path: Path, layout: Layout) -> None:
    """Create a file with the space of all its tensors.

    Raises:
        OSError: there is no space.
    """
    with path.open("wb") as file:
        file.write(layout.header)
        file.flush()
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, layout.num_bytes)
        else:
            os.truncate(file.fileno(), layout.num_bytes)


def _write_own(directory: Path, snapshot: Snapshot, agreed: Agreed) -> None:
    """Write the tensors of a snapshot into files that exist, durably."""
    failpoint("checkpoint.part")
    for name, tensors in snapshot.tensors.items():
        if tensors:
            _write_tensors(
                _path(directory, name), agreed.files[name].offsets, tensors, snapshot.places[name]
            )


def _write_tensors(
    path: Path,
    offsets: Mapping[str, int],
    tensors: Mapping[str, Tensor],
    places: Mapping[str, Place],
) -> None:
    with path.open("r+b", buffering=0) as file:
        for name, tensor in tensors.items():
            data, first = memory_of(tensor), 0
            for start, length in _runs(tensor, places.get(name)):
                _write_at(file.fileno(), data[first : first + length], offsets[name] + start)
                first += length
        os.fsync(file.fileno())


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data[:PIECE], offset)
        data, offset = data[written:], offset + written


def _runs(tensor: Tensor, place: Place | None) -> Iterator[tuple[int, int]]:
    """Yield where the bytes of a part are in the whole: the first one, and how many follow it.

    Together, the runs have the bytes of the part in their order.
    """
    if place is None:
        yield 0, tensor.nbytes
        return
    if not tensor.numel():
        return
    outer, length = _outer_axes(tensor.shape, place.shape)
    strides = _strides(place.shape)
    starts = torch.zeros((), dtype=torch.int64)
    for axis in range(outer):
        starts = starts.unsqueeze(-1) + place.indices[axis] * strides[axis]
    starts = starts.flatten()
    begins = torch.ones(starts.numel(), dtype=torch.bool)
    begins[1:] = starts[1:] != starts[:-1] + length
    first = torch.nonzero(begins).flatten()
    ends = torch.cat([first[1:], torch.tensor([starts.numel()])])
    size = tensor.element_size()
    for start, count in zip(starts[first].tolist(), (ends - first).tolist(), strict=True):
        yield start * size, count * length * size


def _outer_axes(own: Sequence[int], whole: Sequence[int]) -> tuple[int, int]:
    """Return how many axes come before those that are whole, and the elements of these together."""
    outer = len(whole)
    while outer and own[outer - 1] == whole[outer - 1]:
        outer -= 1
    return outer, math.prod(whole[outer:])


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
