"""A TCP proxy on loopback that cuts connections in the middle of the server's response."""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

CHUNK_BYTES = 4096


class Cutter:
    """Proxies a service and cuts the first ``cuts`` connections with long responses.

    Half of them end as a server ends them (FIN), half as a network does (RST).
    """

    def __init__(self, url: str, *, cuts: int, bytes_each: tuple[int, int], seed: int) -> None:
        parts = urlsplit(url)
        self._target = parts.hostname, parts.port
        self._random = random.Random(seed)  # noqa: S311
        self._left = cuts
        self._bytes_each = bytes_each
        self.made = 0
        """How many connections were cut so far."""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(60)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stopping.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        asking = asyncio.ensure_future(self._copy(reader, up_writer))
        try:
            await self._answer(up_reader, writer)
        finally:
            asking.cancel()
            for end in (up_writer, writer):
                end.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                writer.write(chunk)
                await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the server's response up to the byte at which this connection is cut."""
        room = self._random.randint(*self._bytes_each) if self._left > 0 else None
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                if room is not None and len(chunk) >= room and self._left > 0:
                    await self._cut(writer, chunk[:room])
                    return
                room = None if room is None else room - len(chunk)
                writer.write(chunk)
                await writer.drain()

    async def _cut(self, writer: asyncio.StreamWriter, last: bytes) -> None:
        self._left -= 1
        self.made += 1
        writer.write(last)
        await writer.drain()
        if self.made % 2:
            taken: socket.socket = writer.get_extra_info("socket")
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
