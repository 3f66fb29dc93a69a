"""The value that a reader registers: a file format with its names, options and function."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.datasets.writer import DatasetWriter

Option = Literal["header", "resize"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The limit and the options of reading one file."""

    max_bytes: int
    """The maximum size of the unpacked content."""
    header: bool | None = None
    """Whether the first row of a table names the columns; None: it is detected."""
    resize: tuple[int, int] | None = None
    """The height and width of all images; None: they keep their own."""


@dataclass(frozen=True, slots=True)
class Format:
    """A file format of datasets.

    A module of ``engine.datasets.readers`` registers its formats as ``FORMATS``, an installed
    package as an entry point of the group ``glasshouse.formats``. Everything else follows: what the
    API accepts, the catalog, and how client, command line and dashboard infer the format of a file.
    The API imports the module too: import a large library in the function that reads.
    """

    name: str
    """The value of ``format``. At most 40 characters."""
    summary: str
    """One sentence for the catalog."""
    read: Callable[[Path, DatasetWriter, ReadOptions], None]
    """Reads a file into a dataset. Runs in a process of its own, with limits. Raises
    `InvalidDataset` with the reason if the file cannot be read."""
    suffixes: tuple[str, ...] = ()
    """The ends of file names by which the format is inferred, in lower case."""
    media_types: tuple[str, ...] = ()
    """The values of ``Content-Type`` by which the format is inferred, in lower case."""
    options: tuple[Option, ...] = ()
    """The options that the format has."""
