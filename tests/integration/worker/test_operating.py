"""What a worker does for the operator: canary, health figures, webhooks, a full disk."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis
from sqlalchemy import delete

from glasshouse import jsonio
from glasshouse.webhooks import verify
from models.access import webhooks
from models.fleet import heartbeats, workers
from models.fleet.heartbeats import WorkerHealth
from models.fleet.notifier import Notifier, worker_queue
from models.tables import Webhook, Worker
from tests.integration.worker.conftest import Broker
from tests.integration.worker.harness import Harness, endless, train_spec
from tests.waiting import until
from worker.context import WorkerContext
from worker.processes.fork_server import ForkServerClient
from worker.wakeups import Canary

GIB = 1024**3


def sign(harness: Harness, name: str, canary_s: float) -> WorkerHealth:
    with harness.database.read() as tx:
        found = heartbeats.signs(tx, lease_ms=10_000, canary_s=canary_s)
    return next(one for one in found if one.worker == name)


def heard_ms(harness: Harness) -> int:
    with harness.database.read() as tx:
        row = tx.get(Worker, "w1")
    assert row is not None
    assert row.canary_ms is not None
    return row.canary_ms


def test_a_worker_receives_its_wakeup_and_is_unresponsive_only_while_the_broker_is_unavailable(
    harness: Harness, broker: Broker
):
    harness.start_worker(CANARY_S="0.5")
    first = heard_ms(harness)
    until(lambda: heard_ms(harness) > first)
    job = harness.submit(train_spec(harness.dataset()))
    harness.wait(job)
    stored = [event for event in harness.events(job) if event.type == "metrics"]
    figures = until(lambda: sign(harness, "w1", 0.5).figures if stored else None)
    until(lambda: sign(harness, "w1", 0.5).figures["events"] >= len(stored))
    assert sum(sign(harness, "w1", 0.5).figures["ship_buckets"]) > 0
    assert figures["free_bytes"]["work"] > 0
    broker.kill()
    until(lambda: sign(harness, "w1", 0.5).unresponsive)
    assert sign(harness, "w1", 0.5).state == "active"
    until(lambda: harness.logged("w1", "worker_unresponsive"))
    broker.start()
    until(lambda: not sign(harness, "w1", 2.0).unresponsive)
    until(lambda: harness.logged("w1", "worker_responsive"))


def test_a_worker_that_beats_while_nobody_takes_its_messages_is_seen_to_be_unresponsive(
    harness: Harness, broker: Broker
):
    """Connected but unresponsive: the rings reach the broker, and nobody listens on the queue."""
    settings = harness.settings.model_copy(update={"worker_name": "w1", "canary_s": 0.3})
    notifier = Notifier(settings)
    context = WorkerContext(
        settings, harness.database, harness.artifacts, notifier, cast("ForkServerClient", None)
    )
    with harness.database.write() as tx:
        known = {"host": "h", "pid": 1, "version": "0", "info": {}, "devices": []}
        workers.register(tx, worker="w1", instance=context.instance, **known)
    canary = Canary(context)
    assert not sign(harness, "w1", 0.3).unresponsive

    def rings_unheard() -> bool:
        canary()
        with harness.database.write() as tx:
            heartbeats.swept(tx, "w1", instance=context.instance)
        time.sleep(0.02)
        return sign(harness, "w1", 0.3).unresponsive

    until(rings_unheard)
    assert sign(harness, "w1", 0.3).state == "active"
    with Redis.from_url(broker.url) as redis:
        assert 0 < redis.llen(worker_queue("w1")) <= 11  # it does not fill the broker either
    canary.received()
    assert not sign(harness, "w1", 0.3).unresponsive
    notifier.close()


def test_a_worker_deletes_by_itself_what_the_settings_let_go_and_nothing_of_a_live_job(
    harness: Harness,
):
    harness.start_worker(PURGE_EVERY_S="0.2", KEEP_EVENTS_DAYS="0", KEEP_CAPTURES_DAYS="0")
    probe = {"layers": ["fc1"], "kinds": ["output"], "every": 1, "want": ["full"]}
    live = harness.submit(endless(harness.dataset(), probes=[probe]))
    harness.wait_step(live, 5)
    ended = harness.submit(train_spec(harness.dataset(), probes=[probe]))
    harness.wait(ended)
    until(lambda: [event.type for event in harness.events(ended)] == ["end"])
    files = harness.settings.artifacts / "jobs" / ended / "1" / "captures"
    until(lambda: not list(files.glob("*")))
    assert harness.steps(live)[0] == 0
    until(lambda: harness.logged("w1", "purged"))
    harness.cancel(live)
    assert harness.wait(live).state == "cancelled"


class Receiver:
    """A real HTTP server that takes messages, and answers what a test wants."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.got.append((dict(self.headers.items()), body))
                self.send_response(outer.answers.pop(0) if outer.answers else 204)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)


@pytest.fixture
def receiver(harness: Harness) -> Generator[Receiver]:
    opened = Receiver()
    yield opened
    opened.close()
    with harness.database.write() as tx:
        tx.execute(delete(Webhook))


