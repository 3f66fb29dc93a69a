"""A connection to a replica, over which many requests are on their way at once."""

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, cast

from glasshouse import frames
from glasshouse.frames import Frame, FrameError, FrameReader, Kind

CONNECT_S = 5.0
MAX_UNSENT_BYTES = 1 << 28
"""More than this waits only for a replica that reads nothing."""
SILENT_S = 5.0
"""A replica that has answered nothing for so long gets requests only if no other can."""
_DOUBT_AFTER_S = 1.0
"""A replica that answered nothing for the whole time of a request, if that was so long, is silent
too; after `SILENT_S` it is tried again."""


class Reply(NamedTuple):
    """What a replica answered."""

    head: dict[str, Any]
    body: bytes


class ReplicaLost(Exception):
    """The connection ended before the answer came, or cannot be made."""


class ReplicaConnection(asyncio.Protocol):
    """The API's end."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._challenge = frames.new_challenge()
        self._reader = FrameReader(frames.MAX_GREETING_BYTES)
        self._transport: asyncio.Transport | None = None
        self._theirs = ""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self.is_closing = False
        """Whether the replica takes no more requests."""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once both sides have proved that they know the token."""
        self.heard_at = time.monotonic()
        """When the replica answered last, or was asked while nothing was on its way."""
        self.doubted_until = 0.0
        """Until then it gets requests only if no other replica can: it answered nothing for the
        whole time of a request."""

    @property
    def num_waiting(self) -> int:
        """Requests that are on their way."""
        return len(self._waiting)

    @property
    def is_usable(self) -> bool:
        """Whether requests can be sent."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and not self.is_closing
            and self.ready.done()
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the challenge."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what waits."""
        lost = ReplicaLost("the connection to the replica ended")
        waiting, self._waiting = self._waiting, {}
        for future in (self.ready, *waiting.values()):
            if not future.done():
                future.set_exception(lost)
        if self.ready.done() and not self.ready.cancelled():
            self.ready.exception()  # retrieved, so that asyncio does not log it

    def data_received(self, data: bytes) -> None:
        """Handle frames."""
        try:
            for frame in self._reader.feed(data):
                self._handle(frame)
        except FrameError:
            self.close()

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.abort()

    def send(self, head: dict[str, Any], body: bytes) -> tuple[int, asyncio.Future[Reply]]:
        """Send a request; return its number, and what becomes the reply.

        Raises:
            ReplicaLost: the connection cannot be used, or the replica reads nothing.
        """
        transport = self._transport
        if transport is None or not self.is_usable:
            raise ReplicaLost("the connection to the replica has ended")
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise ReplicaLost("the replica reads nothing")
        if not self._waiting:
            self.heard_at = time.monotonic()
        number = next(self._numbers)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        transport.writelines(frames.pack_parts(Kind.REQUEST, number, head, body))
        return number, future

    def cancel(self, number: int) -> None:
        """Tell the replica that nobody waits for an answer any more."""
        if self._waiting.pop(number, None) is not None and self._transport is not None:
            self._transport.write(frames.pack(Kind.CANCEL, number))

    def _handle(self, frame: Frame) -> None:
        if frame.kind is Kind.ANSWER:
            self.heard_at = time.monotonic()
            self.doubted_until = 0.0
            future = self._waiting.pop(frame.number, None)
            if future is not None and not future.done():
                future.set_result(Reply(frame.head, frame.body))
        elif frame.kind is Kind.CLOSING:
            self.is_closing = True
        elif not self.ready.done():
            self._greet(frame)

    def _greet(self, frame: Frame) -> None:
        own = self._challenge
        if frame.kind is Kind.CHALLENGE and not self._theirs and self._transport is not None:
            self._theirs = str(frame.head.get("challenge"))
            proof = frames.proof(self._token, "api", self._theirs, own)
            self._transport.write(frames.pack(Kind.PROOF, 0, {"challenge": own, "proof": proof}))
            return
        found = frame.head.get("proof")
        if frame.kind is Kind.PROOF and frames.is_proof(
            found, self._token, "replica", own, self._theirs
        ):
            self._reader.max_bytes = frames.MAX_FRAME_BYTES
            self.ready.set_result(None)
            return
        self.close()


