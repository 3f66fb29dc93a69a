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
from tests.integration.worker.conftest import open_broker, open_shop
from tests.integration.worker.shop import Shop, endless, train_spec
from tests.waiting import until

EVERYTHING = {
    "layers": ["fc*", "act"],
    "kinds": ["output", "output_grad", "param", "param_grad"],
    "every": 1,
    "max_overhead": None,
    "want": ["stats", "full"],
}
NUM_TENSORS = 3 + 3 + 4 + 4


def rows(shop: Shop, job_id: str) -> list[Capture]:
    with shop.database.read() as tx:
        return captures.find(tx, job_id, limit=10**6)


def dropped(shop: Shop, job_id: str) -> int:
    return sum(payload["count"] for payload in shop.payloads(job_id, "dropped"))


def values(shop: Shop, row: Capture) -> np.ndarray[Any, Any]:
    return tensors.open_tensor(shop.artifacts.local(row.key), row.tensor)


@pytest.mark.staffed
def test_a_step_is_one_file_and_its_tensors_are_those_of_the_statistics(shop: Shop):
    job_id = shop.submit(train_spec(shop.dataset(), probes=[EVERYTHING]))
    job = shop.wait(job_id)
    assert job.state == "succeeded", (job.error, shop.logs())
    kept = rows(shop, job_id)
    assert dropped(shop, job_id) == 0
    assert len(kept) == 20 * NUM_TENSORS
    assert len({(row.step, row.layer, row.kind) for row in kept}) == len(kept)
    assert len({row.key for row in kept}) == 20
    told = shop.payloads(job_id, "capture")
    assert {payload["capture"] for payload in told} == {row.id for row in kept}
    by_tensor = {(row.step, row.layer, row.kind): row for row in kept}
    for record in shop.payloads(job_id, "stats"):
        for layer, kind, mean, std, *_ in record["rows"]:
            row = by_tensor[record["step"], layer, kind]
            array = values(shop, row).astype(np.float64)
            assert list(array.shape) == row.shape == row.captured_from
            assert (array.mean(), array.std()) == pytest.approx((mean, std), rel=1e-6, abs=1e-9)
    end = [event.type for event in shop.events(job_id)][-1]
    assert end == "end"
    files = list((shop.settings.artifacts / "jobs" / job_id / "1" / "captures").iterdir())
    assert len(files) == 20


@pytest.fixture(scope="module")
def shop_with_small_ring(tmp_path_factory: pytest.TempPathFactory) -> Generator[Shop]:
    """A worker whose ring has room for a few tensors."""
    home = tmp_path_factory.mktemp("ring")
    with contextmanager(open_broker)() as broker, contextmanager(open_shop)(broker, home) as shop:
        shop.start_worker(CAPTURE_BUFFER_BYTES="12288")
        yield shop


@pytest.fixture
def small_ring(shop_with_small_ring: Shop) -> Generator[Shop]:
    yield shop_with_small_ring
    shop_with_small_ring.settle()


@pytest.mark.parametrize("lossless", [False, True])
def test_a_ring_that_is_too_small_drops_exactly_or_makes_training_wait(
    small_ring: Shop, *, lossless: bool
):
    shop = small_ring
    probe = EVERYTHING | {"lossless": lossless}
    spec = train_spec(shop.dataset(), probes=[probe], stop={"steps": 60})
    job_id = shop.submit(spec)
    job = shop.wait(job_id)
    assert job.state == "succeeded", (job.error, shop.logs())
    kept, missing = rows(shop, job_id), dropped(shop, job_id)
    assert len(kept) + missing == 60 * NUM_TENSORS
    waits = [
        payload["values"]["time/lossless_wait"]
        for payload in shop.payloads(job_id, "metrics")
        if "time/lossless_wait" in payload["values"]
    ]
    assert bool(missing) is not lossless
    assert bool(waits) is lossless
    assert all(wait > 0 for wait in waits)
    losses = [one for one in shop.payloads(job_id, "metrics") if "loss" in one["values"]]
    assert len(losses) == 60


def test_a_cancelled_job_does_not_wait_for_room(small_ring: Shop):
    shop = small_ring
    job_id = shop.submit(endless(shop.dataset(), probes=[EVERYTHING | {"lossless": True}]))
    shop.wait_step(job_id)
    shop.cancel(job_id)
    assert shop.wait(job_id, timeout_s=10).state == "cancelled"


