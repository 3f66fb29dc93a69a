"""Unpack untrusted files on demand, in bounded memory: gzip streams and zip archives.

Of an archive only regular files are read, and names are never used as paths. The standard library's
reader is not used, because it creates an object for every entry before the entries can be counted.
"""

import os
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from glasshouse.errors import InvalidDataset

BLOCK_BYTES = 1 << 20
MAX_RATIO = 200
FREE_BYTES = 64 << 20
"""Unpacked bytes before the ratio counts: small files may have any compression ratio."""
_PACKED_BLOCK = 64 << 10
MAX_MEMBERS = 1000
_MAX_DIRECTORY_BYTES = 1 << 20
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF
_STORED, _DEFLATED = 0, 8
_UNIX = 3


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


def declared_blocks(
    source: ByteSource, name: str, num_bytes: int, block_bytes: int, *, takes: str, beyond: str
) -> Iterator[bytes]:
    """Yield the ``num_bytes`` bytes that a file declares, in blocks.

    Args:
        source: where they come from.
        name: the file, for messages.
        num_bytes: how many there must be.
        block_bytes: the size of all blocks but the last.
        takes: what the file declares, as the subject and verb before a number of bytes.
        beyond: the same after a number of bytes, and what to do about more of them.

    Raises:
        InvalidDataset: there are fewer bytes, or more.
    """
    left = num_bytes
    while left > 0:
        block = read_up_to(source, min(block_bytes, left))
        left -= len(block)
        if len(block) < block_bytes and left > 0:
            raise InvalidDataset(
                f"{name} is cut short: {takes} {num_bytes:,} bytes, but {num_bytes - left:,} are "
                "there; upload the whole file again"
            )
        yield block
    if source.read(1):
        raise InvalidDataset(f"{name} has more data than the {num_bytes:,} bytes {beyond}")


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
                what = f"damaged near byte {self._packed_bytes:,} of its compressed data; upload it"
                what += " again"
                if self._gzip and not self._begun and not packed.startswith(b"\x1f\x8b"):
                    what = "not a gzip file; name the format that it has, or compress it"
                raise InvalidDataset(f"{self._name} is {what}") from error
            self._begun = True
            if data:
                self._given_bytes += len(data)
                if self._given_bytes > FREE_BYTES + MAX_RATIO * self._packed_bytes:
                    raise InvalidDataset(
                        f"{self._name} unpacks to more than {MAX_RATIO} times its size; store it "
                        "uncompressed, or leave out what is empty"
                    )
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


# --- zip archives ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A regular file of an archive, as the central directory declares it."""

    name: str
    method: int
    crc: int
    packed_bytes: int
    size_bytes: int
    header_offset: int


def list_members(
    file: BinaryIO,
    *,
    max_bytes: int,
    max_members: int = MAX_MEMBERS,
    max_directory_bytes: int = _MAX_DIRECTORY_BYTES,
) -> list[ArchiveMember]:
    """List the regular files of an archive, as it declares them.

    Raises:
        InvalidDataset: it is not a zip archive, or is not safe to read.
    """
    count, size, offset = _find_directory(file)
    if count > max_members or size > max_directory_bytes:
        raise InvalidDataset(
            f"the zip archive lists {count:,} files; {max_members:,} is the limit, so put fewer "
            "in it"
        )
    file.seek(offset)
    directory = file.read(size)
    members: list[ArchiveMember] = []
    at = 0
    for _ in range(count):
        member, at = _parse_entry(directory, at)
        if member is not None:
            members.append(member)
    _check_names(members)
    total = sum(member.size_bytes for member in members)
    if total > max_bytes:
        raise InvalidDataset(
            f"the zip archive declares {total:,} bytes of content; the limit is {max_bytes:,}"
        )
    return members


def open_member(file: BinaryIO, member: ArchiveMember) -> ByteSource:
    """Open a member. Its size and checksum are compared with the declared ones while reading."""
    file.seek(member.header_offset)
    header = file.read(_LOCAL.size)
    if len(header) < _LOCAL.size or not header.startswith(b"PK\x03\x04"):
        raise InvalidDataset(f"{member.name!r} is not where the zip archive says; upload it again")
    *_, name_bytes, extra_bytes = _LOCAL.unpack(header)
    start = member.header_offset + _LOCAL.size + name_bytes + extra_bytes
    packed = _Part(file, start, member.packed_bytes)
    if member.method == _STORED:
        return _Checked(packed, member)
    return _Checked(Inflated(packed, repr(member.name), gzip=False), member)


def _find_directory(file: BinaryIO) -> tuple[int, int, int]:
    """Return the number of entries, the size and the offset of the central directory."""
    size_bytes = file.seek(0, os.SEEK_END)
    start = max(0, size_bytes - _END.size - _FULL_16)
    file.seek(start)
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise InvalidDataset(
            "the file is not a zip archive, or its end is missing; upload the whole file again"
        )
    _, disk, first_disk, _, count, size, offset, _ = _END.unpack_from(tail, at)
    if count == _FULL_16 or _FULL_32 in {size, offset}:
        locator = start + at - _LOCATOR64.size
        if locator >= 0:
            count, size, offset = _find_directory64(file, locator, (count, size, offset))
    if disk != first_disk:
        raise InvalidDataset("the zip archive is one part of several; make it one file")
    if offset + size > size_bytes:
        raise InvalidDataset("the zip archive's list of files lies outside it; make it again")
    return count, size, offset


