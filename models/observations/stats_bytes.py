"""The binary format of stored statistics. Uses numpy and zlib, no SQL.

There are two forms, both columnar. A *block* is one shipment: rows of many series, not compressed
because it is soon folded. A *chunk* has one series: its columns one after another, byte-shuffled
(all first bytes, all second bytes …) and then compressed.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from glasshouse import jsonio
from models.observations.ranks import MERGED

Steps = NDArray[np.int64]
Floats = NDArray[np.float64]
Places = NDArray[np.intp]

_LEVEL = 1  # most of a float64 is noise: higher levels take four times as long for 1 % less
_MAGIC = b"GHS2"
_BLOCK = struct.Struct("<4sIII")
_FIRST_BLOCK = struct.Struct("<II")
_CHUNK = struct.Struct("<BBII")
_VERSION = 1
_NO_ENTRIES = 0xFFFFFFFF
"""Instead of the number of bins: the block holds statistics, not histograms."""


class StoredSeries(NamedTuple):
    """The series that a row of statistics belongs to."""

    layer: str
    kind: str
    phase: str
    rank: int = MERGED


@dataclass(frozen=True, slots=True)
class StatsArrays:
    """Statistics of tensors over steps: ``values`` is (statistics, steps)."""

    steps: Steps
    values: Floats

    def take(self, places: Places | slice | NDArray[np.bool_]) -> "StatsArrays":
        """Return a selection of rows."""
        return StatsArrays(self.steps[places], self.values[:, places])

    @staticmethod
    def join(parts: Sequence["StatsArrays"]) -> "StatsArrays":
        """Concatenate the parts."""
        if len(parts) == 1:
            return parts[0]
        steps = np.concatenate([part.steps for part in parts])
        return StatsArrays(steps, np.concatenate([part.values for part in parts], axis=1))

    @property
    def size_bytes(self) -> int:
        """Return the size before compression."""
        return self.steps.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True)
class Histograms:
    """Sparse histograms over steps: step i has ``sizes[i]`` entries of ``bins`` and ``counts``."""

    steps: Steps
    sizes: NDArray[np.int64]
    bins: NDArray[np.uint16]
    counts: NDArray[np.uint64]

    def take(self, places: Places | slice | NDArray[np.bool_]) -> "Histograms":
        """Return a selection of rows."""
        numbers = np.arange(len(self.steps))[places]
        sizes = self.sizes[numbers]
        begins = (np.cumsum(self.sizes) - self.sizes)[numbers]
        inside = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        entries = np.repeat(begins, sizes) + inside
        return Histograms(self.steps[numbers], sizes, self.bins[entries], self.counts[entries])

    @staticmethod
    def join(parts: Sequence["Histograms"]) -> "Histograms":
        """Concatenate the parts."""
        if len(parts) == 1:
            return parts[0]
        return Histograms(
            np.concatenate([part.steps for part in parts]),
            np.concatenate([part.sizes for part in parts]),
            np.concatenate([part.bins for part in parts]),
            np.concatenate([part.counts for part in parts]),
        )

    @property
    def size_bytes(self) -> int:
        """Return the size before compression."""
        return 16 * len(self.steps) + self.bins.nbytes + self.counts.nbytes


Data = StatsArrays | Histograms


def join(parts: Sequence[Data]) -> Data:
    """Concatenate parts of one form."""
    form: Any = type(parts[0])
    return form.join(parts)


# --- blocks -------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Rows of several series: row i belongs to ``names[numbers[i]]``."""

    names: list[StoredSeries]
    numbers: NDArray[np.uint32]
    data: Data


def pack_block(block: Block) -> bytes:
    """Encode a block."""
    names = [[*name[:3]] if name.rank == MERGED else [*name] for name in block.names]
    head = jsonio.dumps(names).encode()
    data = block.data
    if isinstance(data, StatsArrays):
        entries, columns = _NO_ENTRIES, [data.values.astype("<f8")]
    else:
        entries = len(data.bins)
        columns = [data.sizes.astype("<i8"), data.bins.astype("<u2"), data.counts.astype("<u8")]
    body = [block.numbers.astype("<u4"), data.steps.astype("<i8"), *columns]
    start = _BLOCK.pack(_MAGIC, len(head), len(data.steps), entries)
    return b"".join((start, head, *(column.tobytes() for column in body)))