def hook(harness: Harness, url: str, **options: Any) -> tuple[str, str]:
    wanted: dict[str, Any] = {"events": (), "labels": {}} | options
    with harness.database.write() as tx:
        row = webhooks.add(tx, owner="ada", url=url, **wanted)
        return row.id, row.secret


def deliveries(harness: Harness, webhook: str) -> list[Any]:
    with harness.database.read() as tx:
        return webhooks.deliveries(tx, webhook, after=None, limit=100)


@pytest.mark.shared_worker
def test_moves_are_reported_signed_and_again_until_they_are_taken(
    harness: Harness, receiver: Receiver
):
    receiver.answers = [500, 302, 503]
    good, secret = hook(harness, f"http://127.0.0.1:{receiver.port}/hook")
    few, _ = hook(harness, f"http://127.0.0.1:{receiver.port}/few", events=["job.failed"])
    private, _ = hook(harness, f"http://127.0.0.2:{receiver.port}/hook")
    job = harness.submit(train_spec(harness.dataset()))
    assert harness.wait(job).state == "succeeded"

    def all_taken() -> list[Any] | None:
        rows = deliveries(harness, good)
        return rows if len(rows) == 4 and all(row.state == "delivered" for row in rows) else None

    rows = until(all_taken)
    types = {"job.queued", "job.starting", "job.running", "job.succeeded"}
    assert {row.type for row in rows} == types
    assert sum(row.tries for row in rows) == len(receiver.got) == 7
    by_id: dict[str, set[bytes]] = {}
    for headers, body in receiver.got:
        verify(body, headers, secret)
        by_id.setdefault(headers["webhook-id"], set()).add(body)
        told = jsonio.loads(body)
        assert told["data"]["job"] == job
        assert told["type"] == f"job.{told['data']['to']}"
    assert {row.id for row in rows} == set(by_id)
    assert all(len(bodies) == 1 for bodies in by_id.values())
    assert deliveries(harness, few) == []
    refused = until(lambda: [row for row in deliveries(harness, private) if row.tries] or None)
    assert all("not public" in row.problem for row in refused)
    assert secret not in harness.log("w1")
    assert secret.removeprefix("whsec_") not in harness.log("w1")


@pytest.mark.shared_worker
def test_a_receiver_that_answers_410_gets_no_more_messages(harness: Harness, receiver: Receiver):
    receiver.answers = [410]
    gone, _ = hook(harness, f"http://127.0.0.1:{receiver.port}/hook", events=["job.queued"])
    harness.submit(train_spec(harness.dataset()))

    def switched_off() -> str | None:
        with harness.database.read() as tx:
            return webhooks.get(tx, gone, None).disabled_reason

    assert "410" in until(switched_off)
    harness.wait(harness.submit(train_spec(harness.dataset())))
    assert len(receiver.got) == 1
    assert [row.state for row in deliveries(harness, gone)] == ["failed"]


def test_below_the_least_free_space_tensors_are_dropped_and_counted_and_nothing_else(
    harness: Harness,
):
    """The free space of this machine's disk really falls below the setting, by one big file."""
    free = shutil.disk_usage(harness.home).free
    if free < 16 * GIB:
        pytest.skip("there is not room enough to take some away")
    harness.start_worker(MIN_FREE_BYTES=str(free - 4 * GIB))
    probe = {"layers": ["fc1"], "kinds": ["output"], "every": 1, "want": ["full"]}
    job = harness.submit(endless(harness.dataset(), probes=[probe | {"max_overhead": None}]))
    harness.wait_step(job, 5)
    filler = harness.home / "filler"
    try:
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 8 * GIB)
        until(lambda: harness.payloads(job, "dropped"))
        at = harness.steps(job)[-1]
        until(lambda: harness.steps(job)[-1] > at + 20)
        waiting = harness.submit(train_spec(harness.dataset(), stop={"steps": 2}))
        until(lambda: min(sign(harness, "w1", 1).figures["free_bytes"].values()) < free - 4 * GIB)
        assert harness.job(waiting).state == "queued"
    finally:
        filler.unlink(missing_ok=True)
    kept = len(harness.payloads(job, "capture"))
    until(lambda: len(harness.payloads(job, "capture")) > kept + 5)
    assert harness.wait(waiting).state == "succeeded"
    harness.cancel(job)
    assert harness.wait(job).state == "cancelled"
    steps = harness.steps(job)
    assert steps == list(range(len(steps)))
    told = harness.payloads(job, "dropped")
    captured = len(harness.payloads(job, "capture"))
    assert captured + sum(entry["count"] for entry in told) == len(steps)
    assert {entry["what"] for entry in told} == {"captures: No space left on device"}


def test_on_a_real_small_disk_that_fills_up_a_job_continues_and_loses_nothing(tmp_path: Path):
    """In a mount namespace of its own, where this system allows one."""
    probe = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=1m t {tmp_path}"]
    may = shutil.which("unshare") and subprocess.run(probe, capture_output=True, check=False)
    if not may or may.returncode:
        pytest.skip("a small file system cannot be mounted here")
    command = ["unshare", "-m", sys.executable, "-m", "tests.integration.worker.small_disk"]
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    assert "all is well" in done.stdout
