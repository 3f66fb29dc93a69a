"""Many clients of one job: each gets every event in order, whatever the others do.

The figures, with more clients and more events, are those of ``bench.service.stream``.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from bench.service.readers import Client, Readers
from bench.service.stream import Case, feed
from models.database import Database
from tests.integration.inspection import services
from tests.integration.inspection.services import Api, Writer
from tests.integration.inspection.test_endings import raw_stream

CROWD = Case(watchers=100, rate=50, silent=20, rows=40)
SECONDS = 4.0


def test_a_hundred_clients_miss_nothing_beside_twenty_that_never_read(
    sqlite: Database, writer: Writer, serve: Callable[..., Api], tmp_path: Path
) -> None:
    _, secret = services.make_key(sqlite, "ada")
    api = serve(sqlite)
    path = f"/jobs/{writer.job.id}/stream"
    process = psutil.Process(api.process.pid)
    with ExitStack() as stack:
        for _ in range(CROWD.silent):
            stack.enter_context(raw_stream(api.url, path, secret))
        readers = Readers(api.url, path, secret, CROWD.watchers, tmp_path / "came.npy")
        stack.callback(readers.close)
        before = process.memory_info().rss
        shipped, _ = feed(writer, CROWD, SECONDS)
        writer.finish()
        came = readers.finish()  # they fail at a number that is missing, doubled or out of order
        grown = process.memory_info().rss - before
    assert len(shipped) >= SECONDS * CROWD.rate
    ends = {int(client): int(last) for client, _, _, last in came.tolist()}
    assert ends == dict.fromkeys(range(CROWD.watchers), max(shipped) + 2)  # its state, its end
    assert grown < 50 * 1024**2, f"{grown / 1024**2:.0f} MiB"


def test_an_event_that_is_lost_to_one_client_is_noticed() -> None:
    """The readers of test and benchmark can fail: two numbers with a gap between them."""

    class Wire:
        def __init__(self, *parts: bytes) -> None:
            self.parts = [*parts]

        def recv(self, _: int) -> bytes:
            return self.parts.pop(0)

    head = b"HTTP/1.1 200 OK\r\n\r\n5\r\nevent: hello\ndata: {}\n\n\r\n"
    one, two = b"9\r\nid: 1\nevent: a\ndata: {}\n\n", b"id: 2\nevent: end\ndata: {}\n\n\r\n"
    cut = two[:4], two[4:]
    client = Client(0, Wire(head, one, *cut))  # pyright: ignore[reportArgumentType]
    for _ in range(4):
        client.read()
    assert (client.greeted, client.last, client.ended) == (True, 2, True)
    client = Client(0, Wire(head + two))  # pyright: ignore[reportArgumentType]
    with pytest.raises(AssertionError, match=r"got \[2\] instead of \[1\]"):
        client.read()
