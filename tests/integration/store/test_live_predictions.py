"""Which training jobs were asked for predictions, on both databases."""

from models.database import Database
from models.jobs import attempts, jobs, live_predictions, replicas, shipments
from models.jobs.leases import Claim
from models.jobs.live_predictions import LiveRoute
from models.jobs.shipments import Batch
from models.tables import Job

from .factories import LEASE_MS, make_job, make_worker, running

HEARD = {"address": "unix:/tmp/s", "token": "secret", "problem": None}


def ask(database: Database, job_id: str) -> int:
    """Ask a job; return how many commands it has then."""
    with database.write() as tx:
        live_predictions.ask(tx, jobs.get(tx, job_id, None, lock=True))
    with database.read() as tx:
        return tx.get_one(Job, job_id).num_commands


def is_asked(database: Database, claim: Claim) -> bool:
    with database.read() as tx:
        return live_predictions.is_asked(tx, claim)


def routes(database: Database) -> list[LiveRoute]:
    with database.read() as tx:
        return live_predictions.routes(tx)


def report(database: Database, claim: Claim, **values: object) -> None:
    with database.write() as tx:
        batch = Batch(live=HEARD | values)
        assert shipments.ship(tx, claim, batch, offsets=(0, 0), lease_ms=LEASE_MS)


def test_each_attempt_is_asked_once_and_listens_until_it_ends(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    assert routes(database) == []
    assert not is_asked(database, claim)
    assert [ask(database, job.id) for _ in range(2)] == [1, 1]
    assert is_asked(database, claim)
    (route,) = routes(database)
    assert (route.job, route.state, route.is_asked, route.address) == (job.id, "running", True, "")

    report(database, claim)
    assert not is_asked(database, claim)
    (route,) = routes(database)
    assert (route.address, route.token, route.problem) == ("unix:/tmp/s", "secret", None)
    with database.write() as tx:
        assert replicas.num_starts(tx, job.id) == 0, "listening is no progress of a training job"
        attempts.give_up(tx, claim, exit_kind="interrupted", reason="t", counted=False)
    (route,) = routes(database)
    assert (route.state, route.is_asked, route.address) == ("queued", False, "")


def test_a_job_that_cannot_listen_says_why(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    ask(database, job.id)
    report(database, claim, address="", token="", problem="no memory")
    (route,) = routes(database)
    assert (route.is_asked, route.address, route.problem) == (True, "", "no memory")
    with database.write() as tx:
        attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")
    assert routes(database) == []
