"""Files to upload: their formats and their content in chunks."""

import hashlib
from collections.abc import Generator, Mapping, Sequence
from typing import IO, Any

from glasshouse.spec.data import size_of

CHUNK_BYTES = 1 << 18


def pieces(content: bytes | IO[bytes]) -> Generator[bytes]:
    """Yield a file in chunks, from its start on each call; or bytes as one chunk."""
    if isinstance(content, bytes):
        yield content
        return
    content.seek(0)
    while chunk := content.read(CHUNK_BYTES):
        yield chunk


def size_text(resize: tuple[int, int] | str | None) -> str | None:
    """Return a height and a width, as a pair or as ``24x32``, as the API takes them.

    Raises:
        ValueError: it is something else.
    """
    if resize is None:
        return None
    pair: Any = resize
    text = "x".join(map(str, pair)) if isinstance(pair, tuple | list) else str(pair)  # pyright: ignore[reportUnknownArgumentType]
    height, width = size_of(text)
    return f"{height}x{width}"


def format_of(name: str, entries: Sequence[Mapping[str, Any]], *, resizing: bool = False) -> str:
    """Infer the format of a dataset from a file name.

    Args:
        name: the file name. The longest suffix decides.
        entries: the section ``datasets`` of the catalog.
        resizing: take a format whose files can be resized instead, whatever the name.

    Raises:
        ValueError: the suffix is unknown.
    """
    formats = [entry for entry in entries if entry.get("kind") == "format"]
    if resizing:
        return next(one["name"] for one in formats if "resize" in one["schema"]["properties"])
    lowered = name.lower()
    fitting = [
        (len(suffix), one["name"])
        for one in formats
        for suffix in one["suffixes"]
        if lowered.endswith(suffix)
    ]
    if not fitting:
        known = ", ".join(one["name"] for one in formats)
        raise ValueError(f"the format of {name!r} is unknown; set format= to one of {known}")
    return max(fitting)[1]


def sha256_of(file: IO[bytes]) -> str:
    """The hexadecimal digest of a file."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