Place = tuple[str, int]
"""A job and its attempt."""


class Connections:
    """One connection to each process that answers requests, opened by the first of them."""

    def __init__(self) -> None:
        self._open: dict[Place, ReplicaConnection] = {}
        self._opening: dict[Place, asyncio.Task[ReplicaConnection]] = {}

    def known(self, place: Place) -> ReplicaConnection | None:
        """Return the connection to a process; None: there is none yet."""
        return self._open.get(place)

    async def get(self, place: Place, address: str, token: str, until: float) -> ReplicaConnection:
        """Return the connection to a process, which is opened if there is none that can be used.

        Args:
            place: the process.
            address: where it listens.
            token: its secret.
            until: by ``time.monotonic``, the longest that the caller waits.

        Raises:
            ReplicaLost: it cannot be reached, or not in time.
        """
        found = self._open.get(place)
        if found is not None and found.is_usable:
            return found
        task = self._opening.get(place)
        if task is None:
            task = asyncio.create_task(connect(address, token))
            self._opening[place] = task
            task.add_done_callback(lambda done: self._opened(place, done))
        try:
            async with asyncio.timeout(until - time.monotonic()):
                return await asyncio.shield(task)
        except TimeoutError:
            raise ReplicaLost(f"{address} does not answer") from None

    def keep(self, places: Collection[Place]) -> None:
        """Close the connections to all other processes."""
        for place in [one for one in self._open if one not in places]:
            self._open.pop(place).close()

    def _opened(self, place: Place, task: asyncio.Task[ReplicaConnection]) -> None:
        self._opening.pop(place, None)
        if not task.cancelled() and task.exception() is None:
            self._open[place] = task.result()


async def exchange(
    connection: ReplicaConnection, head: Mapping[str, Any], body: bytes, left_s: float
) -> Reply:
    """Send a request and return the reply.

    Args:
        connection: to the process that answers.
        head: of the request, with its ``reference``.
        body: of the request.
        left_s: the longest that the client waits, seconds.

    Raises:
        ReplicaLost: the process ends before it answers, or does not answer such requests any more.
        TimeoutError: there was no answer in time.
    """
    number, reply = connection.send({**head, "timeout_s": left_s}, body)
    sent_at = time.monotonic()
    try:
        async with asyncio.timeout(left_s):
            found = await reply
    except TimeoutError:
        if left_s >= _DOUBT_AFTER_S and connection.heard_at <= sent_at:
            connection.doubted_until = time.monotonic() + SILENT_S
        raise
    finally:
        connection.cancel(number)  # nothing, if it was answered
    if found.head.get("code") in ("replica_closing", "model_not_served"):
        raise ReplicaLost(str(found.head.get("detail")))
    return found


async def connect(address: str, token: str) -> ReplicaConnection:
    """Connect to a replica.

    Args:
        address: ``unix:/path`` or ``tcp:host:port``.
        token: its secret.

    Raises:
        ReplicaLost: it cannot be reached, or does not know the token.
    """
    make: Callable[[], ReplicaConnection] = lambda: ReplicaConnection(token)  # noqa: E731
    loop = asyncio.get_running_loop()
    kind, _, where = address.partition(":")
    try:
        async with asyncio.timeout(CONNECT_S):
            if kind == "unix":
                transport, made = await loop.create_unix_connection(make, where)
            else:
                host, _, port = where.rpartition(":")
                transport, made = await loop.create_connection(make, host, int(port))
            try:
                await made.ready
            except BaseException:
                transport.abort()
                raise
    except (OSError, TimeoutError, ValueError) as error:
        raise ReplicaLost(f"{address} cannot be reached: {error or 'no answer'}") from error
    return made
