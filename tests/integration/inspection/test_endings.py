"""How streams end: with the process, with the key, with a client that does not read."""

import contextlib
import socket
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from api.streaming.wakeups import POLL_S
from models import keys
from models.database import Database
from models.jobs.shipments import Batch
from models.observations.events import NewEvent
from models.tables import now
from tests.integration.inspection import services
from tests.integration.inspection.services import Api, Writer, messages
from tests.waiting import until


@contextlib.contextmanager
def raw_stream(url: str, path: str, secret: str) -> Generator[socket.socket]:
    """A connection that asked for a stream and has not read anything."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    lines = [
        f"GET /api/v1{path} HTTP/1.1",
        f"Host: {host}:{port}",
        f"Authorization: Bearer {secret}",
    ]
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    with connection:
        yield connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            data += part
    return data


def test_sigterm_with_100_open_streams_ends_them_and_the_process_at_once(
    sqlite: Database, writer: Writer, serve: Callable[..., Api]
) -> None:
    _, secret = services.make_key(sqlite, "ada")
    api = serve(sqlite)
    with ExitStack() as stack:
        opened = [
            stack.enter_context(raw_stream(api.url, f"/jobs/{writer.job.id}/stream", secret))
            for _ in range(100)
        ]
        for connection in opened:
            assert b"200 OK" in connection.recv(4096)
        assert api.stop() == 0
        for connection in opened:
            last = read_all(connection)
            assert b"server_draining" in last
            assert b"retry: " in last
            assert last.endswith(b"\r\n0\r\n\r\n"), "it was cut off, not ended"


def test_a_client_that_reads_nothing_is_cut_off_and_holds_up_no_end(
    sqlite: Database, writer: Writer, serve: Callable[..., Api]
) -> None:
    _, secret = services.make_key(sqlite, "ada")
    api = serve(sqlite, stream_send_timeout_s="1")
    with raw_stream(api.url, f"/jobs/{writer.job.id}/stream", secret):
        for _ in range(40):
            writer.print("x" * 200_000)
        until(lambda: "stream_stalled" in api.log.read_text())
        assert api.stop() == 0  # fails by itself when the process does not end


def test_fifty_clients_that_never_read_do_not_harm_the_others(
    sqlite: Database, writer: Writer, serve: Callable[..., Api]
) -> None:
    _, secret = services.make_key(sqlite, "ada")
    api = serve(sqlite)
    path = f"/jobs/{writer.job.id}/stream"
    rows = [["layer", "output", *(0.25,) * 9]] * 100
    process = psutil.Process(api.process.pid)
    with ExitStack() as stack:
        client = stack.enter_context(services.client(api.url, secret))
        before = process.memory_info().rss
        for _ in range(50):
            stack.enter_context(raw_stream(api.url, path, secret))
        answer = stack.enter_context(client.stream("GET", path))
        log = (message for message in messages(answer.iter_lines()) if message.event == "stats")
        late_ms: list[float] = []
        for step in range(300):
            payload = {"step": step, "phase": "train", "columns": [], "rows": rows}
            shipped = time.monotonic()
            writer.ship(Batch(events=[NewEvent("stats", now(), payload)] * 5))
            for _ in range(5):
                assert next(log).data["step"] == step
            late_ms.append((time.monotonic() - shipped) * 1000)
        grown = process.memory_info().rss - before
    assert statistics.median(late_ms) < 5000, late_ms  # bench/service/stream.py has the figure
    assert grown < 50 * 1024**2, f"{grown / 1024**2:.0f} MiB"


def test_the_streams_of_a_revoked_key_end(
    sqlite: Database, writer: Writer, serve: Callable[..., Api]
) -> None:
    key, secret = services.make_key(sqlite, "ada")
    api = serve(sqlite, stream_ping_s="0.2", stream_key_check_s="0.5")
    with raw_stream(api.url, f"/jobs/{writer.job.id}/stream", secret) as connection:
        received = connection.recv(4096)
        assert b"200 OK" in received
        with sqlite.write() as tx:
            keys.revoke(tx, key)
        while not received.endswith(b"\r\n0\r\n\r\n"):  # the end of the answer
            more = connection.recv(4096)
            assert more, "the connection was cut before the end of the answer"
            received += more
        assert received.count(b": ping") < 200


def test_a_client_that_disconnects_leaves_nothing_behind(
    sqlite: Database, writer: Writer, serve: Callable[..., Api]
) -> None:
    _, secret = services.make_key(sqlite, "ada")
    api = serve(sqlite)
    process = psutil.Process(api.process.pid)

    def cycle() -> None:
        with raw_stream(api.url, f"/jobs/{writer.job.id}/stream", secret) as connection:
            assert b"200 OK" in connection.recv(4096)

    for _ in range(20):
        cycle()
    time.sleep(0)  # the server sees the last one go when it gets its turn
    open_before, rss_before = len(process.net_connections()), process.memory_info().rss
    for _ in range(300):
        cycle()
    until(lambda: len(process.net_connections()) <= open_before)
    assert process.memory_info().rss - rss_before < 20 * 1024**2


@pytest.mark.slow
def test_a_second_api_process_sees_what_is_written_through_the_first_wakeup(
    sqlite: Database, writer: Writer, serve: Callable[..., Api]
) -> None:
    _, secret = services.make_key(sqlite, "ada")
    late: list[float] = []
    with ExitStack() as stack:
        logs = []
        for api in (serve(sqlite), serve(sqlite)):
            client = stack.enter_context(services.client(api.url, secret))
            answer = stack.enter_context(client.stream("GET", f"/jobs/{writer.job.id}/stream"))
            logs.append(m for m in messages(answer.iter_lines()) if m.event == "metrics")
        for step in range(20):
            shipped = time.monotonic()
            writer.losses([1.0])
            for log in logs:
                assert next(log).data["step"] == step
            late.append(time.monotonic() - shipped)
    assert sorted(late)[4] < POLL_S / 2, late  # without a bell each one waits for the next poll


def test_logs_of_the_process_hold_no_secret(
    sqlite: Database, writer: Writer, serve: Callable[..., Api], home: Path
) -> None:
    _, secret = services.make_key(sqlite, "ada")
    api = serve(sqlite)
    with services.client(api.url, secret) as client:
        client.get(f"/jobs/{writer.job.id}/events")
    assert api.stop() == 0
    assert secret not in api.log.read_text()
