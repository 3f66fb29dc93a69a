"""Read parquet files. pyarrow is imported only when a file is read."""

from pathlib import Path

from engine.datasets.reading import Format, ReadOptions
from engine.datasets.writer import DatasetWriter


def read_parquet(path: Path, writer: DatasetWriter, _: ReadOptions) -> None:
    """Read a file as the split ``all``."""
    from engine.datasets.parquet_file import read_file  # noqa: PLC0415 (a large library)

    read_file(path, writer)


FORMATS = (
    Format(
        name="parquet",
        summary="Apache Parquet.",
        read=read_parquet,
        suffixes=(".parquet", ".pq"),
        media_types=("application/vnd.apache.parquet",),
    ),
)
