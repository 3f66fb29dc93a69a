from datetime import timedelta
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import text

from glasshouse import errors
from models import keys
from models.access import idempotency
from models.access.idempotency import Answer, IdempotencyUse
from models.database import SQLITE_PRAGMAS, Database
from models.fleet import workers
from models.jobs import jobs
from models.jobs.jobs import Filter
from models.migrate import config, migrate
from models.storage import datasets
from models.storage.artifacts import LocalArtifacts

from .factories import make_job, make_worker, purge_deleted, running


def test_the_migrations_make_exactly_the_tables_and_may_run_again(
    database: Database, tmp_path: Path
):
    migrate(database, lock_file=tmp_path / "migrate.lock")
    with database.engine.connect() as connection:
        command.check(config(connection))  # raises when tables and migrations differ


def test_sqlite_took_every_pragma(database: Database):
    if not database.is_sqlite:
        return
    with database.read() as tx:
        for name, wanted in SQLITE_PRAGMAS.items():
            assert tx.scalar(text(f"PRAGMA {name}")) in (wanted, None)


def test_what_a_long_read_made_of_the_log_is_given_back(tmp_path: Path):
    """While somebody reads, what is written can only be put at the log's end."""
    database = Database(f"sqlite:///{tmp_path / 'a.db'}")
    log = tmp_path / "a.db-wal"
    with database.write() as tx:
        tx.execute(text("CREATE TABLE t (id INTEGER PRIMARY KEY, data BLOB)"))
    with database.read() as reader:
        reader.execute(text("SELECT count(*) FROM t"))
        for number in range(10):
            with database.write() as tx:
                row = {"id": number % 2, "data": bytes(5 * 1024**2)}
                tx.execute(text("INSERT OR REPLACE INTO t VALUES (:id, :data)"), row)
    assert log.stat().st_size > SQLITE_PRAGMAS["journal_size_limit"]
    for _ in range(2):  # the first copies all of the log, the next begins it anew
        with database.write() as tx:
            tx.execute(text("DELETE FROM t"))
    assert log.stat().st_size <= SQLITE_PRAGMAS["journal_size_limit"]
    database.close()


def test_an_error_in_a_transaction_takes_everything_back(database: Database):
    with pytest.raises(KeyError), database.write() as tx:
        jobs.add(tx, owner="ada", spec={"kind": "train"}, resolved={}, plan={})
        raise KeyError
    with database.read() as tx:
        assert jobs.find(tx, Filter(), after=None, limit=10) == []


def test_jobs_are_listed_in_pages_by_filter_and_owner(database: Database):
    mine = [make_job(database, labels={"n": str(n % 2)}, name=f"Run {n}") for n in range(9)]
    make_job(database, owner="bob")
    newest_first = [job.id for job in reversed(mine)]
    with database.read() as tx:
        page = jobs.find(tx, Filter(owner="ada"), after=None, limit=5)
        rest = jobs.find(tx, Filter(owner="ada"), after=page[-1].id, limit=5)
        odd = jobs.find(tx, Filter(owner="ada", labels={"n": "1"}), after=None, limit=3)
        named = jobs.find(tx, Filter(text="run 7"), after=None, limit=10)
        percent = jobs.find(tx, Filter(text="%"), after=None, limit=10)
    assert sorted(job.id for job in page + rest) == sorted(newest_first)
    assert [job.id for job in page + rest] == sorted(newest_first, reverse=True)
    assert len(odd) == 3
    assert all(job.labels == {"n": "1"} for job in odd)
    assert [job.name for job in named] == ["Run 7"]
    assert percent == []


def test_resources_of_another_owner_are_not_found(database: Database):
    job = make_job(database)
    with database.read() as tx, pytest.raises(errors.JobNotFound):
        jobs.get(tx, job.id, "bob")
    with database.write() as tx:
        dataset = datasets.add(tx, owner="ada", name="d", format="csv", size_bytes=1, sha256=None)
    with database.read() as tx, pytest.raises(errors.DatasetNotFound):
        datasets.get(tx, dataset.id, "bob")


def test_only_an_ended_job_can_be_deleted_and_takes_its_rows_along(
    database: Database, tmp_path: Path
):
    make_worker(database)
    job = make_job(database)
    running(database, job)
    with database.write() as tx, pytest.raises(errors.JobNotEnded):
        jobs.delete(tx, jobs.get(tx, job.id, None))
    other = make_job(database)
    with database.write() as tx:
        jobs.request_cancel(tx, jobs.get(tx, other.id, None), by="ada", force=False)
    with database.write() as tx:
        jobs.delete(tx, jobs.get(tx, other.id, None))
    purge_deleted(database, tmp_path)
    with database.read() as tx:
        assert tx.scalar(text("SELECT count(*) FROM events WHERE job = :j"), {"j": other.id}) == 0


def test_a_dataset_in_use_cannot_be_deleted(database: Database):
    with database.write() as tx:
        dataset = datasets.add(tx, owner="ada", name="d", format="csv", size_bytes=1, sha256=None)
        unread = datasets.claim(tx, "one", lease_ms=1000)
        assert unread is not None
        assert datasets.read(tx, unread, columns=[], splits={"all": 3}, key="datasets/d/1")
        assert not datasets.unreadable(tx, unread, {})
        job = jobs.add(
            tx, owner="ada", spec={"kind": "train"}, resolved={}, plan={}, uses=[dataset.id]
        )
    with database.write() as tx, pytest.raises(errors.DatasetInUse):
        datasets.delete(tx, datasets.get(tx, dataset.id, "ada"))
    with database.write() as tx:
        jobs.request_cancel(tx, jobs.get(tx, job.id, None), by="ada", force=False)
        datasets.delete(tx, datasets.get(tx, dataset.id, "ada"))


