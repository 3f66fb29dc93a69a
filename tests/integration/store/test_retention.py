"""What is deleted when, in which portions, and what stays: on both databases."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, insert, select, text, update

from glasshouse import jsonio
from glasshouse.ids import new_id
from models import keys, marks
from models.access import idempotency
from models.access.idempotency import IdempotencyUse
from models.database import Database
from models.jobs import attempts, checkpoints, jobs
from models.observations import events
from models.purge import LEAST_REST_S, ORPHAN_AFTER_S, Purge, orphans
from models.settings import Settings
from models.storage import pending_deletions, retention
from models.storage.artifacts import LocalArtifacts
from models.tables import (
    Capture,
    Checkpoint,
    Device,
    Event,
    Idempotency,
    Job,
    JobUse,
    Key,
    Metric,
    ServedRequest,
    StatsBlock,
    Table,
    Worker,
    core,
    now,
)
from tests.integration.store.factories import (
    losses,
    make_job,
    make_worker,
    running,
    served_request,
    ship,
)

STEPS = 20


class Store:
    def __init__(self, database: Database, home: Path) -> None:
        self.database = database
        self.home = home
        self.artifacts = LocalArtifacts(home / "artifacts")
        make_worker(database, cores=8)

    def file(self, key: str) -> str:
        path = self.home / "new"
        path.write_bytes(b"x" * 10)
        self.artifacts.put(key, path)
        return key

    def is_there(self, key: str) -> bool:
        return (self.home / "artifacts" / key).exists()

    def job(self, *, ended: bool = True, days_ago: float = 10) -> str:
        """A job with some of everything."""
        job = make_job(self.database)
        claim = running(self.database, job)
        batch = losses(*((step, 1 / (step + 1)) for step in range(STEPS)))
        row: list[Any] = ["fc", "output", *[0.5] * 9]
        batch.stats = [{"step": step, "phase": "train", "rows": [row]} for step in range(3)]
        shared = self.file(f"jobs/{job.id}/1/captures/a.safetensors")
        alone = self.file(f"jobs/{job.id}/1/captures/b.safetensors")
        batch.captures = [
            {
                "id": new_id("cap"),
                "step": step,
                "layer": "fc",
                "kind": "output",
                "phase": "train",
                "shape": [1],
                "dtype": "float32",
                "size_bytes": 4,
                "key": key,
            }
            for step, key in enumerate([shared, shared, shared, alone])
        ]
        checkpoint = new_id("ckpt")
        batch.checkpoints = [
            {
                "id": checkpoint,
                "owner": "ada",
                "step": STEPS,
                "epoch": 0,
                "final": True,
                "files": {},
                "size_bytes": 100,
                "metrics": {},
                "key": self.file(f"jobs/{job.id}/1/checkpoints/{checkpoint}"),
                "created_at": now(),
            }
        ]
        assert ship(self.database, claim, batch, (0, 10))
        with self.database.write() as tx:
            tx.execute(insert(core(ServedRequest)), [served_request(job.id) for _ in range(3)])
        if ended:
            with self.database.write() as tx:
                assert attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")
                past = now() - timedelta(days=days_ago)
                tx.execute(update(Job).where(Job.id == job.id).values(ended_at=past))
        return job.id

    def count(self, table: Any, job: str) -> int:
        with self.database.read() as tx:
            query = select(func.count()).select_from(table).where(table.job == job)
            return tx.scalars(query).one()

    def counts(self, job: str) -> dict[str, int]:
        tables = (Event, Metric, StatsBlock, ServedRequest, Capture, Checkpoint)
        return {table.__tablename__: self.count(table, job) for table in tables}

    def purge(self, **settings: Any) -> Purge:
        found = Settings(home=self.home, artifacts_dir=self.home / "artifacts", **settings)
        return Purge(found, self.database, self.artifacts)

    def read(self, job: str, seq: int) -> events.EventPage:
        with self.database.read() as tx:
            return events.read(tx, job, seq)


@pytest.fixture
def store(database: Database, tmp_path: Path) -> Store:
    return Store(database, tmp_path)


def rows_by_table(database: Database) -> dict[str, int]:
    with database.read() as tx:
        return {
            name: tx.scalars(select(func.count()).select_from(table)).one()
            for name, table in Table.metadata.tables.items()
        }


def test_nothing_of_a_deleted_job_stays_in_any_table_or_folder(store: Store):
    """And what it took on SQLite's disk is taken again: jobs that come and go take no more."""
    taken: list[int] = []
    for _ in range(3):
        for _ in range(4):
            store.job(days_ago=2)
        store.purge(keep_jobs_days=1).run()
        left = {name for name, count in rows_by_table(store.database).items() if count}
        who_ran_them, numbers_of_names = {"workers", "devices"}, {"name_counters"}
        assert left <= who_ran_them | numbers_of_names
        assert not [path for path in (store.home / "artifacts").rglob("*") if path.is_file()]
        if store.database.is_sqlite:
            with store.database.read() as tx:
                taken.append(tx.scalars(text("PRAGMA page_count")).one())
    assert len(set(taken)) <= 1, taken


