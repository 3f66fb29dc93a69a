"""Read mnist.json.gz: ``[[images, labels], …]`` for train, validation and test.

The JSON has some hundred megabytes, so it is parsed image by image and never in memory as a whole.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.datasets.reading import Format, ReadOptions
from engine.datasets.unpacking import BLOCK_BYTES, ByteSource, Inflated
from engine.datasets.writer import DatasetWriter, NumberColumnWriter
from glasshouse.errors import InvalidDataset

_SPLITS = ("train", "validation", "test")
_ROWS_PER_BLOCK = 256
_MAX_ARRAY_BYTES = 16 << 20
_SPACE = b" \t\r\n"
_NUMERIC = b"0123456789+-.eE,[]" + _SPACE
_MNIST_PIXELS = 28 * 28


def read_mnist_json(path: Path, writer: DatasetWriter, options: ReadOptions) -> None:
    """Read images (flat or as rows) and integer labels of the three splits."""
    with path.open("rb") as file:
        unpacked = Inflated(file, "the file", gzip=True)
        text = _Text(unpacked, max_bytes=8 * options.max_bytes)  # a number takes a few characters
        text.take(b"[", "the list of the three sets")
        for number, split in enumerate(_SPLITS):
            if number > 0:
                text.take(b",", f"the set of split {split!r}")
            _read_set(text, split, writer)
        text.take(b"]", "the end of the three sets")
        if text.peek():
            raise InvalidDataset(f"more data follows the three sets, {text.where}; remove it")


def _read_set(text: "_Text", split: str, writer: DatasetWriter) -> None:
    text.take(b"[", f"the pair [images, labels] of split {split!r}")
    num_images = _read_images(text, split, writer)
    text.take(b",", f"the labels of split {split!r}")
    labels = _parse_labels(text.array(f"the labels of split {split!r}"), split)
    text.take(b"]", f"the end of split {split!r}")
    if len(labels) != num_images:
        raise InvalidDataset(
            f"split {split!r} has {num_images:,} images but {len(labels):,} labels; give each "
            "image one label"
        )
    writer.numbers(split, "label", np.dtype(np.int64)).append(labels)


def _read_images(text: "_Text", split: str, writer: DatasetWriter) -> int:
    text.take(b"[", f"the images of split {split!r}")
    column: NumberColumnWriter | None = None
    shape: tuple[int, ...] = ()
    rows: list[bytes] = []
    num_images = 0
    more = text.peek() != b"]"
    while more:
        rows.append(text.array(f"image {num_images + len(rows)} of split {split!r}"))
        more = text.peek() == b","
        text.take(b"," if more else b"]", f"the next image of split {split!r}")
        if len(rows) < _ROWS_PER_BLOCK and more:
            continue
        values = _parse_images(rows, split, num_images)
        if column is None:
            shape = values.shape[1:]
            # Flat images of 784 values are MNIST's: use the same shape as for its idx files.
            square = (28, 28) if shape == (_MNIST_PIXELS,) else shape
            column = writer.numbers(split, "image", np.dtype(np.float32), square)
        if values.shape[1:] != shape:
            raise InvalidDataset(
                f"image {num_images} of split {split!r} or one of the next {len(rows)} has the "
                f"shape {list(values.shape[1:])}, those before {list(shape)}; make them alike"
            )
        column.append(values)
        num_images += len(rows)
        rows = []
    if column is None:
        raise InvalidDataset(f"split {split!r} has no images")
    return num_images


def _parse_images(rows: list[bytes], split: str, first: int) -> NDArray[np.float32]:
    parsed = [_parse_numbers(row, f"image {first + i} of split {split!r}")
              for i, row in enumerate(rows)]  # fmt: skip
    try:
        values = np.array(parsed, np.float64)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidDataset(
            f"images {first} to {first + len(rows) - 1} of split {split!r} are not alike: each "
            "must be one list of as many numbers, or rows of as many numbers"
        ) from error
    if values.size == 0:
        raise InvalidDataset(f"image {first} of split {split!r} has no pixels")
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if np.any(np.isinf(narrow) & np.isfinite(values)):
        raise InvalidDataset(f"an image from {first} of split {split!r} on does not fit float32")
    return narrow


def _parse_labels(row: bytes, split: str) -> NDArray[np.int64]:
    labels = _parse_numbers(row, f"the labels of split {split!r}")
    for index, label in enumerate(labels):
        if type(label) is not int or not -(2**63) <= label < 2**63:
            raise InvalidDataset(
                f"label {index} of split {split!r} is {str(label)[:40]}; labels are integers"
            )
    return np.array(labels, np.int64)


def _parse_numbers(row: bytes, what: str) -> list[Any]:
    rest = row.translate(None, _NUMERIC)
    if rest and rest.replace(b"NaN", b"").replace(b"Infinity", b""):
        raise InvalidDataset(f"{what} holds {rest[:20]!r}, which is no number")
    try:
        return json.loads(row)
    except (ValueError, RecursionError) as error:
        raise InvalidDataset(f"{what} is not JSON: {error}") from error


class _Text:
    """A cursor over JSON text that is read on demand."""

    def __init__(self, source: ByteSource, *, max_bytes: int) -> None:
        self._source = source
        self._max_bytes = max_bytes
        self._buffer = b""
        self._at = 0
        self._passed = 0

    @property
    def where(self) -> str:
        """The position of the cursor, for a message."""
        return f"at byte {self._passed + self._at:,} of the unpacked JSON"

    def peek(self) -> bytes:
        """Return the next character that is not white space; ``b""`` at the end."""
        while True:
            rest = self._buffer[self._at : self._at + 64]
            found = rest.lstrip(_SPACE)
            self._at += len(rest) - len(found)
            if found:
                return found[:1]
            if self._at >= len(self._buffer) and not self._fill():
                return b""

    def take(self, expected: bytes, what: str) -> None:
        """Skip one character that must come next."""
        found = self.peek()
        if found != expected:
            shown = f"{found.decode('latin-1')!r} stands" if found else "the text ends"
            raise InvalidDataset(
                f"{shown} {self.where} where {expected.decode()!r} was expected ({what}); the "
                "file must be [[images, labels], [images, labels], [images, labels]]"
            )
        self._at += 1

    def array(self, what: str) -> bytes:
        """Return the text of one whole array of numbers, with all arrays inside it."""
        if self.peek() != b"[":
            raise InvalidDataset(f"{what} is not a list of numbers, {self.where}")
        depth = 0
        length = 0  # scanned bytes, from the cursor on
        while True:
            start = self._at + length
            end = self._buffer.find(b"]", start) + 1
            if end > 0:
                depth += self._buffer.count(b"[", start, end) - 1
                length = end - self._at
                if depth == 0:
                    text = self._buffer[self._at : end]
                    self._at = end
                    return text
                continue
            depth += self._buffer.count(b"[", start)
            length = len(self._buffer) - self._at
            if length > _MAX_ARRAY_BYTES:
                raise InvalidDataset(
                    f"{what} takes more than {_MAX_ARRAY_BYTES:,} bytes, {self.where}; a list may "
                    "not be longer"
                )
            if not self._fill():
                raise InvalidDataset(f"the text ends inside {what}; upload the whole file again")

    def _fill(self) -> bool:
        block = self._source.read(BLOCK_BYTES)
        self._passed += self._at
        self._buffer = self._buffer[self._at :] + block
        self._at = 0
        if self._passed + len(self._buffer) > self._max_bytes:
            raise InvalidDataset(f"the unpacked JSON is larger than {self._max_bytes:,} bytes")
        return bool(block)


FORMATS = (
    Format(
        name="mnist.json.gz",
        summary="[[images, labels], …] of train, validation and test, compressed with gzip.",
        read=read_mnist_json,
        suffixes=(".json.gz",),
    ),
)
