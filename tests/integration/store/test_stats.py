"""Statistics in the database: blocks, folds and attempts against a plain dict."""

import math
import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alembic import command
from sqlalchemy import func, select

from models.database import Database
from models.jobs import attempts, jobs
from models.jobs.checkpoints import StartPoint
from models.jobs.leases import Claim
from models.migrate import config, migrate
from models.observations import stats, stats_folding, unfolded_stats
from models.observations.ranks import MERGED
from models.observations.stats_bytes import Histograms, StatsArrays, StoredSeries
from models.observations.stats_folding import Fold
from models.observations.unfolded_stats import StatsOwner
from models.tables import StatsBlock, StatsChunk, StatsSeries

from .factories import make_job, make_worker, next_attempt, purge_deleted, running

TENSORS = [("conv1", "output"), ("conv1.weight", "param"), ("fc", "output"), ("fc", "output_grad")]
ODD = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7e308]


def figure(chance: random.Random) -> float:
    return chance.choice(ODD) if chance.random() < 0.2 else chance.gauss(0, 1)


def record(chance: random.Random, step: int, phase: str = "train") -> dict[str, Any]:
    """What a rank says of a step: of some tensors, in some of the forms; and of single ranks."""
    ranks = [rank for rank in (0, 12) if chance.random() < 0.3]
    return {
        "step": step,
        "phase": phase,
        **part(chance),
        "ranks": [{"rank": rank, **part(chance)} for rank in ranks],
    }


def part(chance: random.Random) -> dict[str, Any]:
    """The statistics of a step, of all processes together or of one."""
    some = [tensor for tensor in TENSORS if chance.random() < 0.7]
    histograms = []
    for tensor in some:
        bins = sorted(chance.sample(range(4096), chance.randrange(5)))
        histograms.append([*tensor, bins, [chance.randrange(1, 1 << 40) for _ in bins]])
    return {
        "rows": [[*tensor, *[figure(chance) for _ in range(9)]] for tensor in some],
        "quantiles": [[*tensor, *[figure(chance) for _ in range(7)]] for tensor in some[:2]],
        "histograms": histograms,
    }