KINDS = (
    *("values", "events", "metrics", "statistics", "requests", "captures", "checkpoints", "jobs"),
)
FOR_EVER = {f"keep_{kind}_days": None for kind in KINDS}


def test_by_default_copies_and_bulk_go_and_jobs_with_their_checkpoints_stay(store: Store):
    job = store.job(days_ago=10_000)
    store.purge().run()
    left = {name: rows for name, rows in store.counts(job).items() if rows}
    assert left == {"events": 1, "checkpoints": 1}  # the last event


def test_nothing_is_deleted_where_every_setting_is_null(store: Store):
    job = store.job(days_ago=10_000)
    before = store.counts(job)
    assert store.purge(**FOR_EVER).run().as_dict() == {
        "rows": {},
        "bytes": {},
        "files": 0,
        "orphans": 0,
    }
    assert store.counts(job) == before


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("events", Event),
        ("metrics", Metric),
        ("statistics", StatsBlock),
        ("requests", ServedRequest),
        ("captures", Capture),
        ("checkpoints", Checkpoint),
    ],
)
def test_each_kind_goes_by_its_own_setting_and_from_old_ended_jobs_only(
    store: Store, kind: str, table: Any
):
    old, young, live = store.job(days_ago=8), store.job(days_ago=6), store.job(ended=False)
    kept = [store.counts(job) for job in (young, live)]
    before = store.counts(old)
    store.purge(**{f"keep_{kind}_days": 7}).run()
    assert [store.counts(job) for job in (young, live)] == kept
    left = 1 if kind == "events" else 0
    assert store.counts(old) == before | {table.__tablename__: left}


def test_a_reader_with_an_older_cursor_gets_one_gap_and_continues(store: Store):
    job = store.job()
    whole = store.read(job, 0)
    last = whole.last_seq
    store.purge(keep_events_days=1).run()
    for cursor in (0, 3, last - 2):
        page = store.read(job, cursor)
        assert [event.type for event in page.events] == ["gap"]
        assert jsonio.loads(page.events[0].payload) == {"first_available": last}
        assert page.seq == page.events[0].seq == last - 1
    rest = store.read(job, last - 1)
    assert [(event.seq, event.type) for event in rest.events] == [(last, "end")]
    assert rest.events == whole.events[-1:]
    assert store.read(job, last).events == []


def test_a_gap_is_reported_whatever_types_are_asked_for(store: Store):
    job = store.job()
    store.purge(keep_events_days=1).run()
    with store.database.read() as tx:
        page = events.read(tx, job, 0, types=["metrics"])
    assert [event.type for event in page.events] == ["gap"]


def aged(store: Store, job: str, upto: int, days: float) -> None:
    """Make the events up to a number, and the job, so old."""
    past = now() - timedelta(days=days)
    with store.database.write() as tx:
        tx.execute(update(Event).where(Event.job == job, Event.seq <= upto).values(at=past))
        tx.execute(update(Job).where(Job.id == job).values(created_at=past))


def read_all(store: Store, job: str, seq: int, types: list[str] | None = None) -> list[Any]:
    """As a client does: page after page, from a cursor on."""
    found: list[Any] = []
    while True:
        with store.database.read() as tx:
            page = events.read(tx, job, seq, types=types, limit=7)
        found += page.events
        if page.seq == seq:
            return found
        seq = page.seq


