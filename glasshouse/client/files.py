"""Files on their way to the service: their formats, and their bytes piece by piece."""

import hashlib
from collections.abc import Generator
from typing import IO

CHUNK_BYTES = 1 << 18

_FORMATS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".npz": "npz",
    ".npy": "npy",
    ".json.gz": "mnist.json.gz",
    ".idx": "idx",
    "-ubyte": "idx",
    ".idx.gz": "idx.gz",
    "-ubyte.gz": "idx.gz",
    ".zip": "idx.zip",
    ".images.zip": "images.zip",
    ".txt": "text",
}


def pieces(content: bytes | IO[bytes]) -> Generator[bytes]:
    """A file from its start, as often as it is asked for; or bytes, as they are."""
    if isinstance(content, bytes):
        yield content
        return
    content.seek(0)
    while chunk := content.read(CHUNK_BYTES):
        yield chunk


def format_of(name: str) -> str:
    """Tell a dataset's format from a file's name.

    Raises:
        ValueError: the name does not tell.
    """
    lowered = name.lower()
    for suffix in sorted(_FORMATS, key=len, reverse=True):
        if lowered.endswith(suffix):
            return _FORMATS[suffix]
    known = ", ".join(sorted(set(_FORMATS.values())))
    raise ValueError(f"the name {name!r} does not tell the format; give format= one of {known}")


def sha256_of(file: IO[bytes]) -> str:
    """The digest of a whole file, in hexadecimal."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