@pytest.mark.staffed
def test_a_disk_that_takes_no_tensor_stops_neither_training_nor_the_end(shop: Shop):
    """The directory of the captures is a file: every write of one fails."""
    job_id = shop.submit(endless(shop.dataset(), probes=[EVERYTHING | {"start": 200}]))
    where = shop.settings.artifacts / "jobs" / job_id / "1"
    where.mkdir(parents=True)
    (where / "captures").write_text("in the way")
    until(lambda: dropped(shop, job_id) > 0)
    at = shop.payloads(job_id, "metrics")[-1]["step"]
    until(lambda: shop.payloads(job_id, "metrics")[-1]["step"] > at + 10)
    shop.cancel(job_id)
    assert shop.wait(job_id, timeout_s=10).state == "cancelled"
    assert rows(shop, job_id) == []
    steps = [one["step"] for one in shop.payloads(job_id, "metrics") if "loss" in one["values"]]
    assert dropped(shop, job_id) == NUM_TENSORS * (steps[-1] - 199)
    assert all(str(shop.home) not in p["what"] for p in shop.payloads(job_id, "dropped"))


def test_a_killed_worker_leaves_every_tensor_once(shop: Shop, tmp_path: Path):
    """Killed between a file and its row, or anywhere: the next attempt stores each step once."""
    worker = shop.start_worker()
    probe = EVERYTHING | {"every": 4}
    job_id = shop.submit(train_spec(shop.dataset(), probes=[probe], stop={"seconds": 2.0}))
    until(lambda: len(rows(shop, job_id)) > 3 * NUM_TENSORS)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    shop.start_worker("w2")
    job = shop.wait(job_id, timeout_s=60)
    assert job.state == "succeeded", (job.error, shop.logs())
    kept = rows(shop, job_id)
    assert len({(row.step, row.layer, row.kind) for row in kept}) == len(kept)
    resumed_at = shop.attempts(job_id)[-1].resumed_from_step
    assert resumed_at is not None
    assert {row.step < resumed_at for row in kept if row.attempt < job.attempt} <= {True}
    assert {row.step >= resumed_at for row in kept if row.attempt == job.attempt} == {True}
    steps = job.progress["step"] if job.progress else 0
    assert (
        len(kept) + sum(event["count"] for event in shop.payloads(job_id, "dropped"))
        >= steps // 4 * NUM_TENSORS
    )
    for row in kept[:: max(1, len(kept) // 50)]:
        assert values(shop, row).nbytes == row.size_bytes


@pytest.mark.staffed
def test_a_killed_rank_has_stored_what_it_had_said(shop: Shop):
    probe = EVERYTHING | {"every": 5}
    job_id = shop.submit(endless(shop.dataset(), probes=[probe], retry={"max_restarts": 0}))
    until(lambda: len(rows(shop, job_id)) > 2 * NUM_TENSORS)
    os.kill(shop.rank_pid(job_id), signal.SIGKILL)
    assert shop.wait(job_id).state == "failed"
    by_step: dict[int, int] = {}
    for row in rows(shop, job_id):
        by_step[row.step] = by_step.get(row.step, 0) + 1
    assert set(by_step.values()) == {NUM_TENSORS}


@pytest.mark.slow
def test_a_ledger_that_is_away_loses_and_doubles_no_tensor(shop: Shop):
    """Nothing of the ring is written over before its rows are stored; what finds no room counts."""
    shop.start_worker(CAPTURE_BUFFER_BYTES="65536")
    probe = EVERYTHING | {"every": 20}
    job_id = shop.submit(endless(shop.dataset(), probes=[probe]))
    until(lambda: len(rows(shop, job_id)) >= NUM_TENSORS)
    lock = sqlite3.connect(shop.home / "test.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    time.sleep(12)  # longer than a connection waits
    lock.execute("ROLLBACK")
    lock.close()
    assert shop.logged("w1", "database_unavailable")
    shop.cancel(job_id)
    assert shop.wait(job_id).state == "cancelled"
    kept = rows(shop, job_id)
    assert len({(row.step, row.layer, row.kind) for row in kept}) == len(kept)
    looked_at = {payload["step"] for payload in shop.payloads(job_id, "stats")}
    assert len(kept) + dropped(shop, job_id) == NUM_TENSORS * len(looked_at)
    means = {
        (record["step"], layer, kind): mean
        for record in shop.payloads(job_id, "stats")
        for layer, kind, mean, *_ in record["rows"]
    }
    for row in kept[:: max(1, len(kept) // 200)]:
        mean = values(shop, row).astype(np.float64).mean()
        assert mean == pytest.approx(means[row.step, row.layer, row.kind], rel=1e-6, abs=1e-9)
