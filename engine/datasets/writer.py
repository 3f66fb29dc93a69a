"""Write a dataset directory: meta.json, stats.json and plain .npy files. Uses numpy only.

Columns are appended block by block, so a dataset of any size needs a few megabytes of memory.
``models.storage.columns`` and ``engine.data`` read these files.
"""

import os
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from engine.datasets.column_stats import UNITS, Budget, NumberStats, TextStats, TokenCounts
from glasshouse import jsonio
from glasshouse.errors import InvalidDataset

SPLITS = ("train", "validation", "test", "all")
SPLIT_WORDS = {"train": "train", "test": "test"} | dict.fromkeys(
    ("validation", "valid", "val"), "validation"
)
"""What a file may call its splits."""
MAX_COLUMNS = 10_000
MAX_RANK = 8
MAX_NAME_LENGTH = 200
MAX_LENGTHS = 1000
"""The maximum number of unique row lengths in a column that are counted individually."""
_MAX_COUNTED = 200_000
MAX_TOKENS = 300_000
"""The number of unique tokens that all columns of a dataset together may store."""
_HEADER_BYTES = 256  # space for eight axes of twenty digits, so that rows can be filled in last


class _NpyFile:
    """A .npy file with one writer that grows; its header is written when the length is known."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.path = path
        self._dtype = dtype
        self._shape = shape
        path.write_bytes(bytes(_HEADER_BYTES))

    def append(self, values: NDArray[Any]) -> None:
        # Opened for each block: a wide table has more columns than a process has file descriptors.
        with self.path.open("ab") as file:
            file.write(values.data)

    def finish(self, length: int, row: tuple[int, ...] | None = None) -> None:
        """Write the header: ``length`` rows, of the shape ``row`` if that has changed."""
        shape = (length, *(self._shape if row is None else row))
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        text = repr(header).ljust(_HEADER_BYTES - 11) + "\n"
        with self.path.open("r+b") as file:
            file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode("latin-1"))
            file.flush()
            os.fsync(file.fileno())


class NumberColumnWriter:
    """Writes a column of one split: numbers of one dtype, in rows of one shape."""

    def __init__(
        self, writer: "DatasetWriter", path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        self._writer = writer
        self._file = _NpyFile(path, dtype, shape)
        self.dtype = dtype
        self._row_size = int(np.prod(shape, dtype=np.int64))
        self._num_values = 0
        self.stats = NumberStats(writer.count_budget, scalar=not shape, listed=dtype.kind in "iub")

    def append(self, values: NDArray[Any]) -> None:
        """Add values in row-major order; a block may end inside a row."""
        flat = np.ascontiguousarray(values, dtype=self.dtype).reshape(-1)
        if flat.size == 0:
            return
        self._writer.account(flat.nbytes)
        self._file.append(flat)
        self.stats.update(flat)
        self._num_values += flat.size

    @property
    def rows(self) -> int:
        """The number of complete rows so far."""
        return self._num_values // self._row_size

    def finish(self) -> None:
        """Complete the file and sync it to disk."""
        self._file.finish(self.rows)


class _Lists:
    """The values of rows of different lengths, one after another, and the offset of each row."""

    def __init__(
        self,
        writer: "DatasetWriter",
        values: tuple[Path, np.dtype[Any], tuple[int, ...]],
        offsets: Path,
    ) -> None:
        self._writer = writer
        self._values = _NpyFile(*values)
        self._offsets = _NpyFile(offsets, np.dtype(np.int64), ())
        self._offsets.append(np.zeros(1, np.int64))
        self._end = 0
        self.rows = 0

    def _add(self, flat: NDArray[Any], lengths: Sequence[int] | NDArray[np.int64]) -> None:
        ends = np.cumsum(lengths, dtype=np.int64) + self._end
        self._writer.account(flat.nbytes + ends.nbytes)
        self._offsets.append(ends)
        if flat.size:
            self._values.append(flat)
        self._end = int(ends[-1])
        self.rows += len(ends)

    def finish(self) -> None:
        """Complete both files and sync them to disk."""
        self._values.finish(self._end)
        self._offsets.finish(self.rows + 1)


class RaggedColumnWriter(_Lists):
    """Writes a column of one split: lists of different lengths, of values of one shape."""

    def __init__(
        self, writer: "DatasetWriter", path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        super().__init__(writer, (path, dtype, shape), path.with_suffix(".offsets.npy"))
        self.dtype = dtype
        self.shape = shape
        self._shortest, self._longest = np.iinfo(np.int64).max, 0
        self._counts: Counter[int] | None = Counter()
        self.stats = NumberStats(writer.count_budget, scalar=False, listed=False)

    def append(self, values: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Add rows: the concatenated values of all rows, and the number of values in each."""
        if lengths.size == 0:
            return
        flat = np.ascontiguousarray(values, dtype=self.dtype).reshape(-1)
        self._add(flat, lengths)
        if flat.size:
            self.stats.update(flat)
        self._shortest = min(self._shortest, int(lengths.min()))
        self._longest = max(self._longest, int(lengths.max()))
        if self._counts is not None:
            self._counts.update(lengths.tolist())
            if len(self._counts) > MAX_LENGTHS:
                self._counts = None

    @property
    def lengths(self) -> dict[str, int]:
        """The shortest and the longest row, and the steps of all rows together."""
        return {"min": self._shortest, "max": self._longest, "total": self._end}

    @property
    def length_counts(self) -> list[list[int]] | None:
        """Each length and how many rows have it, ascending; None: there are too many lengths."""
        return None if self._counts is None else [[*item] for item in sorted(self._counts.items())]

    def finish_even(self, length: int) -> None:
        """Complete the file as a column of tensors: rows of one length need no offsets."""
        self._values.finish(self.rows, (length, *self.shape))
        self._offsets.path.unlink()


