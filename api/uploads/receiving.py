"""Write incoming uploads to files and count them by owner. SQL counts those being read."""

import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated

from fastapi import Query, Request
from fastapi.concurrency import contextmanager_in_threadpool
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from api.http.access import Caller
from api.uploads import unsafe
from glasshouse.errors import BadRequest
from models.access import quotas

_BLOCK_BYTES = 1024 * 1024
UploadName = Annotated[
    str | None, Query(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")
]


def declared_bytes(request: Request) -> int:
    """Return the declared length of a body; 0 if unknown."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isdecimal() and text.isascii() else 0


async def receive(request: Request, path: Path) -> tuple[int, str]:
    """Write the body to a file in blocks. RequestGuard limits its size.

    Returns:
        Its size in bytes, and its SHA-256.

    Raises:
        UnsafeFormat: It begins like a file format that runs code when it is opened.
    """
    digest = hashlib.sha256()
    size_bytes = 0
    with path.open("wb") as file:
        waiting_bytes = bytearray()

        def write(block: bytes) -> None:
            digest.update(block)
            file.write(block)

        async for chunk in request.stream():
            if size_bytes < unsafe.LOOKED_AT_BYTES <= size_bytes + len(chunk):
                unsafe.refuse_beginning(bytes(waiting_bytes + chunk))
            size_bytes += len(chunk)
            waiting_bytes += chunk
            if len(waiting_bytes) >= _BLOCK_BYTES:
                await run_in_threadpool(write, bytes(waiting_bytes))
                waiting_bytes.clear()
        if size_bytes < unsafe.LOOKED_AT_BYTES:
            unsafe.refuse_beginning(bytes(waiting_bytes))
        await run_in_threadpool(write, bytes(waiting_bytes))
    return size_bytes, digest.hexdigest()


class Receiving:
    """Number of incoming uploads by owner. Use only on the event loop's thread."""

    def __init__(self) -> None:
        self.num_of_owner: Counter[str] = Counter()

    @asynccontextmanager
    async def file(
        self, request: Request, caller: Caller, opened: AbstractContextManager[Path]
    ) -> AsyncGenerator[tuple[Path, int, str]]:
        """Yield the body of a request as a file: its path, its size and its SHA-256.

        Raises:
            BadRequest: It ended too early.
            QuotaExceeded: The owner has too many incoming uploads.
            UnsafeFormat: It begins like a file format that runs code when it is opened.
        """
        try:
            with self.one_more(caller):
                async with contextmanager_in_threadpool(opened) as path:
                    yield path, *await receive(request, path)
        except ClientDisconnect:
            raise BadRequest("The body ended before it was complete.") from None

    @contextmanager
    def one_more(self, caller: Caller) -> Generator[None]:
        """Count one upload during the block.

        Raises:
            QuotaExceeded: The owner has too many incoming uploads.
        """
        wanted = self.num_of_owner[caller.owner] + 1
        quotas.refuse_over("uploads", wanted, caller.limits.uploads)
        self.num_of_owner[caller.owner] += 1
        try:
            yield
        finally:
            self.num_of_owner -= Counter((caller.owner,))
