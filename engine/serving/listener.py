"""The network side of a replica: a thread that accepts connections of the API and reads requests.

Requests are parsed here, so that a wrong one is refused at once, also while the network computes.
"""

import asyncio
import contextlib
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from engine.serving import requests, responses
from engine.serving.answers import Answer, refusal
from engine.serving.queue import Pending, QueueFull, RequestQueue
from engine.serving.request_log import RequestRecorder
from engine.serving.requests import BadRequest
from engine.serving.served_models import ServedNetwork
from glasshouse import frames, jsonio
from glasshouse.frames import Frame, FrameError, FrameReader, Kind

GREETING_S = 10.0
"""The longest that a peer may take to prove that it knows the token."""
MAX_UNSENT_BYTES = 1 << 28
"""A peer that reads so slowly that more than this waits for it is cut off."""
LONGEST_S = 600.0
SHADOW_PRIORITY = -1_000_000
"""Below that of any request of a client."""


class Entry(Protocol):
    """What answers requests for one reference."""

    @property
    def current(self) -> ServedNetwork:
        """The network that answers usually."""
        ...

    def choose(self) -> ServedNetwork:
        """Return the network that answers a request."""
        ...

    def choose_shadow(self) -> ServedNetwork | None:
        """Return the network that also computes a request, if any."""
        ...