def _find_directory64(
    file: BinaryIO, locator: int, otherwise: tuple[int, int, int]
) -> tuple[int, int, int]:
    file.seek(locator)
    found = file.read(_LOCATOR64.size)
    if not found.startswith(b"PK\x06\x07"):
        return otherwise
    file.seek(min(_LOCATOR64.unpack(found)[2], locator))
    end = file.read(_END64.size)
    if len(end) < _END64.size or not end.startswith(b"PK\x06\x06"):
        raise InvalidDataset("the zip archive's 64-bit end record is damaged; make it again")
    *_, count, size, offset = _END64.unpack(end)
    return count, size, offset


def _parse_entry(directory: bytes, at: int) -> tuple[ArchiveMember | None, int]:
    """Parse an entry (None: a folder, or a file added by macOS); return it and the next offset."""
    entry = directory[at : at + _ENTRY.size]
    if len(entry) < _ENTRY.size or not entry.startswith(b"PK\x01\x02"):
        raise InvalidDataset("the zip archive's list of files is damaged; make it again")
    (_, made_by, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes,
     comment_bytes, _, _, attributes, offset) = _ENTRY.unpack(entry)  # fmt: skip
    name_at = at + _ENTRY.size
    extra_at = name_at + name_bytes
    end = extra_at + extra_bytes + comment_bytes
    if end > len(directory):
        raise InvalidDataset("the zip archive's list of files is damaged; make it again")
    try:
        name = directory[name_at:extra_at].decode("utf-8" if flags & 0x800 else "cp437")
    except UnicodeDecodeError as error:
        raise InvalidDataset("a file name in the zip archive is not UTF-8; rename it") from error
    if name.endswith("/") or name.startswith("__MACOSX/") or name.split("/")[-1] == ".DS_Store":
        return None, end
    mode = attributes >> 16
    if made_by >> 8 == _UNIX and stat.S_IFMT(mode) not in {0, stat.S_IFREG}:
        raise InvalidDataset(f"{name!r} in the zip archive is not a regular file; leave it out")
    if flags & 1:
        raise InvalidDataset(f"{name!r} in the zip archive is encrypted; store it in plain")
    if method not in {_STORED, _DEFLATED}:
        raise InvalidDataset(
            f"{name!r} in the zip archive is compressed by method {method}; use deflate or store"
        )
    extra = directory[extra_at : extra_at + extra_bytes]
    size, packed, offset = _widen(extra, size, packed, offset)
    return ArchiveMember(name, method, crc, packed, size, offset), end


def _widen(extra: bytes, *fields: int) -> list[int]:
    """Replace each 32-bit field that is at its maximum by the 64-bit value in the extra record."""
    wide: list[int] = []
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            body = extra[at + 4 : at + 4 + length]
            wide = [number for (number,) in struct.iter_unpack("<Q", body[: len(body) // 8 * 8])]
        at += 4 + length
    return [wide.pop(0) if field == _FULL_32 and wide else field for field in fields]


def _check_names(members: list[ArchiveMember]) -> None:
    seen: set[str] = set()
    for name in (member.name for member in members):
        parts = name.replace("\\", "/").split("/")
        if not name.isprintable() or ".." in parts or parts[0] == "" or ":" in parts[0]:
            raise InvalidDataset(
                f"{name[:200]!r} in the zip archive points outside it; store plain file names"
            )
        if name.casefold() in seen:
            raise InvalidDataset(f"{name!r} is in the zip archive twice; remove one")
        seen.add(name.casefold())


class _Part:
    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file = file
        self._at = start
        self._left = size

    def read(self, size: int, /) -> bytes:
        self._file.seek(self._at)
        data = self._file.read(min(size, self._left))
        self._at += len(data)
        self._left -= len(data)
        return data


class _Checked:
    """A member's content. Its size and checksum are verified while it is read."""

    def __init__(self, content: ByteSource, member: ArchiveMember) -> None:
        self._content = content
        self._member = member
        self._size = 0
        self._crc = 0

    def read(self, size: int, /) -> bytes:
        data = self._content.read(size)
        self._size += len(data)
        self._crc = zlib.crc32(data, self._crc)
        name, declared = self._member.name, self._member.size_bytes
        if self._size > declared or (not data and self._size < declared):
            raise InvalidDataset(
                f"{name!r} has {'more' if data else 'fewer'} bytes than the {declared:,} that the "
                "zip archive declares; make the archive again"
            )
        if not data and self._crc != self._member.crc:
            raise InvalidDataset(f"{name!r} fails its checksum: it was damaged; upload it again")
        return data
