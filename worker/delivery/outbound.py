"""Sends HTTP requests to URLs that users set. Nothing else in the service connects to them.

``send`` resolves the host once, checks all addresses (``models/access/addresses.py``), connects to
a checked address, and never exceeds its limits of time and bytes. The certificate is checked
against the host name as usual: only the connection is pinned.
"""

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from models.access.addresses import Allowed, Target, check, target_of

Resolve = Callable[[str, int], Sequence[str]]


class OutboundFailed(Exception):
    """The server did not answer, or not in time; the text says what happened."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request."""

    total_s: float = 15.0
    max_bytes: int = 64 * 1024
    """How much of the response body is read."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The response of the server."""

    status: int
    body: bytes
    """The first ``RequestLimits.max_bytes`` of the body."""


def send(  # noqa: PLR0913 (a request has these parts)
    url: str,
    *,
    body: bytes,
    headers: Mapping[str, str],
    allowed: Allowed,
    limits: RequestLimits | None = None,
    resolve: Resolve | None = None,
    tls: ssl.SSLContext | None = None,
) -> Reply:
    """Post one request to a URL that a user has set. Redirects are not followed.

    Raises:
        AddressRefused: the service does not connect to this address.
        OutboundFailed: there is no connection, no answer, or none in time.
    """
    limits = limits or RequestLimits()
    clock = _Clock(limits.total_s)
    target = target_of(url)
    addresses = _resolved(target, resolve or resolve_host, clock)
    check(target, addresses, allowed)
    connection = http.client.HTTPConnection(target.host, target.port)
    sock = _connected(target, addresses, clock)
    try:
        if target.scheme == "https":
            sock = (tls or ssl.create_default_context()).wrap_socket(
                sock, server_hostname=target.host, do_handshake_on_connect=False
            )
        with _cut_after(clock.left_s(), sock):
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            connection.sock = sock  # to a checked address; so it uses no resolver and no proxy
            sent = {**headers, "Host": target.authority, "Connection": "close"}
            connection.request("POST", target.path, body=body, headers=sent)
            answer = connection.getresponse()
            found = answer.read(limits.max_bytes)
        clock.left_s()
        return Reply(answer.status, found)
    except (OSError, http.client.HTTPException) as error:
        clock.left_s()  # raises the timeout if that is the reason
        raise OutboundFailed(f"{target.host!r} did not answer: {_short(error)}") from error
    finally:
        connection.close()
        sock.close()


def resolve_host(host: str, port: int) -> list[str]:
    """Return all addresses of a host from the system's resolver."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Clock:
    """The time that a request has left."""

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._end = time.monotonic() + total_s

    def left_s(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise OutboundFailed(f"it took longer than {self._total_s:g} s")
        return left


def _resolved(target: Target, resolve: Resolve, clock: _Clock) -> list[str]:
    """Resolve once, in a thread of its own: the system's resolver has no timeout."""
    found: list[str] = []
    problems: list[OSError | UnicodeError] = []

    def ask() -> None:
        try:
            found.extend(resolve(target.host, target.port))
        except (OSError, UnicodeError) as error:
            problems.append(error)

    thread = threading.Thread(target=ask, name="resolve", daemon=True)
    thread.start()
    thread.join(clock.left_s())
    clock.left_s()
    if problems:
        raise OutboundFailed(f"the host {target.host!r} cannot be found") from problems[0]
    return found


def _connected(target: Target, addresses: Sequence[str], clock: _Clock) -> socket.socket:
    problem: OSError | None = None
    for address in addresses:
        try:
            return socket.create_connection((address, target.port), timeout=clock.left_s())
        except OSError as error:
            problem = error
    raise OutboundFailed(f"{target.host!r} takes no connection: {problem}") from problem


@contextlib.contextmanager
def _cut_after(timeout_s: float, sock: socket.socket) -> Generator[None]:
    """Abort a transfer that takes too long: a slow server never triggers a socket timeout."""

    def cut() -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    guard = threading.Timer(timeout_s, cut)
    guard.daemon = True
    guard.start()
    try:
        yield
    finally:
        guard.cancel()


def _short(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return "".join(char if char.isprintable() else " " for char in text)[:200]