def test_a_key_opens_until_it_is_revoked_or_expires(database: Database):
    with database.write() as tx:
        row, secret = keys.create(tx, name="laptop", owner="ada", scopes=["submit", "read"])
        _, short = keys.create(
            tx, name="x", owner="ada", scopes=["read"], lifetime=timedelta(seconds=-1)
        )
        assert row.scopes == ["read", "submit"]
        assert secret not in (row.sha256, row.hint, row.name)
        assert keys.check(tx, secret).id == row.id
        for wrong in (short, secret[:-1] + "!", secret.lower(), "", "gh_", "x" * 10_000):
            with pytest.raises(errors.KeyInvalid):
                keys.check(tx, wrong)
        keys.revoke(tx, row.id)
        with pytest.raises(errors.KeyInvalid):
            keys.check(tx, secret)


def test_a_ticket_opens_once(database: Database):
    with database.write() as tx:
        key, _ = keys.create(tx, name="k", owner="ada", scopes=["read"])
        ticket = keys.derive(tx, key.id, "ticket", timedelta(minutes=1))
        with pytest.raises(errors.KeyInvalid):
            keys.check(tx, ticket)
        assert keys.redeem(tx, ticket) == key.id
        with pytest.raises(errors.KeyInvalid):
            keys.redeem(tx, ticket)


def test_a_session_and_a_ticket_have_the_rights_of_their_key_and_end_with_it(database: Database):
    with database.write() as tx:
        key, _ = keys.create(tx, name="laptop", owner="ada", scopes=["submit"])
        # named like the other's id: a name says nothing about which key it belongs to
        other, _ = keys.create(tx, name=key.id, owner="bob", scopes=["read"])
        session = keys.derive(tx, key.id, "session", timedelta(hours=1))
        ticket = keys.derive(tx, key.id, "ticket", timedelta(minutes=1))
        others = keys.derive(tx, other.id, "session", timedelta(hours=1))
        row = keys.check(tx, session, kind="session")
        assert (row.parent, row.name, row.owner, row.scopes) == (
            key.id,
            "laptop",
            "ada",
            ["submit"],
        )
        assert (keys.api_key_of(tx, row).id, keys.api_key_of(tx, key).id) == (key.id, key.id)
        assert {found.id for found in keys.find(tx, after=None, limit=10)} == {key.id, other.id}
        keys.revoke(tx, key.id)
        for secret, kind in ((session, "session"), (ticket, "ticket")):
            with pytest.raises(errors.KeyInvalid):
                keys.check(tx, secret, kind=kind)
            with pytest.raises(errors.KeyInvalid):
                keys.derive(tx, key.id, kind, timedelta(hours=1))
        found = keys.check(tx, others, kind="session")
        assert keys.api_key_of(tx, found).id == other.id
        with pytest.raises(errors.KeyInvalid):
            keys.derive(tx, "key_none", "session", timedelta(hours=1))


def test_an_idempotency_key_gives_its_first_answer_again(database: Database):
    token = IdempotencyUse("ada", "POST /jobs", "k1", "aa")
    with database.write() as tx:
        assert idempotency.begin(tx, token) is None
        with pytest.raises(errors.IdempotencyKeyBusy):
            idempotency.begin(tx, token)
        idempotency.finish(tx, token, Answer(201, {"Location": "/x"}, "{}"))
    with database.write() as tx:
        assert idempotency.begin(tx, token) == Answer(201, {"Location": "/x"}, "{}")
        with pytest.raises(errors.IdempotencyKeyReused):
            idempotency.begin(tx, IdempotencyUse("ada", "POST /jobs", "k1", "bb"))
        assert idempotency.begin(tx, IdempotencyUse("bob", "POST /jobs", "k1", "bb")) is None
        assert idempotency.begin(tx, IdempotencyUse("ada", "POST /datasets", "k1", "bb")) is None


def test_a_silent_worker_is_lost_and_its_devices_with_it(database: Database):
    make_worker(database, "w1")
    with database.read() as tx:
        assert [state for _, state in workers.all_workers(tx, lease_ms=30_000)] == ["active"]
        assert [state for _, state in workers.all_devices(tx, lease_ms=-1000)] == ["lost", "lost"]
    with database.write() as tx:
        workers.drain(tx, "w1")
        assert workers.beat(tx, "w1")
    with database.read() as tx:
        assert [state for _, state in workers.all_workers(tx, lease_ms=30_000)] == ["draining"]


def test_artifacts_are_stored_whole_or_not_at_all(tmp_path: Path):
    store = LocalArtifacts(tmp_path / "artifacts")
    with store.receive("jobs/a/x.bin") as path:
        path.write_bytes(b"abc")
    assert store.local("jobs/a/x.bin").read_bytes() == b"abc"
    with pytest.raises(OSError, match="gone"), store.receive("jobs/a/y.bin") as path:
        path.write_bytes(b"half")
        raise OSError("gone")
    assert [entry.name for entry in store.local("jobs/a").iterdir()] == ["x.bin"]
    made = tmp_path / "made"
    made.mkdir()
    (made / "f").write_text("1")
    store.put("jobs/a/dir", made)
    assert (store.local("jobs/a/dir") / "f").read_text() == "1"
    store.delete("jobs/a")
    with pytest.raises(FileNotFoundError):
        store.local("jobs/a")
    for key in ("../x", "/etc/passwd", "a/../../x", "", "a\\..\\b", "a\0b"):
        with pytest.raises(ValueError, match="key"):
            store.local(key)
