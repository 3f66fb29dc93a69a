from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import insert

from glasshouse.errors import StepNotCaptured
from models.database import Database
from models.jobs.shipments import Batch
from models.migrate import config, migrate
from models.observations import captures
from models.observations.ranks import MERGED
from models.tables import Capture, core

from .factories import make_job, make_worker, running, ship

NEW = ("form", "slice", "captured_from", "tensor", "rank")


def row(number: int, **changes: Any) -> dict[str, Any]:
    about: dict[str, Any] = {"step": 3, "layer": "fc", "kind": "output", "phase": "train"}
    about |= {"id": f"cap_{number}", "shape": [2, 5], "dtype": "float32", "size_bytes": 40}
    return about | {"key": f"jobs/x/1/captures/{number}.safetensors"} | changes


def test_captures_from_before_are_files_of_one_whole_tensor(database: Database, tmp_path: Path):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    with database.engine.connect() as connection:
        command.downgrade(config(connection), "0002")
        connection.commit()
    plain = core(Capture)
    old = [{"job": job.id, "attempt": claim.attempt, **row(1)}]
    columns = {name: value for name, value in plain.c.items() if name not in NEW}
    with database.write() as tx:
        tx.execute(insert(plain).values({columns[name]: old[0][name] for name in old[0]}))
    migrate(database, lock_file=tmp_path / "migrate.lock")
    with database.read() as tx:
        (found,) = captures.find(tx, job.id)
    assert (found.form, found.slice, found.tensor) == ("full", None, "tensor")
    assert found.rank == MERGED
    assert found.shape == found.captured_from == [2, 5]


def test_of_a_tensor_and_a_part_of_it_the_whole_one_is_found(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    part = {"form": "slice", "slice": "0", "shape": [5], "captured_from": [2, 5]}
    rows = [row(1), row(2, **part), row(3, step=4, **part)]
    assert ship(database, claim, Batch(captures=rows), (0, 1))
    with database.read() as tx:
        assert captures.get(tx, job.id, "fc", "output", 3).id == "cap_1"
        assert captures.get(tx, job.id, "fc", "output", None).id == "cap_3"


def test_a_tensor_of_a_process_is_found_by_its_rank_only(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    rows = [row(1), row(2, rank=1), row(3, rank=0, step=4)]
    assert ship(database, claim, Batch(captures=rows), (0, 1))
    with database.read() as tx:
        assert captures.get(tx, job.id, "fc", "output", None).id == "cap_1"
        assert captures.get(tx, job.id, "fc", "output", 3, rank=1).id == "cap_2"
        for rank, expected in ((MERGED, [1]), (0, [3]), (1, [2]), (2, []), (None, [1, 2, 3])):
            found = captures.find(tx, job.id, rank=rank)
            assert [one.id for one in found] == [f"cap_{number}" for number in expected]
        with pytest.raises(StepNotCaptured, match=r"fc output of rank 1 .* step 4.* steps are 3"):
            captures.get(tx, job.id, "fc", "output", 4, rank=1)
        with pytest.raises(StepNotCaptured, match="No probe watches") as caught:
            captures.get(tx, job.id, "fc", "output", None, rank=2)
    assert '"ranks": [2]' in (caught.value.advice or "")
