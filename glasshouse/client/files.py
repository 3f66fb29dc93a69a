"""Files to upload: their formats and their content in chunks."""

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
    """Yield a file in chunks, from its start on each call; or bytes as one chunk."""
    if isinstance(content, bytes):
        yield content
        return
    content.seek(0)
    while chunk := content.read(CHUNK_BYTES):
        yield chunk


def format_of(name: str) -> str:
    """Infer the format of a dataset from a file name.

    Raises:
        ValueError: the suffix is unknown.
    """
    lowered = name.lower()
    for suffix in sorted(_FORMATS, key=len, reverse=True):
        if lowered.endswith(suffix):
            return _FORMATS[suffix]
    known = ", ".join(sorted(set(_FORMATS.values())))
    raise ValueError(f"the format of {name!r} is unknown; set format= to one of {known}")


def sha256_of(file: IO[bytes]) -> str:
    """The hexadecimal digest of a file."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
