"""Whole tensors through a real worker: from the rank's ring to artifacts and the database."""

import os
import signal
import sqlite3
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api.rendering import tensors
from models.observations import captures
from models.tables import Capture
from tests.integration.worker.conftest import open_broker, open_harness
from tests.integration.worker.harness import Harness, endless, train_spec
from tests.waiting import until

EVERYTHING = {
    "layers": ["fc*", "act"],
    "kinds": ["output", "output_grad", "param", "param_grad"],
    "every": 1,
    "max_overhead": None,
    "want": ["stats", "full"],
}
NUM_TENSORS = 3 + 3 + 4 + 4


def rows(harness: Harness, job_id: str) -> list[Capture]:
    with harness.database.read() as tx:
        return captures.find(tx, job_id, limit=10**6)


def dropped(harness: Harness, job_id: str) -> int:
    return sum(payload["count"] for payload in harness.payloads(job_id, "dropped"))


def values(harness: Harness, row: Capture) -> np.ndarray[Any, Any]:
    return tensors.open_tensor(harness.artifacts.local(row.key), row.tensor)


@pytest.mark.shared_worker
def test_a_step_is_one_file_and_its_tensors_are_those_of_the_statistics(harness: Harness):
    job_id = harness.submit(train_spec(harness.dataset(), probes=[EVERYTHING]))
    job = harness.wait(job_id)
    assert job.state == "succeeded", (job.error, harness.logs())
    kept = rows(harness, job_id)
    assert dropped(harness, job_id) == 0
    assert len(kept) == 20 * NUM_TENSORS
    assert len({(row.step, row.layer, row.kind) for row in kept}) == len(kept)
    assert len({row.key for row in kept}) == 20
    told = harness.payloads(job_id, "capture")
    assert {payload["capture"] for payload in told} == {row.id for row in kept}
    by_tensor = {(row.step, row.layer, row.kind): row for row in kept}
    for record in harness.payloads(job_id, "stats"):
        for layer, kind, mean, std, *_ in record["rows"]:
            row = by_tensor[record["step"], layer, kind]
            array = values(harness, row).astype(np.float64)
            assert list(array.shape) == row.shape == row.captured_from
            assert (array.mean(), array.std()) == pytest.approx((mean, std), rel=1e-6, abs=1e-9)
    end = [event.type for event in harness.events(job_id)][-1]
    assert end == "end"
    files = list((harness.settings.artifacts / "jobs" / job_id / "1" / "captures").iterdir())
    assert len(files) == 20


@pytest.fixture(scope="module")
def small_ring_harness(tmp_path_factory: pytest.TempPathFactory) -> Generator[Harness]:
    """A worker whose ring has room for a few tensors."""
    home = tmp_path_factory.mktemp("ring")
    with (
        contextmanager(open_broker)() as broker,
        contextmanager(open_harness)(broker, home) as harness,
    ):
        harness.start_worker(CAPTURE_BUFFER_BYTES="12288")
        yield harness


@pytest.fixture
def small_ring(small_ring_harness: Harness) -> Generator[Harness]:
    yield small_ring_harness
    small_ring_harness.settle()


@pytest.mark.parametrize("lossless", [False, True])
def test_a_ring_that_is_too_small_drops_exactly_or_makes_training_wait(
    small_ring: Harness, *, lossless: bool
):
    harness = small_ring
    probe = EVERYTHING | {"lossless": lossless}
    spec = train_spec(harness.dataset(), probes=[probe], stop={"steps": 60})
    job_id = harness.submit(spec)
    job = harness.wait(job_id)
    assert job.state == "succeeded", (job.error, harness.logs())
    kept, missing = rows(harness, job_id), dropped(harness, job_id)
    assert len(kept) + missing == 60 * NUM_TENSORS
    waits = [
        payload["values"]["time/lossless_wait"]
        for payload in harness.payloads(job_id, "metrics")
        if "time/lossless_wait" in payload["values"]
    ]
    assert bool(missing) is not lossless
    assert bool(waits) is lossless
    assert all(wait > 0 for wait in waits)
    losses = [one for one in harness.payloads(job_id, "metrics") if "loss" in one["values"]]
    assert len(losses) == 60


def test_a_cancelled_job_does_not_wait_for_room(small_ring: Harness):
    harness = small_ring
    job_id = harness.submit(endless(harness.dataset(), probes=[EVERYTHING | {"lossless": True}]))
    harness.wait_step(job_id)
    harness.cancel(job_id)
    assert harness.wait(job_id, timeout_s=10).state == "cancelled"


