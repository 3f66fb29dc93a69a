"""Requests of the Open Inference Protocol: the heads that a replica gets, and their coding.

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol and Triton's
extensions of it. A replica parses the bodies.
"""

import zlib
from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool

from glasshouse.errors import (
    BadRequest,
    InvalidHeader,
    ModelNotFound,
    ModelVersionNotFound,
    PayloadTooLarge,
    UnsupportedMedia,
)
from glasshouse.spec.model_names import LATEST, canonical, parse_model_reference

JSON_BYTES_HEADER = "Inference-Header-Content-Length"
_JSON_BYTES = JSON_BYTES_HEADER.lower().encode()
CODINGS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""Content codings, and how zlib selects them. The deflate of HTTP has zlib's head (RFC 9110)."""
_LEVEL = 1
"""Tensors of floats compress little, and higher levels only take longer."""
_SHORT_BYTES = 1 << 16
"""Shorter bodies are decoded and coded at once, not in a thread."""


def head_of(headers: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return the head of the frame of an inference request.

    Args:
        headers: of the request, by their names in lower case.

    Raises:
        InvalidHeader: Inference-Header-Content-Length is no number.
    """
    text = headers.get(_JSON_BYTES)
    if text is None:
        return {"protocol": "v2"}
    if not text.isdigit() or len(text) > 18:
        shown = text[:40].decode("latin-1")
        detail = f"{JSON_BYTES_HEADER} is the number of bytes of the JSON, and this is {shown!r}."
        raise InvalidHeader(detail)
    return {"protocol": "v2", "json_bytes": int(text)}


def reference_of(name: str, version: str | None = None) -> str:
    """Return the reference to the model of a path.

    Args:
        name: ``name``, ``name@alias`` or ``name:version``.
        version: the version of the path, a number or an alias; None: the path has none.

    Raises:
        ModelNotFound, ModelVersionNotFound: there can be no such model.
    """
    found = parse_model_reference(name)
    if found is None:
        detail = f"{name[:100]!r} refers to no model: write name, name@alias or name:version."
        raise ModelNotFound(detail)
    if version is None:
        return canonical(name)
    if found.version is not None:
        detail = f"{name!r} names a version already: remove /versions/{version[:100]}, or write"
        raise ModelVersionNotFound(f"{detail} {found.name!r} for the model.")
    if version == LATEST:
        return name
    is_number = version.isascii() and version.isdigit()
    full = f"{name}:{int(version[:20])}" if is_number else f"{name}@{version}"
    if parse_model_reference(full) is None:
        detail = f"{version[:100]!r} is neither the number nor an alias of a version of {name!r}."
        raise ModelVersionNotFound(detail)
    return full


async def decoded(body: bytes, coding: str, max_bytes: int) -> bytes:
    """Return a body without its content coding.

    Args:
        body: as it came.
        coding: of the header Content-Encoding; "" or ``identity``: none.
        max_bytes: the most bytes of the result. No more than that are ever decompressed.

    Raises:
        UnsupportedMedia: the coding is unknown.
        PayloadTooLarge: the result is too large.
        BadRequest: the body is not in this coding.
    """
    coding = coding.strip().lower()
    if coding in {"", "identity"}:
        return body
    if coding not in CODINGS:
        detail = f"The body has the Content-Encoding {coding[:100]!r}: send gzip, deflate or none."
        raise UnsupportedMedia(detail)
    if len(body) < _SHORT_BYTES:
        return _decompressed(body, coding, max_bytes)
    return await run_in_threadpool(_decompressed, body, coding, max_bytes)


def _decompressed(body: bytes, coding: str, max_bytes: int) -> bytes:
    reader = zlib.decompressobj(CODINGS[coding])
    try:
        found = reader.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise BadRequest(f"The body is not {coding}: {error}.") from None
    if len(found) > max_bytes:
        detail = f"The body may have {max_bytes} bytes at most, decompressed."
        raise PayloadTooLarge(detail, limit_bytes=max_bytes)
    if not reader.eof or reader.unused_data:
        raise BadRequest(f"The body is not one whole stream of {coding}.")
    return found


def wanted_coding(accept_encoding: str) -> str | None:
    """Return the coding of the response; None: none.

    A client that accepts gzip or deflate and nothing else asks for it. One that lists several, as
    most HTTP libraries do unasked, gets the response as it is, which is faster in a local network.
    """
    coding = accept_encoding.strip().lower()
    return coding if coding in CODINGS else None


async def encoded(body: bytes, coding: str) -> bytes:
    """Return a body in a content coding."""
    if len(body) < _SHORT_BYTES:
        return _compressed(body, coding)
    return await run_in_threadpool(_compressed, body, coding)


def _compressed(body: bytes, coding: str) -> bytes:
    writer = zlib.compressobj(_LEVEL, zlib.DEFLATED, CODINGS[coding])
    return writer.compress(body) + writer.flush()