def unpack_block(
    data: bytes, names_of: Callable[[bytes], list[StoredSeries]] | None = None
) -> Block:
    """Decode a block. ``names_of`` may cache the names of heads."""
    names_of = names_of or read_names
    if data[:4] != _MAGIC:
        return _unpack_first(data, names_of)
    _, head, num, entries = _BLOCK.unpack_from(data)
    names = names_of(data[_BLOCK.size : _BLOCK.size + head])
    read = _Reader(data, _BLOCK.size + head)
    numbers, steps = read("<u4", num), read("<i8", num)
    if entries != _NO_ENTRIES:
        columns = Histograms(steps, read("<i8", num), read("<u2", entries), read("<u8", entries))
        return Block(names, numbers, columns)
    values = read("<f8", read.left // 8)
    return Block(names, numbers, StatsArrays(steps, values.reshape(-1, num)))


def _unpack_first(data: bytes, names_of: Callable[[bytes], list[StoredSeries]]) -> Block:
    """Decode a block from before version 0.2: nine statistics, compressed."""
    head, num = _FIRST_BLOCK.unpack_from(data)
    begin = _FIRST_BLOCK.size
    read = _Reader(zlib.decompress(data[begin + head :]), 0)
    numbers, steps = read("<u4", num), read("<i8", num)
    values = read("<f8", read.left // 8).reshape(-1, num)
    return Block(names_of(data[begin : begin + head]), numbers, StatsArrays(steps, values))


def read_names(head: bytes) -> list[StoredSeries]:
    """Return the series of a block."""
    return [StoredSeries(*name) for name in jsonio.loads(head)]


class _Reader:
    """Reads consecutive arrays from bytes."""

    def __init__(self, data: bytes, offset: int) -> None:
        self._data, self._offset = data, offset

    def __call__(self, dtype: str, count: int) -> NDArray[Any]:
        found = np.frombuffer(self._data, dtype, count, self._offset)
        self._offset += found.nbytes
        return found

    @property
    def left(self) -> int:
        return len(self._data) - self._offset


class Gathered:
    """Collects the rows of many blocks by series, with one sort and no loop over rows."""

    def __init__(self, matches: Callable[[StoredSeries], bool] = lambda _: True) -> None:
        self._matches = matches
        self._heads: dict[bytes, list[StoredSeries]] = {}
        self._numbers: dict[tuple[int, StoredSeries], int] = {}
        self._maps: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._found: list[tuple[NDArray[np.int64], Data]] = []

    def add(self, attempt: int, data: bytes) -> None:
        """Add the rows of one block whose series match."""
        block = unpack_block(data, self._names)
        number_of = self._map(attempt, block.names)
        mine = number_of[block.numbers]
        chosen = np.flatnonzero(mine >= 0)
        if len(chosen) == len(mine):
            self._found.append((mine, block.data))
        elif len(chosen):
            self._found.append((mine[chosen], block.data.take(chosen)))

    def by_series(self) -> dict[tuple[int, StoredSeries], Data]:
        """Return attempt and series → rows, in the order of the blocks."""
        if not self._found:
            return {}
        owners = np.concatenate([numbers for numbers, _ in self._found])
        order = np.argsort(owners, kind="stable")
        parts = [data for _, data in self._found]
        whole = join(parts).take(order)
        ends = np.cumsum(np.bincount(owners, minlength=len(self._numbers)))
        found: dict[tuple[int, StoredSeries], Data] = {}
        entries = np.cumsum(whole.sizes) if isinstance(whole, Histograms) else None
        for key, number in self._numbers.items():
            begin, end = (int(ends[number - 1]) if number else 0), int(ends[number])
            if begin < end:
                found[key] = _part(whole, begin, end, entries)
        return found

    def _names(self, head: bytes) -> list[StoredSeries]:
        if head not in self._heads:
            self._heads[head] = read_names(head)
        return self._heads[head]

    def _map(self, attempt: int, names: list[StoredSeries]) -> NDArray[np.int64]:
        """Map a block's series numbers to those of this object; -1 if a series does not match."""
        key = (attempt, id(names))  # the lists live as long as this object
        if key not in self._maps:
            self._maps[key] = np.array(
                [
                    self._numbers.setdefault((attempt, name), len(self._numbers))
                    if self._matches(name)
                    else -1
                    for name in names
                ],
                np.int64,
            )
        return self._maps[key]


def _part(whole: Data, begin: int, end: int, entries: NDArray[np.int64] | None) -> Data:
    """Return rows of a table as views."""
    if isinstance(whole, StatsArrays) or entries is None:
        return whole.take(slice(begin, end))
    first = int(entries[begin - 1]) if begin else 0
    inside = slice(first, int(entries[end - 1]))
    rows = slice(begin, end)
    return Histograms(
        whole.steps[rows], whole.sizes[rows], whole.bins[inside], whole.counts[inside]
    )


# --- chunks -------------------------------------------------------------------------------------


def pack_chunk(data: Data) -> bytes:
    """Encode a chunk."""
    num = len(data.steps)
    deltas = np.diff(data.steps, prepend=np.int64(0))
    if isinstance(data, StatsArrays):
        head = _CHUNK.pack(_VERSION, len(data.values), num, 0)
        columns = [deltas.astype("<i8"), *data.values.astype("<f8")]
    else:
        head = _CHUNK.pack(_VERSION, 0, num, len(data.bins))
        # bins ascend within a step, so their differences are small numbers
        gaps = np.diff(data.bins, prepend=np.uint16(0)).astype("<u2")  # wraps around, and back
        columns = [deltas, data.sizes, gaps, data.counts]
        columns = [
            column.astype(dtype)
            for column, dtype in zip(columns, ("<i8", "<i8", "<u2", "<u8"), strict=True)
        ]
    return head + zlib.compress(b"".join(map(_shuffled, columns)), _LEVEL)


def unpack_chunk(data: bytes) -> Data:
    """Decode a chunk.

    Raises:
        ValueError: A newer version wrote it.
    """
    version, figures, num, entries = _CHUNK.unpack_from(data)
    if version != _VERSION:
        raise ValueError(f"a chunk of statistics has the unknown version {version}")
    raw = np.frombuffer(zlib.decompress(memoryview(data)[_CHUNK.size :]), np.uint8)
    if figures:
        table = _unshuffled_table(raw, num)
        return StatsArrays(np.cumsum(table[0].view("<i8")), table[1:].view("<f8"))
    ends = np.cumsum([8 * num, 8 * num, 2 * entries, 8 * entries])
    deltas, sizes, gaps, counts = (
        _unshuffled(raw[begin:end], dtype)
        for begin, end, dtype in zip(
            [0, *ends[:-1]], ends, ("<i8", "<i8", "<u2", "<u8"), strict=True
        )
    )
    bins = np.cumsum(gaps, dtype=np.uint16)
    return Histograms(np.cumsum(deltas), sizes, bins, counts)


def _shuffled(column: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(column).view(np.uint8).reshape(-1, column.itemsize).T.tobytes()


def _unshuffled(raw: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    width = np.dtype(dtype).itemsize
    return np.ascontiguousarray(raw.reshape(width, -1).T).view(dtype).reshape(-1)


def _unshuffled_table(raw: NDArray[np.uint8], num: int) -> NDArray[Any]:
    """Decode all 8-byte columns at once: (columns, rows)."""
    planes = raw.reshape(-1, 8, num)
    return np.ascontiguousarray(planes.transpose(0, 2, 1)).view("<u8").reshape(-1, num)
