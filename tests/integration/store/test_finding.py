"""What is asked often costs as much as it finds, not as much as there is."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import func, select, text, update
from starlette.requests import Request

from api.http.access import Caller
from api.rendering import drawing
from api.routes.observations import plots
from glasshouse.errors import IdempotencyKeyReused
from models.access import idempotency, quotas
from models.access.idempotency import KEPT, Answer, IdempotencyUse
from models.database import Database
from models.jobs import jobs
from models.jobs.jobs import Filter
from models.observations import metrics
from models.settings import Settings
from models.storage import retention
from models.tables import Idempotency, JobLabel, Metric, MetricSpan, core, now

from .factories import make_job
from .test_deleting import statements


def found(database: Database, **wanted: Any) -> list[str]:
    with database.read() as tx:
        return [job.id for job in jobs.find(tx, Filter(**wanted), after=None, limit=5)]


def test_a_label_that_no_job_has_is_not_looked_for_in_every_job(database: Database):
    for number in range(30):
        make_job(database, labels={"n": str(number), "all": "yes"})
    with database.write() as tx, statements(database) as said:
        wanted = Filter(labels={"n": "none", "all": "yes"})
        assert jobs.find(tx, wanted, after=None, limit=5) == []
    assert len([line for line in said if line.startswith("SELECT")]) == 1
    with database.write() as tx:  # as its planner would do it for a table of some size
        if database.is_sqlite:
            plan = "EXPLAIN QUERY PLAN "
        else:
            tx.execute(text("SET LOCAL enable_seqscan = off"))
            plan = "EXPLAIN "
        query = "SELECT id FROM jobs WHERE id IN (SELECT job FROM job_labels WHERE name = 'n' "
        rows = tx.execute(text(plan + query + "AND value = '7') ORDER BY id DESC LIMIT 5")).all()
    assert "ix_job_labels_name_value_job" in str(rows), rows


def test_labels_are_found_as_they_are_after_each_change(database: Database):
    first = make_job(database, labels={"a": "1", "b": "2"})
    second = make_job(database, labels={"a": "1"})
    make_job(database, owner="bob", labels={"a": "1"})
    assert found(database, owner="ada", labels={"a": "1"}) == [second.id, first.id]
    assert found(database, labels={"a": "1", "b": "2"}) == [first.id]
    with database.write() as tx:
        job = jobs.get(tx, first.id, "ada", lock=True)
        jobs.patch(tx, job, {"labels": {"b": "3"}})
    assert found(database, owner="ada", labels={"a": "1"}) == [second.id]
    assert found(database, labels={"b": "3"}) == [first.id]
    assert found(database, labels={"b": "2"}) == []
    with database.write() as tx:
        jobs.patch(tx, jobs.get(tx, first.id, "ada", lock=True), {"labels": {}})
        assert tx.scalar(select(func.count()).where(JobLabel.job == first.id)) == 0


def test_using_an_idempotency_key_leaves_the_old_ones_to_the_purge(
    database: Database, tmp_path: Any
):
    def token(number: int, body: str = "aa") -> IdempotencyUse:
        return IdempotencyUse("ada", "POST /jobs", f"k{number}", body)

    for number in range(3):
        with database.write() as tx:
            assert idempotency.begin(tx, token(number)) is None
            idempotency.finish(tx, token(number), Answer(201, {}, str(number)))
    with database.write() as tx:
        tx.execute(update(Idempotency).values(created_at=now() - KEPT - timedelta(seconds=1)))
    with database.write() as tx, statements(database) as said:
        assert idempotency.begin(tx, token(3)) is None
        assert not [line for line in said if line.startswith("DELETE")]
        assert tx.scalar(select(func.count()).select_from(Idempotency)) == 4
    with database.write() as tx:  # its own key counts as unused, also with another body
        assert idempotency.find(tx, token(1)) is None
        assert idempotency.begin(tx, token(1, "bb")) is None
        idempotency.finish(tx, token(1, "bb"), Answer(201, {}, "new"))
    with database.write() as tx:
        again = idempotency.begin(tx, token(1, "bb"))
        assert again is not None
        assert again.body == "new"
        with pytest.raises(IdempotencyKeyReused):
            idempotency.begin(tx, token(1))
    with database.write() as tx:
        assert retention.forget_small(tx, Settings(home=tmp_path), 1000) == 2
        assert tx.scalar(select(func.count()).select_from(Idempotency)) == 2


def put(database: Database, job: str, name: str, steps: range, attempt: int = 1) -> None:
    made = {"job": job, "name": name, "attempt": attempt, "epoch": 0, "nonfinite": None}
    with database.write() as tx:
        rows = [made | {"step": step, "value": float(step)} for step in steps]
        tx.execute(core(Metric).insert(), rows)


def test_pages_of_metrics_are_bounded_and_have_every_value_once(database: Database):
    job = make_job(database).id
    put(database, job, "dense", range(0, 100))
    put(database, job, "sparse", range(0, 100, 10))
    put(database, job, "late", range(90, 100))
    names = ["dense", "sparse", "late", "none"]
    seen: dict[str, list[int]] = {name: [] for name in names}
    step: int | None = 0
    pages = 0
    while step is not None:
        with database.read() as tx:
            page = metrics.page(tx, job, names, from_step=step, max_values=40)
        assert sum(len(points) for points in page.series.values()) <= 40
        for name, points in page.series.items():
            seen[name] += [point.step for point in points]
            assert all(page.next_step is None or one.step < page.next_step for one in points)
        assert page.next_step is None or page.next_step > step
        step, pages = page.next_step, pages + 1
    assert pages == 10
    assert seen == {
        "dense": [*range(100)],
        "sparse": [*range(0, 100, 10)],
        "late": [*range(90, 100)],
        "none": [],
    }
    with database.read() as tx:
        some = metrics.page(tx, job, ["dense"], from_step=3, to_step=7, max_values=5)
    assert ([point.step for point in some.series["dense"]], some.next_step) == (
        [3, 4, 5, 6, 7],
        None,
    )


def test_a_step_of_several_attempts_is_never_divided(database: Database):
    job = make_job(database).id
    for attempt in (1, 2, 3):
        put(database, job, "loss", range(6), attempt)
    seen: list[tuple[int, int]] = []
    step: int | None = 0
    while step is not None:
        with database.read() as tx:
            page = metrics.page(
                tx, job, ["loss"], from_step=step, attempt_filter="all", max_values=4
            )
        seen += [(point.step, point.attempt) for point in page.series["loss"]]
        step = page.next_step
    assert seen == [(step, attempt) for step in range(6) for attempt in (1, 2, 3)]


def test_what_is_thinned_is_read_in_parts(database: Database, monkeypatch: pytest.MonkeyPatch):
    job = make_job(database).id
    put(database, job, "loss", range(500))
    with database.write() as tx:
        odd = update(Metric).where(Metric.job == job, Metric.step.in_([123, 250]))
        tx.execute(odd.values(value=None, nonfinite="Infinity"))
    with database.read() as tx:
        whole = metrics.query(tx, job, "loss", max_points=40)
    monkeypatch.setattr(metrics, "_AT_ONCE", 7)
    with database.read() as tx:
        parts = metrics.query(tx, job, "loss", max_points=40)
        all_ = metrics.query(tx, job, "loss", max_points=500)
    assert whole == parts
    assert len(whole) <= 40
    assert {0, 123, 250, 499} <= {point.step for point in whole}
    assert {point.value for point in whole if point.step in (123, 250)} == {float("inf")}
    assert len(all_) == 500


def test_plots_are_drawn_when_the_transaction_is_over(
    database: Database, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    """Drawing takes a second; a transaction that is open so long holds back vacuum and the WAL."""
    job = make_job(database)
    put(database, job.id, "loss", range(50))
    reader = database._reader  # pyright: ignore[reportPrivateUsage]
    pool: Any = reader.pool
    open_: list[int] = []
    lines = drawing.lines

    def drawn(*given: Any) -> bytes:
        open_.append(pool.checkedout())
        return lines(*given)

    monkeypatch.setattr(drawing, "lines", drawn)
    with database.write() as tx:
        total = {"num_values": 50, "low": 0.0, "high": 49.0, "last_step": 49, "number": 0}
        span = {"job": job.id, "name": "loss", "attempt": 1, "first_nonfinite_step": None}
        tx.execute(core(MetricSpan).insert(), [span | total])
    limits = quotas.defaults(Settings(home=tmp_path))
    caller = Caller("key_1", "test", "ada", frozenset({"read"}), "", limits)
    app_state: Any = SimpleNamespace(database=database)
    request = Request({"type": "http", "method": "GET", "path": "/", "headers": []})
    answer = plots.get_plot(
        request, app_state=app_state, caller=caller, job=job.id, plot="loss", format="svg"
    )
    assert b"<svg" in bytes(answer.body)
    assert open_ == [0]
