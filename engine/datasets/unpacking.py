"""Decompress bytes on demand, in bounded memory, whatever their contents."""

import zlib
from typing import Protocol

from glasshouse.errors import InvalidDataset

BLOCK_BYTES = 1 << 20
MAX_RATIO = 200
FREE_BYTES = 64 << 20
"""Unpacked bytes before the ratio counts: small files may have any compression ratio."""
_PACKED_BLOCK = 64 << 10


class ByteSource(Protocol):
    """Something that returns its bytes in order."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; ``b""`` only at the end."""
        ...


def read_up_to(source: ByteSource, size: int) -> bytes:
    """Read ``size`` bytes, or fewer if the source ends."""
    parts: list[bytes] = []
    while size > 0 and (part := source.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class Inflated:
    """A decompressed gzip stream (any number of members) or raw deflate stream."""

    def __init__(self, packed: ByteSource, name: str, *, gzip: bool) -> None:
        self._packed = packed
        self._name = name
        self._gzip = gzip
        self._stream = self._new_stream()
        self._packed_bytes = 0
        self._given_bytes = 0
        self._begun = False
        self._pending = b""

    def _new_stream(self):  # noqa: ANN202  (zlib's type has no public name)
        return zlib.decompressobj(31 if self._gzip else -15)

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; ``b""`` at the end.

        Raises:
            InvalidDataset: the stream is truncated or damaged, or is a decompression bomb.
        """
        size = max(size, 1)  # for zlib 0 means no limit
        while not (self._stream.eof and not self._next_member()):
            packed = self._stream.unconsumed_tail or self._more()
            try:
                data = self._stream.decompress(packed, size)
            except zlib.error as error:
                raise InvalidDataset(self._damage(packed)) from error
            self._begun = True
            if data:
                self._given_bytes += len(data)
                self._check_ratio()
                return data
            if not packed and not self._stream.eof:
                raise InvalidDataset(
                    f"{self._name} is cut short: its compressed data ends after "
                    f"{self._packed_bytes:,} bytes; upload the whole file again"
                )
        return b""

    def _more(self) -> bytes:
        if self._pending:
            packed, self._pending = self._pending, b""
            return packed
        packed = self._packed.read(_PACKED_BLOCK)
        self._packed_bytes += len(packed)
        return packed

    def _next_member(self) -> bool:
        """Whether another gzip member follows the one that ended."""
        if not self._gzip:
            return False
        self._pending = self._stream.unused_data.lstrip(b"\0")  # zero padding is allowed
        while not self._pending:
            block = self._more()
            if not block:
                return False
            self._pending = block.lstrip(b"\0")
        self._stream = self._new_stream()
        return True

    def _damage(self, packed: bytes) -> str:
        if self._gzip and not self._begun and not packed.startswith(b"\x1f\x8b"):
            return f"{self._name} is not a gzip file; name the format that it has, or compress it"
        return (
            f"{self._name} is damaged near byte {self._packed_bytes:,} of its compressed data; "
            "upload it again"
        )

    def _check_ratio(self) -> None:
        allowed = FREE_BYTES + MAX_RATIO * self._packed_bytes
        if self._given_bytes > allowed:
            raise InvalidDataset(
                f"{self._name} unpacks to more than {MAX_RATIO} times its size; store it "
                "uncompressed, or leave out what is empty"
            )