class Connection(asyncio.Protocol):
    """One API process."""

    def __init__(self, listener: "Listener") -> None:
        self._listener = listener
        self._reader = FrameReader(frames.MAX_GREETING_BYTES)
        self._challenge = frames.new_challenge()
        self._is_trusted = False
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, Pending] = {}
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the challenge."""
        self._transport = cast("asyncio.Transport", transport)
        _send_at_once(transport)
        self.send(frames.pack(Kind.CHALLENGE, 0, {"challenge": self._challenge}))
        self._timer = asyncio.get_running_loop().call_later(GREETING_S, self._distrust)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what nobody waits for any more."""
        for request in self._waiting.values():
            self._listener.cancel(request)
        self._waiting.clear()
        self._listener.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Handle frames."""
        try:
            for frame in self._reader.feed(data):
                self._handle(frame)
        except FrameError:
            self.close()

    def send(self, *parts: bytes | memoryview) -> None:
        """Send bytes to the API."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.writelines(parts)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            transport.abort()

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.abort()

    def answered(self, number: int, head: Mapping[str, Any], body: bytes) -> None:
        """Send the answer of a request, once."""
        self._waiting.pop(number, None)
        self.send(*frames.pack_parts(Kind.ANSWER, number, dict(head), body))

    def expire(self, number: int) -> None:
        """Refuse a request whose own timeout has passed, unless it was answered."""
        request = self._waiting.get(number)
        if request is not None:
            self._listener.cancel(request)
            self.answered(number, *self._listener.too_late(request))

    @property
    def is_sending(self) -> bool:
        """Whether bytes wait to be sent."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def _distrust(self) -> None:
        if not self._is_trusted:
            self.close()

    def _handle(self, frame: Frame) -> None:
        if not self._is_trusted:
            self._greet(frame)
        elif frame.kind is Kind.REQUEST:
            self._request(frame)
        elif frame.kind is Kind.CANCEL:
            request = self._waiting.pop(frame.number, None)
            if request is not None:
                self._listener.cancel(request)

    def _greet(self, frame: Frame) -> None:
        token, own = self._listener.token, self._challenge
        other = str(frame.head.get("challenge"))
        found = frame.head.get("proof")
        if frame.kind is not Kind.PROOF or not frames.is_proof(found, token, "api", own, other):
            self.close()
            return
        self._is_trusted = True
        self._reader.max_bytes = frames.MAX_FRAME_BYTES
        answer = {"proof": frames.proof(token, "replica", other, own)}
        self.send(frames.pack(Kind.PROOF, 0, answer))
        self._listener.connections.add(self)
        if self._listener.is_closing:
            self.send(frames.pack(Kind.CLOSING))

    def _request(self, frame: Frame) -> None:
        try:
            found = self._listener.take_in(self, frame)
        except Exception:  # a defect in the handling of one request must not end the others
            traceback.print_exc()
            found = refusal(500, "engine_failed", "The replica failed on this request.")
        if isinstance(found, Pending):
            self._waiting[frame.number] = found
        else:
            self.answered(frame.number, *found)


class Listener:
    """Accepts connections and fills the queue."""

    def __init__(self, token: str, queue: RequestQueue, max_rows: int) -> None:
        """``max_rows``: of one request."""
        self.token = token
        self.connections: set[Connection] = set()
        self.is_closing = False
        self.entries: Mapping[str, Entry] = {}
        """By reference. Replaced as a whole."""
        self.num_refused: dict[str, int] = {}
        """Requests that were refused, by code."""
        self.num_received = 0
        self.recorder: RequestRecorder | None = None
        """What records requests, if they are recorded."""
        self._queue, self._max_rows = queue, max_rows
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)

    def open(self, listen: Mapping[str, Any]) -> str:
        """Listen; return the address.

        Args:
            listen: ``path`` of a Unix socket, or ``host`` and ``port`` (0: any free one).
        """
        self._thread.start()
        opened = asyncio.run_coroutine_threadsafe(self._open(listen), self._loop)
        return opened.result(30)

    async def _open(self, listen: Mapping[str, Any]) -> str:
        if "path" in listen:
            path = Path(listen["path"])
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # noqa: ASYNC240
            self._server = await self._loop.create_unix_server(lambda: Connection(self), str(path))
            path.chmod(0o600)  # noqa: ASYNC240
            return f"unix:{path}"
        host, port = str(listen["host"]), int(listen.get("port", 0))
        self._server = await self._loop.create_server(lambda: Connection(self), host, port)
        port = self._server.sockets[0].getsockname()[1]
        return f"tcp:{host}:{port}"

    def close(self) -> None:
        """Tell the API that no more requests are taken; those in the queue are still answered."""
        self.is_closing = True
        self._loop.call_soon_threadsafe(self._say_closing)

    def stop(self, patience_s: float = 5.0) -> None:
        """End all connections after what waits was sent."""
        ended = asyncio.run_coroutine_threadsafe(self._flush(patience_s), self._loop)
        with contextlib.suppress(Exception):
            ended.result(patience_s + 1)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(patience_s)
        if not self._thread.is_alive():
            self._loop.close()

    def send(self, answers: list[Callable[[], None]]) -> None:
        """Send answers from another thread."""
        if answers:
            self._loop.call_soon_threadsafe(_call_all, answers)

    def take_in(self, connection: Connection, frame: Frame) -> Pending | Answer:
        """Parse a request and queue it; or return the answer that refuses it."""
        self.num_received += 1
        head, number = frame.head, frame.number
        if self.is_closing:
            return self._refuse(503, "replica_closing", "The replica takes no more requests.")
        reference = str(head.get("reference"))
        entry = self.entries.get(reference)
        if entry is None:
            detail = f"This replica does not serve {reference[:100]!r}."
            return self._refuse(404, "model_not_served", detail)
        if head.get("protocol") == "metadata":
            current = entry.current
            model, version = current.origin.values()
            found = responses.metadata(current.inputs, str(model), [int(version)])
            return {"status": 200, "content_type": "application/json"}, jsonio.dumps(found).encode()
        version = entry.choose()
        sent = None if self.recorder is None else self.recorder.draw(head, frame.body)
        try:
            asked = requests.read(head, frame.body, version.inputs, self._max_rows)
        except BadRequest as error:
            problems = [problem.as_dict() for problem in error.problems]
            found = self._refuse(error.status, "invalid_request", str(error), problems=problems)
            if self.recorder is not None and sent is not None:
                self.recorder.refused(sent, version, error.status, "invalid_request")
            return found

        def answer(found: dict[str, Any], body: bytes) -> None:
            if not request.is_cancelled:
                connection.answered(number, found, body)

        patience_s = min(float(head.get("timeout_s") or LONGEST_S), LONGEST_S)
        until = time.monotonic() + patience_s
        priority = int(head.get("priority") or 0) if asked.priority is None else asked.priority
        request = Pending(asked, version, reference, answer, until, priority, sent=sent)
        request.shadow = self._shadow_of(request, entry, frame)
        refused = self._put(request)
        if refused is None and asked.timeout_s is not None and asked.timeout_s < patience_s:
            self._loop.call_later(asked.timeout_s, connection.expire, number)
        return refused or request

    def _put(self, request: Pending) -> Answer | None:
        """Queue a request; return the answer that refuses it if it has no place."""
        try:
            removed = self._queue.put(request)
        except QueueFull as full:
            for other in full.removed:
                other.answer(*self._full(full, other))
            return self._full(full, request)
        for other in removed:
            other.answer(*self._full(QueueFull(len(self._queue), 0.0), other))
        return None

    def cancel(self, request: Pending) -> None:
        """Forget a request that nobody waits for any more."""
        self._queue.cancel(request)

    def too_late(self, request: Pending) -> Answer:
        """Return the answer to a request whose own timeout has passed."""
        name = request.reference
        detail = f"{name!r} did not answer within the timeout of the request: raise it."
        self.record_refusal(request, 504, "prediction_timeout")
        return self._refuse(504, "prediction_timeout", detail)

    def record_refusal(self, request: Pending, status: int, code: str) -> None:
        """Record that a request that was read got an error, if requests are recorded."""
        if self.recorder is not None and request.sent is not None:
            self.recorder.refused(request.sent, request.version, status, code, request.asked)

    def _full(self, full: QueueFull, request: Pending) -> Answer:
        self.record_refusal(request, 429, "queue_full")
        detail = f"{full.size} requests wait already, as many as max_queue allows."
        wait_s = max(1, round(full.wait_s + 0.5))
        return self._refuse(429, "queue_full", detail, retry_after_s=wait_s)

    def _shadow_of(self, request: Pending, entry: Entry, frame: Frame) -> Pending | None:
        """Return a request to another version whose answer is compared with that of a request.

        Its rows are prepared as that version was trained.
        """
        version = entry.choose_shadow()
        if version is None or version is request.version or self._queue.is_busy:
            return None
        try:
            asked = requests.read(frame.head, frame.body, version.inputs, self._max_rows)
        except BadRequest:
            return None
        until, priority = time.monotonic() + LONGEST_S, SHADOW_PRIORITY
        return Pending(asked, version, request.reference, _ignore, until, priority, shadows=request)

    def _refuse(self, status: int, code: str, detail: str, **more: Any) -> Answer:
        self.num_refused[code] = self.num_refused.get(code, 0) + 1
        return refusal(status, code, detail, **more)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _say_closing(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self.connections:
            connection.send(frames.pack(Kind.CLOSING))

    async def _flush(self, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        while any(connection.is_sending for connection in self.connections):
            if time.monotonic() > until:
                break
            await asyncio.sleep(0.01)
        for connection in [*self.connections]:
            connection.close()
        if self._server is not None:
            self._server.close()


def _ignore(_head: dict[str, Any], _body: bytes) -> None:
    """Nobody waits for the answer of a shadow."""


def _call_all(answers: list[Callable[[], None]]) -> None:
    for answer in answers:
        answer()


def _send_at_once(transport: asyncio.BaseTransport) -> None:
    found: socket.socket | None = transport.get_extra_info("socket")
    if found is not None and found.family in (socket.AF_INET, socket.AF_INET6):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
