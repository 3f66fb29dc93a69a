"""What users ask of a running attempt reaches its rank once, and again where it was not written."""

from pathlib import Path
from typing import Any

import pytest

from glasshouse import jsonio, processes
from models.database import Database
from models.jobs import commands, jobs, leases
from models.jobs.leases import Claim
from models.observations import probes
from models.observations.probes import CheckedProbe
from models.tables import Job
from tests.integration.store.factories import LEASE_MS, make_job, make_worker, running
from worker.attempt.control import CommandDelivery
from worker.processes.rank import Rank

CHECKED = CheckedProbe(
    {"layers": ["fc"], "kinds": ["output"], "every": 1, "want": ["stats"]}, ["fc"], 8
)
DEVICE = {"type": "cpu", "threads": 1}
NOTHING: dict[str, Any] = {"probes": None, "commands": [], "device": DEVICE}


class Told(Rank):
    """A rank that notes what it receives."""

    def __init__(self) -> None:
        super().__init__(processes.Identity(0, ""), -1)
        self._lifeline = None
        self.files: list[str] = []

    def tell(self, command: dict[str, Any]) -> None:
        assert command["file"].startswith(command["do"])
        self.files.append(command["file"])


@pytest.fixture
def rank() -> Told:
    return Told()


@pytest.fixture
def claim(database: Database) -> Claim:
    make_worker(database)
    return running(database, make_job(database))


def job_of(database: Database, claim: Claim) -> Job:
    with database.read() as tx:
        return jobs.get(tx, claim.job, None)


@pytest.fixture
def control(database: Database, claim: Claim, tmp_path: Path) -> CommandDelivery:
    control = CommandDelivery(database, job_of(database, claim), tmp_path)
    control.delivered(NOTHING)
    return control


def ask(database: Database, claim: Claim, **body: Any) -> str:
    with database.write() as tx:
        return commands.add(tx, jobs.get(tx, claim.job, None), body, by="ada").id


def attach(database: Database, claim: Claim) -> str:
    with database.write() as tx:
        return probes.add(tx, jobs.get(tx, claim.job, None), CHECKED, by="ada").id


def beat(database: Database, claim: Claim, control: CommandDelivery) -> None:
    with database.write() as tx:
        beat = leases.beat(tx, claim, lease_ms=LEASE_MS)
    assert beat is not None
    control.receive(beat)


def test_each_list_of_probes_and_each_command_is_sent_once(
    database: Database, claim: Claim, control: CommandDelivery, rank: Told, tmp_path: Path
):
    beat(database, claim, control)
    control.deliver(rank)
    assert rank.files == []
    probe = attach(database, claim)
    first = ask(database, claim, do="checkpoint")
    for _ in range(2):
        beat(database, claim, control)
        control.deliver(rank)
    assert rank.files == ["probes-2.json", "commands-0.json"]
    wanted = jsonio.loads((tmp_path / "probes-2.json").read_bytes())
    assert (wanted["revision"], [one["id"] for one in wanted["probes"]]) == (2, [probe])
    with database.write() as tx:
        probes.applied(tx, claim.job, 2, 5)
    second = ask(database, claim, do="evaluate")
    beat(database, claim, control)
    control.deliver(rank)
    assert rank.files[2:] == ["commands-1.json"]
    sent = [jsonio.loads((tmp_path / f"commands-{n}.json").read_bytes()) for n in range(2)]
    assert [[one["id"] for one in file] for file in sent] == [[first], [second]]


def test_what_the_rank_was_started_with_is_not_sent(
    database: Database, claim: Claim, control: CommandDelivery, rank: Told
):
    attach(database, claim)
    ask(database, claim, do="checkpoint")
    with database.read() as tx:
        described = {
            "probes": probes.wanted(tx, claim.job),
            "commands": commands.to_carry_out(tx, claim.job, None),
            "device": DEVICE,
        }
    control.delivered(described)
    beat(database, claim, control)
    control.deliver(rank)
    assert rank.files == []


def test_what_cannot_be_written_is_sent_later(
    database: Database, claim: Claim, rank: Told, tmp_path: Path
):
    control = CommandDelivery(database, job_of(database, claim), tmp_path / "missing")
    attach(database, claim)
    ask(database, claim, do="checkpoint")
    beat(database, claim, control)
    control.deliver(rank)
    (tmp_path / "missing").mkdir()
    control.deliver(rank)
    assert rank.files == [], "it was to wait before it tries again"
    control._retry_at = 0.0
    control.deliver(rank)
    assert rank.files == ["probes-2.json", "commands-0.json"]


def test_a_cancellation_is_known_with_its_command_and_its_force(
    database: Database, claim: Claim, control: CommandDelivery, rank: Told
):
    for force in (False, True):
        with database.write() as tx:
            jobs.request_cancel(tx, jobs.get(tx, claim.job, None), by="ada", force=force)
        beat(database, claim, control)
        assert (control.cancelled, control.force, control.pausing) == (True, force, False)
        assert control.stops
    control.deliver(rank)
    assert rank.files == [], "a rank is stopped by its supervisor"
