"""Read plain text: one row per line, in the column ``text``. Uses numpy only."""

from pathlib import Path

from engine.datasets.readers.delimited import Lines
from engine.datasets.reading import Format, ReadOptions
from engine.datasets.writer import DatasetWriter

COLUMN = "text"
_CHUNK_BYTES = 1 << 20


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
