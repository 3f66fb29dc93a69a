"""Receivers of webhooks that are slow, and several workers: each message is posted once."""

import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from models.access import webhooks
from models.database import Database
from models.settings import Settings
from models.storage.artifacts import LocalArtifacts
from models.tables import Delivery
from tests.integration.store.factories import make_job
from tests.waiting import until
from worker.context import WorkerContext
from worker.delivery.webhooks import Delivering

AT_ONCE = 8


class Receiver:
    """A real server that answers when it is let; counts what was posted, by ``webhook-id``."""

    def __init__(self) -> None:
        self.posts: Counter[str] = Counter()
        self.lets = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def serving(self) -> Generator[str]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                with receiver._lock:
                    receiver.posts[self.headers["webhook-id"]] += 1
                receiver.lets.wait(60)
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/hook"
        finally:
            self.lets.set()
            server.shutdown()
            server.server_close()


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


def worker(database: Database, home: Path, name: str, timeout_s: float) -> Delivering:
    settings = Settings(
        home=home,
        database_url=database.url,
        worker_name=name,
        outbound_allow="127.0.0.1",
        webhook_timeout_s=timeout_s,
    )
    no: Any = None  # nobody rings a bell or forks a rank
    return Delivering(WorkerContext(settings, database, LocalArtifacts(settings.artifacts), no, no))


def fill(database: Database, url: str, hooks: int, messages: int) -> int:
    """So many webhooks of as many owners, each with so many messages; how many messages."""
    for number in range(hooks):
        owner = f"owner{number}"
        with database.write() as tx:
            webhooks.add(tx, owner=owner, url=url, events=["job.queued"], labels={})
        for _ in range(messages):
            make_job(database, owner=owner)
    return hooks * messages


def count(database: Database, *where: Any) -> int:
    with database.read() as tx:
        return tx.scalars(select(func.count()).select_from(Delivery).where(*where)).one()


def test_a_message_is_not_taken_before_it_can_be_sent(
    database: Database, tmp_path: Path, receiver: Receiver
):
    """A worker that all its receivers keep waiting leaves the rest to another worker."""
    with receiver.serving() as url:
        total = fill(database, url, hooks=AT_ONCE + 4, messages=4)
        workers = [worker(database, tmp_path, name, 60.0) for name in ("a", "b")]
        first = threading.Thread(target=workers[0])
        first.start()
        until(lambda: len(receiver.posts) == AT_ONCE)
        assert count(database, Delivery.tries > 0) == AT_ONCE
        second = threading.Thread(target=workers[1])
        second.start()
        until(lambda: len(receiver.posts) == 2 * AT_ONCE)
        receiver.lets.set()
        for thread in (first, second):
            thread.join(60)
        workers[0]()  # what the two left of a turn
        assert set(receiver.posts.values()) == {1}
        assert len(receiver.posts) == total == count(database, Delivery.state == "delivered")