@pytest.mark.parametrize("chunk", [3, 500])
def test_values_of_a_running_job_are_stored_once_after_the_window(store: Store, chunk: int):
    """Their events go; the series, the rest of the log and every younger event stay."""
    job = store.job(ended=False)
    values = [event.seq for event in read_all(store, job, 0) if event.type == "metrics"]
    middle = values[len(values) // 2]
    aged(store, job, middle, 4)
    before = read_all(store, job, 0)
    kept = store.purge(purge_chunk=chunk).run()
    assert kept.rows == {"values": len([seq for seq in values if seq <= middle])}
    assert store.count(Metric, job) == STEPS
    younger = [event for event in before if event.seq > middle]
    for cursor in (middle, middle + 1, younger[-1].seq):  # resumed within the window
        expected = [event for event in before if event.seq > cursor]
        assert read_all(store, job, cursor) == expected
    gap, *rest = read_all(store, job, 0)
    assert (gap.type, jsonio.loads(gap.payload)) == ("gap", {"first_available": middle + 1})
    assert rest == younger
    others = sorted({event.type for event in before} - {"metrics", "stats"})
    expected = [event for event in before if event.type in others]
    assert read_all(store, job, 0, others) == expected  # of these nothing is missing
    assert store.purge(purge_chunk=chunk).run().rows == {}


def test_a_log_whose_values_went_early_goes_as_a_whole_after_its_own_time(store: Store):
    job = store.job(days_ago=100)
    aged(store, job, 10_000, 100)
    store.purge(**FOR_EVER | {"keep_values_days": 3}).run()
    left = store.count(Event, job)
    assert 1 < left < STEPS
    planned = store.purge(**FOR_EVER | {"keep_events_days": 90}).plan().rows
    assert planned == {"events": left - 1}
    assert store.purge(**FOR_EVER | {"keep_events_days": 90}).run().rows == planned
    assert [event.type for event in read_all(store, job, 0, ["end"])] == ["gap", "end"]


def test_a_dry_run_counts_the_values_that_would_go(store: Store):
    job = store.job(ended=False)
    aged(store, job, 10_000, 4)
    planned = store.purge(**FOR_EVER | {"keep_values_days": 3}).plan().rows
    assert planned == store.purge(**FOR_EVER | {"keep_values_days": 3}).run().rows != {}


def test_half_purged_logs_begin_where_they_are_whole(store: Store):
    job = store.job()
    with store.database.write() as tx:
        retention.KINDS[0].some(tx, job, 7)
    page = store.read(job, 0)
    assert jsonio.loads(page.events[0].payload) == {"first_available": 8}
    found = store.read(job, page.seq)
    assert [event.seq for event in found.events] == list(range(8, found.last_seq + 1))


def test_files_go_after_their_rows_and_a_shared_one_with_its_last(store: Store):
    job = store.job()
    done = store.purge(keep_captures_days=1, purge_chunk=1).run()
    assert (done.rows["captures"], done.files) == (4, 2)
    for name in ("a", "b"):
        assert not store.is_there(f"jobs/{job}/1/captures/{name}.safetensors")


class Crash(Exception):
    pass


class Failing(LocalArtifacts):
    def delete(self, prefix: str) -> None:
        raise Crash


def test_a_crash_between_rows_and_files_leaves_no_file_forever(store: Store):
    job = store.job()
    purge = store.purge(keep_captures_days=1)
    purge._artifacts = Failing(store.home / "artifacts")
    with pytest.raises(Crash):
        purge.run()
    assert store.count(Capture, job) == 0
    key = f"jobs/{job}/1/captures/a.safetensors"
    assert store.is_there(key)
    store.purge().run()
    assert not store.is_there(key)
    with store.database.read() as tx:
        assert pending_deletions.find(tx, limit=10) == []


def test_what_a_live_job_reads_stays_until_it_has_ended(store: Store):
    trained = store.job()
    with store.database.write() as tx:
        (checkpoint,) = checkpoints.of_job(tx, trained)
        row = {column.name: getattr(checkpoint, column.name) for column in core(Checkpoint).columns}
        other = new_id("ckpt")
        key = store.file(f"jobs/{trained}/1/checkpoints/{other}")
        tx.add(Checkpoint(**row | {"id": other, "key": key}))
    reader = make_job(store.database)
    with store.database.write() as tx:
        tx.add(JobUse(job=reader.id, used=checkpoint.id))
    store.purge(keep_checkpoints_days=1, keep_jobs_days=1).run()
    assert store.count(Checkpoint, trained) == 1
    assert store.is_there(checkpoint.key)
    assert not store.is_there(key)
    with store.database.write() as tx:
        jobs.request_cancel(tx, jobs.get(tx, reader.id, None), by="ada", force=False)
    store.purge(keep_checkpoints_days=1, keep_jobs_days=1).run()
    assert store.count(Checkpoint, trained) == 0
    assert not store.is_there(checkpoint.key)


def test_whole_jobs_go_with_everything(store: Store):
    old, young = store.job(days_ago=8), store.job(days_ago=6)
    store.purge(keep_jobs_days=7).run()
    with store.database.read() as tx:
        left = list(tx.scalars(select(Job.id)))
    assert left == [young]
    assert set(store.counts(old).values()) == {0}
    assert not store.is_there(f"jobs/{old}")
    assert store.is_there(f"jobs/{young}")


def test_a_dry_run_says_what_a_run_then_deletes(store: Store):
    for days in (8, 8, 6):
        store.job(days_ago=days)
    settings = {f"keep_{kind.name}_days": 7 for kind in retention.KINDS}
    planned = store.purge(**settings).plan()
    again = store.purge(**settings).plan()
    assert planned.as_dict() == again.as_dict()
    done = store.purge(**settings).run()
    assert planned.rows["captures"] == done.rows["captures"] == 8
    for name in ("events", "metrics", "checkpoints"):
        assert planned.rows[name] == done.rows[name], name
    assert planned.bytes["checkpoints"] == 200
    assert store.purge(**settings).plan().rows == {}


def test_no_transaction_deletes_more_than_a_chunk(store: Store):
    job = store.job()
    sizes: list[int] = []
    left = store.count(Metric, job)
    purge = store.purge(keep_metrics_days=1, purge_chunk=6)

    def stays_mine(tx: Any) -> bool:
        nonlocal left
        count = tx.scalars(select(func.count()).select_from(Metric).where(Metric.job == job)).one()
        sizes.append(left - count)
        left = count
        return True

    purge._stays_mine = stays_mine
    purge.run()
    assert left == 0
    assert max(sizes) <= 6
    assert sum(size > 0 for size in sizes) == -(-STEPS // 6)


class Rests(threading.Event):
    """Nobody stops it; it notes how long it was to be waited for, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return False


@pytest.mark.parametrize(("held_s", "rest_s"), [(0.001, LEAST_REST_S), (0.1, 0.3), (5.0, 0.5)])
def test_a_purge_sleeps_by_the_time_it_held_the_database_and_not_by_its_waits(
    store: Store, held_s: float, rest_s: float
):
    store.job()
    passed_s = 0.0
    rests = Rests()

    def clock() -> float:
        nonlocal passed_s
        passed_s += held_s
        return passed_s

    def waits(_: Any) -> bool:
        nonlocal passed_s
        passed_s += 1000.0
        return True

    purge = Purge(
        Settings(home=store.home, keep_jobs_days=1),
        store.database,
        store.artifacts,
        stop=rests,
        stays_mine=waits,
        clock=clock,
    )
    assert purge.run().rows["jobs"] == 1
    assert rests.seconds == [pytest.approx(rest_s)] * len(rests.seconds)
    assert len(rests.seconds) > 5


def test_a_purge_that_is_asked_to_stop_stops_between_two_chunks(store: Store):
    job = store.job()
    stop = threading.Event()
    purge = store.purge(keep_metrics_days=1, purge_chunk=5)
    purge._stop = stop
    turns = 0

    def stays_mine(_: Any) -> bool:
        nonlocal turns
        turns += 1
        if turns == 2:
            stop.set()
        return True

    purge._stays_mine = stays_mine
    purge.run()
    assert store.count(Metric, job) == STEPS - 10
    store.purge(keep_metrics_days=1).run()
    assert store.count(Metric, job) == 0


def test_only_one_process_at_a_time_has_the_turn(database: Database):
    with database.write() as tx:
        assert marks.take(tx, "purge", "a", every_ms=60_000)
    with database.write() as tx:
        assert not marks.take(tx, "purge", "b", every_ms=60_000)
        assert marks.take(tx, "purge", "a", every_ms=60_000)
        assert marks.take(tx, "other", "b", every_ms=60_000)
        assert marks.take(tx, "purge", "b", every_ms=-1)
    with database.write() as tx:
        assert not marks.take(tx, "purge", "a", every_ms=60_000)


def test_answers_and_keys_that_are_of_no_use_go_and_the_others_stay(store: Store):
    with store.database.write() as tx:
        for name in ("old", "new"):
            idempotency.begin(tx, IdempotencyUse("ada", "POST /jobs", name, "x"))
        past = now() - idempotency.KEPT - timedelta(minutes=1)
        tx.execute(update(Idempotency).where(Idempotency.key == "old").values(created_at=past))
        made = {
            name: keys.create(tx, name=name, owner="ada", scopes=["read"])[0]
            for name in ("good", "revoked", "revoked lately", "expired")
        }
        made["revoked"].revoked_at = now() - timedelta(days=31)
        made["revoked lately"].revoked_at = now() - timedelta(days=29)
        made["expired"].expires_at = now() - timedelta(days=31)
    purge = store.purge()
    assert purge.plan().rows == {"idempotency": 1, "keys": 2}
    assert purge.run().rows == {"others": 3}
    with store.database.read() as tx:
        assert set(tx.scalars(select(Key.name))) == {"good", "revoked lately"}
        assert list(tx.scalars(select(Idempotency.key))) == ["new"]


def test_workers_that_never_came_back_go_unless_a_job_has_their_devices(store: Store):
    """Hosts with names of chance would add rows for ever, and stay lost in every list."""
    for name in ("gone", "stopped", "busy", "begun again", "silent"):
        make_worker(store.database, name)
    past, lately = now() - timedelta(days=31), now() - timedelta(days=29)
    with store.database.write() as tx:
        for name, started, beat_ms in (
            ("gone", past, int(past.timestamp() * 1000)),
            ("stopped", past, 0),
            ("busy", past, 0),
            ("begun again", lately, 0),
            ("silent", past, int(lately.timestamp() * 1000)),
        ):
            values = {"started_at": started, "beat_ms": beat_ms}
            tx.execute(update(Worker).where(Worker.id == name).values(values))
        tx.execute(update(Device).where(Device.worker == "busy").values(job="job_x"))
    assert store.purge(keep_workers_days=None).run().rows == {}
    purge = store.purge()
    assert purge.plan().rows == {"workers": 2}
    assert purge.run().rows == {"others": 2}
    with store.database.read() as tx:
        assert set(tx.scalars(select(Worker.id))) == {"w1", "busy", "begun again", "silent"}
        assert not set(tx.scalars(select(Device.worker))) & {"gone", "stopped"}


def test_weights_that_a_crash_left_without_a_row_go_and_all_others_stay(store: Store):
    import os

    from models import backup
    from models.access import quotas
    from models.jobs import checkpoints

    columns: dict[str, Any] = {"name": None, "network": {}, "files": {}, "sha256": "ab"}
    kept, lost, fresh = (new_id("ckpt") for _ in range(3))
    keys = {name: f"checkpoints/{name}" for name in (kept, lost, fresh)}
    with store.database.write() as tx:
        checkpoints.upload(tx, id=kept, owner="ada", size_bytes=7, key=keys[kept], **columns)
    for key in keys.values():
        store.file(f"{key}/model.safetensors")
    past = now().timestamp() - ORPHAN_AFTER_S - 60
    for name in (kept, lost):
        os.utime(store.home / "artifacts" / keys[name], (past, past))
    settings = Settings(home=store.home, artifacts_dir=store.home / "artifacts")
    assert [path.name for path in orphans(settings, store.database)] == [lost]
    assert store.purge().run().orphans == 1
    assert {name for name in keys if store.is_there(keys[name])} == {kept, fresh}
    with store.database.read() as tx:
        assert quotas.stored_bytes(tx, "ada") == 7
        assert keys[kept] in list(backup._keys(tx))


def test_uploads_that_nobody_waits_for_go_and_fresh_ones_stay(store: Store):
    import os

    from models.storage import datasets

    with store.database.write() as tx:
        row = datasets.add(tx, owner="ada", name="n", format="csv", size_bytes=1, sha256=None)
    old, fresh, waited = (
        store.file(f"uploads/{name}") for name in (new_id("ds"), new_id("ds"), row.id)
    )
    half = store.home / "artifacts" / "uploads" / ".x.incoming"
    half.write_bytes(b"x")
    past = now().timestamp() - ORPHAN_AFTER_S - 60
    for path in (old, waited, "uploads/.x.incoming"):
        os.utime(store.home / "artifacts" / path, (past, past))
    settings = Settings(home=store.home, artifacts_dir=store.home / "artifacts")
    assert len(orphans(settings, store.database)) == 2
    assert store.purge().run().orphans == 2
    assert not store.is_there(old)
    assert not half.exists()
    assert store.is_there(fresh)
    assert store.is_there(waited)