class TextColumnWriter(_Lists):
    """Writes a column of one split: UTF-8 texts, as their bytes and the offset of each."""

    def __init__(self, writer: "DatasetWriter", path: Path) -> None:
        super().__init__(
            writer, (path.with_suffix(".bytes.npy"), np.dtype(np.uint8), ()), offsets=path
        )
        self.stats = TextStats(writer.count_budget)
        self.tokens = {unit: TokenCounts(writer.token_budget, UNITS[unit]) for unit in UNITS}

    def append(self, texts: Sequence[bytes]) -> None:
        """Add one UTF-8 text per row."""
        if not texts:
            return
        self._add(np.frombuffer(b"".join(texts), np.uint8), [len(text) for text in texts])
        self.stats.update(texts)
        decoded = [text.decode() for text in texts]
        for counts in self.tokens.values():
            counts.update(decoded)


Column = NumberColumnWriter | RaggedColumnWriter | TextColumnWriter


class DatasetWriter:
    """Writes the files of one dataset into its directory."""

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._declared: dict[str, dict[str, Any]] = {}
        self._splits: dict[str, dict[str, Column]] = {}
        self._notes: list[dict[str, str]] = []
        self.count_budget = Budget(_MAX_COUNTED)
        self.token_budget = Budget(MAX_TOKENS)

    def numbers(
        self, split: str, name: str, dtype: np.dtype[Any], shape: tuple[int, ...] = ()
    ) -> NumberColumnWriter:
        """Create a column of numbers."""
        native = dtype.newbyteorder("=")
        path = self._place(split, name, {"dtype": native.name, "shape": list(shape)})
        column = self._splits[split][name] = NumberColumnWriter(self, path, native, shape)
        return column

    def ragged(
        self, split: str, name: str, dtype: np.dtype[Any], shape: tuple[int, ...] = ()
    ) -> RaggedColumnWriter:
        """Create a column of lists; ``shape`` is that of one of their values.

        If all rows of all splits turn out to have one length, it becomes a column of numbers.
        """
        native = dtype.newbyteorder("=")
        path = self._place(split, name, {"dtype": native.name, "shape": [None, *shape]})
        column = self._splits[split][name] = RaggedColumnWriter(self, path, native, shape)
        return column

    def texts(self, split: str, name: str) -> TextColumnWriter:
        """Create a column of texts."""
        path = self._place(split, name, {"dtype": "string", "shape": []})
        column = self._splits[split][name] = TextColumnWriter(self, path)
        return column

    def name_classes(self, name: str, classes: Sequence[str]) -> None:
        """Set the classes that the integers of an existing column stand for."""
        self._declared[name]["classes"] = list(classes)

    def describe(self, name: str, **facts: Any) -> None:
        """Add metadata to an existing column."""
        self._declared[name] |= facts

    def note(self, code: str, detail: str) -> None:
        """Add a note about the whole dataset that the uploader may want to act on."""
        self._notes.append({"code": code, "detail": detail})

    def _place(self, split: str, name: str, kind: dict[str, Any]) -> Path:
        if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise InvalidDataset(
                f"{name[:MAX_NAME_LENGTH]!r} cannot name a column: use 1 to {MAX_NAME_LENGTH} "
                "printable characters"
            )
        if len(kind["shape"]) > MAX_RANK:
            raise InvalidDataset(
                f"a row of column {name!r} has {len(kind['shape'])} axes; {MAX_RANK} is the limit"
            )
        known = self._declared.get(name)
        if known is None:
            if len(self._declared) >= MAX_COLUMNS:
                raise InvalidDataset(
                    f"more than {MAX_COLUMNS:,} columns: put them side by side "
                    "in one array (npz) instead"
                )
            known = {"name": name, **kind, "file": f"{len(self._declared)}.npy"}
            self._declared[name] = known
        elif {**known, **kind} != known:
            raise InvalidDataset(
                f"column {name!r} is {kind['dtype']} {kind['shape']} in split {split!r}, but "
                f"{known['dtype']} {known['shape']} in another; make them alike"
            )
        columns = self._splits.setdefault(split, {})
        if name in columns:
            raise InvalidDataset(f"column {name!r} of split {split!r} is given twice; remove one")
        folder = self._directory / split  # a split's name comes from us, never from the file
        folder.mkdir(exist_ok=True)
        return folder / known["file"]

    def account(self, num_bytes: int) -> None:
        """Count bytes that are about to be written.

        Raises:
            InvalidDataset: the dataset would exceed its limit.
        """
        self.expect(num_bytes)
        self._num_bytes += num_bytes

    def expect(self, num_bytes: int) -> None:
        """Refuse a declared size early if it is more than may be written."""
        if self._num_bytes + num_bytes > self._max_bytes:
            raise InvalidDataset(
                f"the data is larger than the limit of {self._max_bytes:,} bytes once unpacked; "
                "upload less, or raise the limit"
            )

    def scratch(self) -> IO[bytes]:
        """Open a temporary file on the disk of the dataset; it is deleted when it is closed."""
        return TemporaryFile(dir=self._directory)

    def finish(self) -> dict[str, Any]:
        """Check that the columns agree, complete every file, and return meta.json's content."""
        rows = {split: self._rows_of(split) for split in SPLITS if split in self._splits}
        if not rows:
            raise InvalidDataset("the file holds no data")
        columns = [self._complete(name, rows) for name in self._declared]
        meta: dict[str, Any] = {"columns": columns, "splits": rows}
        if self._notes:
            meta["notes"] = self._notes
        stats = {
            split: {name: self._figures(split, name) for name in self._declared} for split in rows
        }
        _write_synced(self._directory / "stats.json", jsonio.dumps(stats))
        _write_synced(self._directory / "meta.json", jsonio.dumps(meta))
        for folder in (*(self._directory / split for split in rows), self._directory):
            sync_directory(folder)
        return meta

    def _complete(self, name: str, rows: dict[str, int]) -> dict[str, Any]:
        """Complete a column's files in all splits; return its entry in meta.json."""
        described = dict(self._declared[name])
        columns = {split: self._splits[split][name] for split in rows}
        described["missing"] = sum(column.stats.missing for column in columns.values())
        ragged = {s: item for s, item in columns.items() if isinstance(item, RaggedColumnWriter)}
        lengths = {split: column.lengths for split, column in ragged.items()}
        ends = {item[end] for item in lengths.values() for end in ("min", "max")}
        if len(ends) == 1 and 0 not in ends:
            length = ends.pop()
            for column in ragged.values():
                column.finish_even(length)
            return {**described, "shape": [length, *described["shape"][1:]]}
        for column in columns.values():
            column.finish()
        if ragged:
            counts = {split: column.length_counts for split, column in ragged.items()}
            return {**described, "lengths": lengths, "length_counts": counts}
        texts = {s: item for s, item in columns.items() if isinstance(item, TextColumnWriter)}
        if texts:
            described["tokens"] = {
                unit: {split: column.tokens[unit].as_dict() for split, column in texts.items()}
                for unit in UNITS
            }
        return described

    def _figures(self, split: str, name: str) -> dict[str, Any]:
        column = self._splits[split][name]
        figures = column.stats.as_dict()
        if isinstance(column, RaggedColumnWriter):
            lengths = column.lengths
            figures["lengths"] = {**lengths, "mean": lengths["total"] / column.rows}
        return figures

    def _rows_of(self, split: str) -> int:
        columns = self._splits[split]
        lacking = [name for name in self._declared if name not in columns]
        if lacking:
            raise InvalidDataset(
                f"split {split!r} has no column {lacking[0]!r}, which another split has; every "
                "split needs the same columns"
            )
        rows = {name: column.rows for name, column in columns.items()}
        if len(set(rows.values())) > 1:
            listed = ", ".join(f"{name!r} has {count:,}" for name, count in rows.items())
            raise InvalidDataset(
                f"the columns of split {split!r} differ in rows: {listed}; give each row a value "
                "in every column"
            )
        count = next(iter(rows.values()))
        if count == 0:
            raise InvalidDataset(f"split {split!r} has no rows")
        return count


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Sync a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
