"""Names of jobs that were submitted without one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import delete, update

from models.database import Database
from models.jobs import jobs, names
from models.jobs.names import stem_of
from models.migrate import config, migrate
from models.tables import Job, NameCounter

from .factories import make_job


def unnamed(database: Database, owner: str = "ada", stem: str | None = None) -> str:
    spec = {"kind": "train"}
    with database.write() as tx:
        resolved = {"probes": [], "devices": {}}
        return (
            jobs.add(tx, owner=owner, spec=spec, resolved=resolved, plan={}, stem=stem).name or ""
        )


def test_a_job_gets_the_next_name_of_its_owner(database: Database):
    given = [
        unnamed(database, owner, stem) for owner in ("ada", "bob") for stem in ("mlp", "mlp", None)
    ]
    assert given == ["mlp-1", "mlp-2", "train-1"] * 2


def test_a_number_is_given_once_and_never_to_a_name_that_is_taken(database: Database):
    assert unnamed(database, stem="mlp") == "mlp-1"
    with database.write() as tx:
        tx.execute(delete(Job).where(Job.name == "mlp-1"))
    assert unnamed(database, stem="mlp") == "mlp-2"
    with database.write() as tx:
        jobs.add(
            tx,
            owner="ada",
            spec={"kind": "train", "name": "mlp-3"},
            resolved={"probes": [], "devices": {}},
            plan={},
        )
    assert unnamed(database, stem="mlp") == "mlp-4"
    assert unnamed(database, "bob", "mlp") == "mlp-1"


def test_two_submissions_at_once_get_two_names(database: Database):
    """The second asks for its number while the first has its own and has not committed."""
    asked, made = threading.Event(), []

    def second() -> None:
        asked.set()
        made.append(unnamed(database, stem="mlp"))

    with ThreadPoolExecutor() as pool, database.write() as tx:
        first = names.make(tx, "ada", "mlp")
        waiting = pool.submit(second)
        assert asked.wait(60)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        tx.commit()
        waiting.result(timeout=60)
    assert [first, *made] == ["mlp-1", "mlp-2"]


def test_jobs_of_before_get_names_in_their_order(database: Database, tmp_path: Path):
    made = [make_job(database) for _ in range(3)]
    with database.engine.connect() as connection:
        command.downgrade(config(connection), "0016")
        connection.commit()
    with database.write() as tx:
        tx.execute(update(Job).where(Job.id.in_([job.id for job in made[:2]])).values(name=None))
    migrate(database, lock_file=tmp_path / "migrate.lock")
    with database.read() as tx:
        found = [tx.get(Job, job.id) for job in made]
        assert [row and row.name for row in found] == ["train-1", "train-2", made[2].name]
        counter = tx.get(NameCounter, (made[0].owner, "train"))
    assert counter is not None
    assert counter.last == 3
    assert unnamed(database) == "train-4"


@pytest.mark.parametrize(
    ("spec", "stem"),
    [
        ({"kind": "train", "network": {"type": "preset", "preset": "mlp"}}, "mlp"),
        (
            {"kind": "train", "network": {"layers": []}, "data": {"train": {"dataset": "ds_1"}}},
            "train-digits",
        ),
        (
            {"kind": "train", "data": {"train": [{"dataset": "ds_2"}, {"dataset": "ds_1"}]}},
            "train-my-rows",
        ),
        (
            {
                "kind": "train",
                "init": {"checkpoint": "ckpt_1"},
                "data": {"train": {"dataset": "ds_1"}},
            },
            "LeNet",
        ),
        (
            {
                "kind": "train",
                "init": {"checkpoint": "ckpt_2"},
                "data": {"train": {"dataset": "ds_1"}},
            },
            "train-digits",
        ),
        ({"kind": "infer", "data": {"dataset": "ds_1"}}, "infer-digits"),
        ({"kind": "infer", "inputs": {"x": [[1]]}}, "infer"),
        ({"kind": "infer", "data": {"dataset": "ds_3"}}, "infer"),
    ],
)
def test_a_name_says_what_the_job_does(spec: dict[str, Any], stem: str):
    used = {
        "ds_1": "digits",
        "ds_2": "my rows!.csv",
        "ds_3": None,
        "ckpt_1": "LeNet",
        "ckpt_2": None,
    }
    assert stem_of(spec, used) == stem
