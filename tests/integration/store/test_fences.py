"""Everything that a supervisor writes is refused once somebody else has its job."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select

import models
from models.database import Database, Transaction
from models.fleet import workers
from models.jobs import attempts, leases, shipments
from models.jobs.leases import Claim
from models.jobs.shipments import Batch
from models.observations import stats_folding
from models.observations.probes import ProbeChange
from models.observations.stats_bytes import StoredSeries
from models.observations.stats_folding import FoldedChunk
from models.observations.unfolded_stats import StatsOwner
from models.tables import Table

from .factories import LEASE_MS, losses, make_job, make_worker, running, saved, ship

READERS = {"holds", "still_expired", "num_shipments", "start_of", "spent_s", "is_asked"}
"""They take a claim and only look."""


def whole_batch() -> Batch:
    """Something of each kind that a shipment can hold."""
    batch = losses((7, 1.0))
    batch.stats = [{"step": 7, "phase": "train", "rows": [["fc", "output", *[1.0] * 9]]}]
    capture = {"id": "cap_x", "step": 7, "layer": "fc", "kind": "output", "phase": "train"}
    capture |= {"shape": [1], "dtype": "float32", "size_bytes": 4, "key": "k"}
    batch.captures = [capture]
    batch.checkpoints = [saved(8)]
    batch.artifacts = [{"name": "a", "media_type": "x/y", "size_bytes": 1, "key": "k"}]
    batch.live = {"address": "", "token": "", "problem": "x"}
    batch.replica = {"drift": []}
    batch.probes = (9, 7)
    batch.probe_changes = [ProbeChange("prb_x", {"cost_s": 1.0}, 9)]
    batch.job = {"progress": {"step": 8}, "summary": {"loss": {"last": 1.0}}}
    return batch


PIECE = FoldedChunk(1, "stats", StoredSeries("fc", "output", "train"), (1, 1), (1, b""), b"")
Write = Callable[[Transaction, Claim], Any]
WRITERS: dict[str, Write] = {
    "shipments.ship": lambda tx, claim: shipments.ship(
        tx, claim, whole_batch(), offsets=(5, 9), lease_ms=LEASE_MS
    ),
    "leases.beat": lambda tx, claim: leases.beat(tx, claim, lease_ms=LEASE_MS),
    "leases.renew": lambda tx, claim: leases.renew(tx, claim, lease_ms=LEASE_MS),
    "attempts.run": lambda tx, claim: attempts.run(tx, claim, lease_ms=LEASE_MS),
    "attempts.applied": lambda tx, claim: attempts.applied(tx, claim, ["cmd_x"], 3),
    "attempts.refuse_checkpoint": lambda tx, claim: attempts.refuse_checkpoint(tx, claim, "x"),
    "attempts.finish": lambda tx, claim: attempts.finish(tx, claim, "failed", exit_kind="internal"),
    "attempts.give_up": lambda tx, claim: attempts.give_up(
        tx, claim, exit_kind="lease_lost", reason="x"
    ),
    "workers.quarantine": lambda tx, claim: workers.quarantine(tx, claim, "x"),
    "stats_folding.begin": lambda tx, claim: stats_folding.begin(tx, _owner(claim)),
    "stats_folding.store": lambda tx, claim: stats_folding.store(tx, _owner(claim), 1, [PIECE]),
    "stats_folding.finish": lambda tx, claim: stats_folding.finish(tx, _owner(claim), 1, [1]),
}


def _owner(claim: Claim) -> StatsOwner:
    return StatsOwner(claim.job, claim.fence)


def test_every_function_that_takes_a_claim_is_in_the_register():
    found: set[str] = set()
    for module in pkgutil.walk_packages(models.__path__, "models."):
        there = importlib.import_module(module.name)
        for name, function in inspect.getmembers(there, inspect.isfunction):
            mine = function.__module__ == there.__name__ and not name.startswith("_")
            kinds = [parameter.annotation for parameter in _parameters(function)]
            if mine and name not in READERS and (Claim in kinds or StatsOwner in kinds):
                found.add(f"{module.name.rpartition('.')[2]}.{name}")
    assert found == set(WRITERS)


def _parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("moment", ["queued again", "run by another"])
def test_a_stale_fence_writes_nothing(database: Database, writer: str, moment: str):
    make_worker(database)
    job = make_job(database)
    old = running(database, job)
    batch = whole_batch()
    batch.captures, batch.checkpoints = [], []
    assert ship(database, old, batch, (0, 5))
    with database.write() as tx:
        assert attempts.give_up(tx, old, exit_kind="lease_lost", reason="lease")
    if moment == "run by another":
        running(database, job)
    before = everything(database)
    with database.write() as tx:
        assert not WRITERS[writer](tx, old)
    assert everything(database) == before


@pytest.mark.parametrize("writer", WRITERS)
def test_the_same_is_written_by_who_has_the_job(database: Database, writer: str):
    """So that the test above does not pass because nothing ever writes."""
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    assert ship(database, claim, Batch(), (0, 5))
    with database.write() as tx:
        assert WRITERS[writer](tx, claim)


def everything(database: Database) -> dict[str, list[Any]]:
    """Every row of every table."""
    found: dict[str, list[Any]] = {}
    with database.read() as tx:
        for table in Table.metadata.sorted_tables:
            rows = [tuple(row) for row in tx.execute(select(table))]
            found[table.name] = sorted(rows, key=repr)
    return found