class Model:
    """What the database should say: a dict."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, StoredSeries, int], Any] = {}

    def add(self, records: list[dict[str, Any]]) -> None:
        for one in records:
            for form, key in (
                ("stats", "rows"),
                ("quantiles", "quantiles"),
                ("histogram", "histograms"),
            ):
                for part in (one, *one["ranks"]):
                    for layer, kind, *rest in part[key]:
                        rank = part.get("rank", MERGED)
                        series = StoredSeries(layer, kind, one["phase"], rank)
                        self.rows[form, series, one["step"]] = rest

    def rewind(self, step: int) -> None:
        self.rows = {key: rest for key, rest in self.rows.items() if key[2] < step}

    def check(self, database: Database, job: str, **where: Any) -> None:
        for form in stats.FORMS:
            with database.read() as tx:
                found = dict(stats.query(tx, job, form=form, **where))
            rows = {
                (form, series, int(step)): row
                for series, data in found.items()
                for step, row in zip(data.steps, rows_of(data), strict=True)
            }
            first, last = where.get("from_step") or 0, where.get("to_step") or 10**9
            expected = {
                key: rest
                for key, rest in self.rows.items()
                if key[0] == form
                and first <= key[2] <= last
                and key[1].layer.startswith(where.get("layer", "*").rstrip("*"))
                and where.get("kind") in (None, key[1].kind)
                and where.get("rank", MERGED) in (None, key[1].rank)
            }
            assert repr(sorted(rows.items())) == repr(sorted(expected.items()))
            for data in found.values():
                assert (np.diff(data.steps) > 0).all()

    def check_newest(self, database: Database, job: str, rank: int = MERGED) -> None:
        with database.read() as tx:
            found = stats.newest(tx, job, rank=rank)
        last: dict[StoredSeries, tuple[int, list[float]]] = {}
        for (form, series, step), rest in sorted(self.rows.items(), key=lambda item: item[0]):
            if form == "stats" and series.rank == rank:
                last[series] = (step, rest)
        rows = [(row.series, (row.step, list(row.figures))) for row in found]
        assert repr(rows) == repr(sorted(last.items()))


def rows_of(data: StatsArrays | Histograms) -> Generator[Any]:
    if isinstance(data, StatsArrays):
        yield from data.values.T.tolist()
        return
    for place in range(len(data.steps)):
        one = data.take(np.array([place]))
        yield [one.bins.tolist(), one.counts.tolist()]


def add(database: Database, claim: Claim, records: list[dict[str, Any]]) -> None:
    with database.write() as tx:
        stats.add(tx, claim.job, claim.attempt, records)


def fold(database: Database, claim: Claim, portions: int | None = None) -> bool:
    """Fold what there is; with ``portions``, break off after so many. False: fenced out."""
    owner = StatsOwner(claim.job, claim.fence)
    with database.write() as tx:
        number = stats_folding.begin(tx, owner)
    if number is None:
        return False
    with database.read() as tx:
        found = stats_folding.read(tx, claim.job)
    if found is None:
        return True
    small = [piece for portion in found.portions() for piece in portion]
    for place, piece in enumerate(small):
        if place == portions:
            return True
        with database.write() as tx:
            assert stats_folding.store(tx, owner, number, [piece])
    with database.write() as tx:
        return stats_folding.finish(tx, owner, number, found.blocks)


@pytest.mark.parametrize("seed", range(3))
def test_a_query_gives_what_was_added_however_it_was_folded(database: Database, seed: int):
    chance = random.Random(seed)  # noqa: S311
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    model = Model()
    step = 0
    for _ in range(25):
        move = chance.random()
        if move < 0.6:
            records = []
            for _ in range(chance.randrange(1, 5)):
                records.append(record(chance, step, "evaluate" if move < 0.1 else "train"))
                step += chance.randrange(1, 4)
            add(database, claim, records)
            model.add(records)
        elif move < 0.75:
            assert fold(database, claim)
        elif move < 0.85:
            assert fold(database, claim, portions=chance.randrange(3))
        elif move < 0.95:
            back_to = 0 if chance.random() < 0.2 else chance.randrange(max(1, step))
            lost, claim = claim, next_attempt(database, job, claim, StartPoint(step=back_to))
            assert not fold(database, lost)
            step = back_to
            model.rewind(step)
        else:
            low = chance.randrange(max(1, step))
            model.check(database, job.id, from_step=low, to_step=low + 5, layer="conv1*")
        model.check(database, job.id)
        model.check(database, job.id, rank=chance.choice([None, 0, 12, 3]))
        model.check_newest(database, job.id)
        model.check_newest(database, job.id, rank=12)
    model.check(database, job.id, kind="param")
    with database.read() as tx:
        assert list(stats.query(tx, job.id, layer="no*")) == []


def test_of_two_rows_for_a_step_the_later_stays(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    for value in (1.0, 2.0):
        row = ["fc", "output", *[value] * 9]
        add(database, claim, [{"step": 3, "phase": "train", "rows": [row]}])
        with database.read() as tx:
            ((_, found),) = stats.query(tx, job.id)
        assert (found.steps.tolist(), found.values[0].tolist()) == ([3], [value])
        assert fold(database, claim)
        with database.read() as tx:
            ((_, found),) = stats.query(tx, job.id)
        assert found.values[0].tolist() == [value]


def test_a_fold_takes_the_blocks_and_goes_with_its_job(database: Database, tmp_path: Path):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    chance = random.Random(1)  # noqa: S311
    add(database, claim, [record(chance, step) for step in range(50)])
    with database.write() as tx:
        assert attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")
    assert fold(database, claim)  # also after the end

    def count(table: Any) -> int:
        with database.read() as tx:
            return tx.scalar(select(func.count()).select_from(table)) or 0

    assert count(StatsBlock) == 0
    assert count(StatsChunk) == count(StatsSeries) > 4
    with database.write() as tx:
        jobs.delete(tx, jobs.get(tx, job.id, None))
    purge_deleted(database, tmp_path)
    assert count(StatsChunk) == count(StatsSeries) == 0


def test_series_from_before_are_of_all_processes_and_those_of_a_rank_are_new(
    database: Database, tmp_path: Path
):
    """What was folded before the migration stays, and a downgrade removes what is of one rank."""
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    row = ["fc", "output", *[1.0] * 9]
    own = {"rank": 1, "rows": [["fc", "output", *[2.0] * 9]]}
    record = {"step": 3, "phase": "train", "rows": [row]}
    add(database, claim, [{**record, "ranks": [own]}])
    assert fold(database, claim)
    for expected in ([MERGED, 1], [MERGED]):
        with database.read() as tx:
            found = [series.rank for series, _ in stats.query(tx, job.id, rank=None)]
        assert found == expected
        with database.engine.connect() as connection:
            command.downgrade(config(connection), "0027")
            connection.commit()
        migrate(database, lock_file=tmp_path / "migrate.lock")
    add(database, claim, [{**record, "step": 4, "ranks": [own]}])
    assert fold(database, claim)
    with database.read() as tx:
        found = {series.rank: data for series, data in stats.query(tx, job.id, rank=None)}
    assert {rank: data.steps.tolist() for rank, data in found.items()} == {MERGED: [3, 4], 1: [4]}
    assert found[1].values[0].tolist() == [2.0]


def test_enough_blocks_or_bytes_make_a_fold_due(database: Database, monkeypatch: Any):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)

    def due() -> tuple[bool, bool]:
        with database.read() as tx:
            return unfolded_stats.is_due(tx, job.id), unfolded_stats.is_left(tx, job.id)

    assert due() == (False, False)
    chance = random.Random(1)  # noqa: S311
    add(database, claim, [record(chance, step) for step in range(9)])
    assert due() == (False, True)
    monkeypatch.setattr(unfolded_stats, "MAX_BYTES", 2000)
    assert due() == (True, True)
    monkeypatch.undo()
    monkeypatch.setattr(unfolded_stats, "MAX_BLOCKS", 3)
    assert due() == (True, True)  # a block of each form


def test_a_portion_is_bounded_and_nothing_is_in_two():
    one = StatsArrays(np.arange(1000), np.zeros((9, 1000)))
    series = [StoredSeries(f"layer{n}", "output", "train") for n in range(30)]
    whole = Fold([], [(1, "stats", name, one) for name in series])
    portions = list(whole.portions())
    assert [len(portion) for portion in portions[:-1]] == [7] * (len(portions) - 1)
    assert [piece.series for portion in portions for piece in portion] == series
