"""Read plain text: one row per line, in the column ``text``. Uses numpy only."""

from collections import deque
from pathlib import Path
from typing import BinaryIO

from engine.datasets.reading import Format, ReadOptions
from engine.datasets.writer import DatasetWriter
from glasshouse.errors import InvalidDataset

COLUMN = "text"
MAX_ROW_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 20


class Lines:
    """The lines of a text file, each decoded and checked separately.

    A line ends with a line feed, a carriage return, or both.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._cut: deque[bytes] = deque()
        self._rest = b""
        self.number = 0
        self.row_bytes = 0

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> str:
        data = self._cut.popleft() if self._cut else self._read()
        self.number += 1
        self.row_bytes += len(data)
        if self.number == 1:
            if data.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise InvalidDataset("the file is UTF-16; save it as UTF-8")
            data = data.removeprefix(b"\xef\xbb\xbf")
        if self.row_bytes > MAX_ROW_BYTES:
            raise InvalidDataset(
                f"line {self.number}: the row is larger than {MAX_ROW_BYTES:,} bytes; check "
                "whether a quote is never closed, or make the row shorter"
            )
        if b"\0" in data:
            raise InvalidDataset(
                f"line {self.number} holds a NUL byte: this is not a text file; save it as UTF-8 "
                "text"
            )
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise InvalidDataset(
                f"line {self.number}, byte {error.start + 1} is not UTF-8 "
                f"({data[error.start]:#04x}); save the file as UTF-8"
            ) from error

    def _read(self) -> bytes:
        """Return the next line; lines that carriage returns end before the next LF are queued."""
        data = self._rest + self._file.readline(MAX_ROW_BYTES + 1 - len(self._rest))
        self._rest = b""
        if not data:
            raise StopIteration
        if data.find(b"\r", 0, -2 if data.endswith(b"\n") else -1) < 0:
            return data
        lines = data.splitlines(keepends=True)
        if len(lines) > 1 and len(data) > MAX_ROW_BYTES and not data.endswith(b"\n"):
            self._rest = lines.pop()
        self._cut.extend(lines)
        return self._cut.popleft()


def read_text(path: Path, writer: DatasetWriter, _: ReadOptions) -> None:
    """Read all lines as the split ``all``, including empty ones, without line ends.

    Raises:
        InvalidDataset: it is not UTF-8 text, or a line is too long.
    """
    column = writer.texts("all", COLUMN)
    with path.open("rb") as file:
        waiting: list[bytes] = []
        size = 0
        lines = Lines(file)
        for line in lines:
            waiting.append(line.rstrip("\r\n").encode())
            size += lines.row_bytes
            lines.row_bytes = 0
            if size >= _CHUNK_BYTES:
                column.append(waiting)
                waiting, size = [], 0
        column.append(waiting)


FORMATS = (
    Format(
        name="text",
        summary="UTF-8 text, one row per line.",
        read=read_text,
        suffixes=(".txt",),
        media_types=("text/plain",),
    ),
)
