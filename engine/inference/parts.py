"""Parts of a long inference: rows whose outputs are stored while the next are computed.

A part is an Arrow file of adjacent batches. Its name and its rows follow from the number of rows
and the batch size, so that another attempt, which finds a part stored, skips its rows, and several
processes divide the parts among them. `engine.inference.files` joins them at the end.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.inference.blocks import Block, Shapes, joined

MAX_PARTS = 256
MIN_ROWS = 4096
"""A part has at least so many rows: smaller ones take more time to store than to compute."""
MAX_HELD_BYTES = 32 * 2**20
"""The outputs of a job with a single part stay in memory up to this size."""
JOINED_BYTES = 2**20
"""Smaller blocks are joined before they are stored: each takes time whenever a part is read."""
MEDIA_TYPE = "application/vnd.apache.arrow.file"


@dataclass(frozen=True)
class Plan:
    """How the batches of all rows are divided into parts."""

    num_rows: int
    batch_size: int

    @property
    def num_batches(self) -> int:
        """The number of batches of all rows."""
        return math.ceil(self.num_rows / self.batch_size)

    @property
    def part_batches(self) -> int:
        """The number of batches of a part; the last may have fewer."""
        return max(math.ceil(self.num_batches / MAX_PARTS), math.ceil(MIN_ROWS / self.batch_size))

    @property
    def num_parts(self) -> int:
        """The number of parts."""
        return math.ceil(self.num_batches / self.part_batches)

    def batches(self, part: int) -> range:
        """Return the numbers of the batches of a part."""
        first = part * self.part_batches
        return range(first, min(first + self.part_batches, self.num_batches))

    def rows_of(self, part: int) -> int:
        """Return the number of rows of a part."""
        mine = self.batches(part)
        return min(mine.stop * self.batch_size, self.num_rows) - mine.start * self.batch_size

    def name(self, part: int) -> str:
        """Return the file name of a part."""
        return f"outputs-{part:03d}-of-{self.num_parts:03d}.arrow"

    def mark(self, part: int) -> bytes:
        """Return what a file of this part and no other says of itself."""
        return f"{self.num_rows} rows by {self.batch_size}, part {part}".encode()


class PartWriter:
    """Collects the blocks of one part: in memory, and in a file once they are large."""

    def __init__(self, path: Path, mark: bytes) -> None:
        """``mark``: see `Plan.mark`."""
        self.shapes = Shapes()
        self.held: list[Block] = []
        """The blocks that are not in the file."""
        self._path, self._mark = path, mark
        self._num_bytes = 0
        self._writer: Any = None

    def add(self, block: Block) -> None:
        """Add the outputs of the next rows.

        Raises:
            OSError: the file cannot be written.
        """
        self.shapes.add(block)
        self.held.append(block)
        self._num_bytes += block.num_bytes
        if self._num_bytes > MAX_HELD_BYTES:
            self._write()

    @property
    def is_in_memory(self) -> bool:
        """Whether no block is in the file."""
        return self._writer is None

    def close(self) -> "Part":
        """Write the remaining blocks; the file appears when it is whole.

        Raises:
            OSError: the file cannot be written.
        """
        self._write()
        self._writer.close()
        self._new.replace(self._path)
        return Part(self._path, self.shapes)

    def drop(self) -> None:
        """Delete what was written of a part that is not completed."""
        if self._writer is not None:
            self._writer.close()
        self._new.unlink(missing_ok=True)

    @property
    def _new(self) -> Path:
        return self._path.with_suffix(".new")

    def _write(self) -> None:
        from engine.inference import arrow  # noqa: PLC0415 (0.2 s that most inferences do not need)

        for block in joined(self.held, JOINED_BYTES):
            if self._writer is None:
                self._writer = arrow.new_file(self._new, block, self._mark)
            self._writer.write_batch(arrow.batch_of(block))
        self.held.clear()
        self._num_bytes = 0


@dataclass(frozen=True)
class Part:
    """A part that is stored."""

    path: Path
    shapes: Shapes

    @staticmethod
    def read(path: Path, mark: bytes) -> "Part | None":
        """Return a part that an earlier attempt has stored; None: it is another, or damaged."""
        from engine.inference import arrow  # noqa: PLC0415

        shapes = Shapes()
        try:
            if arrow.mark_of(path) != mark:
                return None
            for block in arrow.blocks_in(path):
                shapes.add(block)
        except (OSError, arrow.ArrowException):
            return None
        return Part(path, shapes)

    def blocks(self) -> Iterator[Block]:
        """Yield its blocks, one in memory at a time."""
        from engine.inference import arrow  # noqa: PLC0415

        yield from arrow.blocks_in(self.path)