@pytest.mark.shared_worker
def test_a_disk_that_takes_no_tensor_stops_neither_training_nor_the_end(harness: Harness):
    """The directory of the captures is a file: every write of one fails."""
    job_id = harness.submit(endless(harness.dataset(), probes=[EVERYTHING | {"start": 200}]))
    where = harness.settings.artifacts / "jobs" / job_id / "1"
    where.mkdir(parents=True)
    (where / "captures").write_text("in the way")
    until(lambda: dropped(harness, job_id) > 0)
    at = harness.payloads(job_id, "metrics")[-1]["step"]
    until(lambda: harness.payloads(job_id, "metrics")[-1]["step"] > at + 10)
    harness.cancel(job_id)
    assert harness.wait(job_id, timeout_s=10).state == "cancelled"
    assert rows(harness, job_id) == []
    steps = [one["step"] for one in harness.payloads(job_id, "metrics") if "loss" in one["values"]]
    assert dropped(harness, job_id) == NUM_TENSORS * (steps[-1] - 199)
    assert all(str(harness.home) not in p["what"] for p in harness.payloads(job_id, "dropped"))


def test_a_killed_worker_leaves_every_tensor_once(harness: Harness, tmp_path: Path):
    """Killed between a file and its row, or anywhere: the next attempt stores each step once."""
    worker = harness.start_worker()
    probe = EVERYTHING | {"every": 4}
    job_id = harness.submit(train_spec(harness.dataset(), probes=[probe], stop={"seconds": 2.0}))
    until(lambda: len(rows(harness, job_id)) > 3 * NUM_TENSORS)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    harness.start_worker("w2")
    job = harness.wait(job_id, timeout_s=60)
    assert job.state == "succeeded", (job.error, harness.logs())
    kept = rows(harness, job_id)
    assert len({(row.step, row.layer, row.kind) for row in kept}) == len(kept)
    resumed_at = harness.attempts(job_id)[-1].resumed_from_step
    assert resumed_at is not None
    assert {row.step < resumed_at for row in kept if row.attempt < job.attempt} <= {True}
    assert {row.step >= resumed_at for row in kept if row.attempt == job.attempt} == {True}
    steps = job.progress["step"] if job.progress else 0
    assert (
        len(kept) + sum(event["count"] for event in harness.payloads(job_id, "dropped"))
        >= steps // 4 * NUM_TENSORS
    )
    for row in kept[:: max(1, len(kept) // 50)]:
        assert values(harness, row).nbytes == row.size_bytes


@pytest.mark.shared_worker
def test_a_killed_rank_has_stored_what_it_had_said(harness: Harness):
    probe = EVERYTHING | {"every": 5}
    job_id = harness.submit(endless(harness.dataset(), probes=[probe], retry={"max_restarts": 0}))
    until(lambda: len(rows(harness, job_id)) > 2 * NUM_TENSORS)
    os.kill(harness.rank_pid(job_id), signal.SIGKILL)
    assert harness.wait(job_id).state == "failed"
    by_step: dict[int, int] = {}
    for row in rows(harness, job_id):
        by_step[row.step] = by_step.get(row.step, 0) + 1
    assert set(by_step.values()) == {NUM_TENSORS}


@pytest.mark.slow
def test_a_database_that_is_unavailable_loses_and_doubles_no_tensor(harness: Harness):
    """Nothing of the ring is written over before its rows are stored; what finds no room counts."""
    harness.start_worker(CAPTURE_BUFFER_BYTES="65536")
    probe = EVERYTHING | {"every": 20}
    job_id = harness.submit(endless(harness.dataset(), probes=[probe]))
    until(lambda: len(rows(harness, job_id)) >= NUM_TENSORS)
    lock = sqlite3.connect(harness.home / "test.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    time.sleep(12)  # longer than a connection waits
    lock.execute("ROLLBACK")
    lock.close()
    assert harness.logged("w1", "database_unavailable")
    harness.cancel(job_id)
    assert harness.wait(job_id).state == "cancelled"
    kept = rows(harness, job_id)
    assert len({(row.step, row.layer, row.kind) for row in kept}) == len(kept)
    looked_at = {payload["step"] for payload in harness.payloads(job_id, "stats")}
    assert len(kept) + dropped(harness, job_id) == NUM_TENSORS * len(looked_at)
    means = {
        (record["step"], layer, kind): mean
        for record in harness.payloads(job_id, "stats")
        for layer, kind, mean, *_ in record["rows"]
    }
    for row in kept[:: max(1, len(kept) // 200)]:
        mean = values(harness, row).astype(np.float64).mean()
        assert mean == pytest.approx(means[row.step, row.layer, row.kind], rel=1e-6, abs=1e-9)
