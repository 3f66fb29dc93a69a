"""Frames between the API and a replica of a serve job: requests, answers, and their order.

A connection has many requests at once, each with a number, and answers come in any order. A frame
is::

    length of what follows, 4 bytes | kind, 1 | number, 8 | length of the head, 4 | head | body

in big-endian order. The head is a JSON object, the body the bytes of an HTTP body.

Before any request both sides prove that they know the token of the replica, which never travels
itself: each sends a random challenge and answers the other's with an HMAC.
"""

import hashlib
import hmac
import secrets
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import orjson

MAX_FRAME_BYTES = 1 << 30
MAX_GREETING_BYTES = 4096
"""The most bytes of a peer that has not proved that it knows the token."""
_PREFIX = struct.Struct(">IBQI")
_AFTER_LENGTH = _PREFIX.size - 4
_CHALLENGE_BYTES = 32


class Kind(IntEnum):
    """What a frame is."""

    CHALLENGE = 0
    """The replica's: its head has ``challenge``."""
    PROOF = 1
    """The API's: ``challenge`` and ``proof``; then the replica's: ``proof``."""
    REQUEST = 2
    ANSWER = 3
    CANCEL = 4
    """The client of a request is gone."""
    CLOSING = 5
    """The replica's: it takes no more requests, and answers those that it has."""


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    number: int
    """Of the request; 0 if the frame belongs to none."""
    head: dict[str, Any]
    body: bytes


class FrameError(Exception):
    """The bytes are no frames."""


def pack(kind: Kind, number: int = 0, head: dict[str, Any] | None = None) -> bytes:
    """Return a frame without a body."""
    return b"".join(pack_parts(kind, number, head or {}, b""))


def pack_parts(
    kind: Kind, number: int, head: dict[str, Any], body: bytes | memoryview
) -> tuple[bytes, bytes | memoryview]:
    """Return a frame in two parts, so that a large body is not copied."""
    text = orjson.dumps(head)
    length = _AFTER_LENGTH + len(text) + len(body)
    return _PREFIX.pack(length, kind, number, len(text)) + text, body


class FrameReader:
    """Splits the bytes of a connection into frames."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        """The longest frame that is accepted."""
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Yield the frames that are complete with ``data``.

        Raises:
            FrameError: the bytes are no frames, or a frame is too long.
        """
        self._buffer += data
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > self.max_bytes:
                raise FrameError(f"a frame of {length} bytes; at most {self.max_bytes} are taken")
            if len(self._buffer) < 4 + length:
                return
            frame = _parse(memoryview(self._buffer)[: 4 + length].toreadonly())
            del self._buffer[: 4 + length]
            yield frame


def _parse(data: memoryview) -> Frame:
    if len(data) < _PREFIX.size:
        raise FrameError("a frame is shorter than its prefix")
    with data:
        _, kind, number, head_length = _PREFIX.unpack_from(data)
        body_at = _PREFIX.size + head_length
        if body_at > len(data):
            raise FrameError("a frame is shorter than its head")
        try:
            head = orjson.loads(data[_PREFIX.size : body_at])
            found = Kind(kind)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a frame cannot be read: {error}") from None
        if not isinstance(head, dict):
            raise FrameError("the head of a frame is no object")
        return Frame(found, number, head, bytes(data[body_at:]))


def new_challenge() -> str:
    """Return random text that has never been used."""
    return secrets.token_hex(_CHALLENGE_BYTES)


def proof(token: str, side: str, challenge: str, other: str) -> str:
    """Return what proves to the sender of ``challenge`` that ``side`` knows the token.

    ``other``: the own challenge; with both, no answer can be used a second time.
    """
    text = f"{side}:{challenge}:{other}".encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def is_proof(found: Any, token: str, side: str, challenge: str, other: str) -> bool:
    """Return whether ``found`` is the proof of ``side``."""
    wanted = proof(token, side, challenge, other)
    return isinstance(found, str) and hmac.compare_digest(found.encode(), wanted.encode())
