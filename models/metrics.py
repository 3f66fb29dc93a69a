"""Metric series: one value per name and step; a later attempt's values replace a lost one's."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, case, func, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from glasshouse import jsonio
from models.tables import Attempt, Metric, core


class Summary(NamedTuple):
    """One series at a glance. ``min`` and ``max`` are over the finite values."""

    name: str
    last: float
    last_step: int
    min: float | None
    max: float | None
    num_values: int
    first_nonfinite_step: int | None


class Point(NamedTuple):
    """One value."""

    step: int
    epoch: int
    value: float


def add(tx: Session, job: str, attempt: int, rows: Sequence[dict[str, Any]]) -> None:
    """Store rows of ``step, epoch, name, value``; of two for one step the later stays."""
    if not rows:
        return
    insert = postgresql.insert if tx.get_bind().dialect.name == "postgresql" else sqlite.insert
    query = insert(core(Metric))
    changed = {name: query.excluded[name] for name in ("epoch", "value", "nonfinite")}
    query = query.on_conflict_do_update(
        index_elements=["job", "name", "step", "attempt"], set_=changed
    )
    stored = [
        {
            "job": job,
            "attempt": attempt,
            "step": row["step"],
            "epoch": row["epoch"],
            "name": row["name"],
            **_split(row["value"]),
        }
        for row in rows
    ]
    tx.execute(query, stored)


def names(tx: Session, job: str) -> list[Summary]:
    """Every series of a job."""
    seen = visible(tx, job, Metric.attempt, Metric.step)
    totals = (
        select(
            Metric.name,
            func.min(Metric.value),
            func.max(Metric.value),
            func.count(),
            func.min(case((Metric.nonfinite.is_not(None), Metric.step))),
            func.max(Metric.step),
        )
        .where(Metric.job == job, seen)
        .group_by(Metric.name)
        .order_by(Metric.name)
    )
    found: list[Summary] = []
    for name, low, high, count, nonfinite, step in tx.execute(totals):
        last = query(tx, job, name, from_step=step)[-1]
        found.append(Summary(name, last.value, step, low, high, count, nonfinite))
    return found


def query(
    tx: Session, job: str, name: str, *, from_step: int | None = None, to_step: int | None = None
) -> list[Point]:
    """One series in the order of its steps; both ends are included."""
    wanted = select(Metric.step, Metric.epoch, Metric.value, Metric.nonfinite).where(
        Metric.job == job, Metric.name == name, visible(tx, job, Metric.attempt, Metric.step)
    )
    if from_step is not None:
        wanted = wanted.where(Metric.step >= from_step)
    if to_step is not None:
        wanted = wanted.where(Metric.step <= to_step)
    return [
        Point(step, epoch, jsonio.NONFINITE[nonfinite or "NaN"] if value is None else value)
        for step, epoch, value, nonfinite in tx.execute(wanted.order_by(Metric.step))
    ]


def visible(
    tx: Session, job: str, attempt: ColumnElement[int] | Any, step: ColumnElement[int] | Any
) -> ColumnElement[bool]:
    """The rule that makes the series that of one uninterrupted run.

    An attempt that resumed after step s hides every earlier attempt's values with step > s.
    """
    rows = tx.execute(
        select(Attempt.n, Attempt.resumed_from_step).where(Attempt.job == job).order_by(Attempt.n)
    ).all()
    clauses: list[ColumnElement[bool]] = []
    limit: int | None = None
    for n, resumed in reversed(rows):
        own = attempt == n if limit is None else and_(attempt == n, step <= limit)
        clauses.append(own)
        floor = -1 if resumed is None else resumed
        limit = floor if limit is None else min(limit, floor)
    return or_(*clauses) if clauses else attempt == 0


def thin(points: Sequence[Point], max_points: int) -> list[Point]:
    """At most about ``max_points`` points: first, last, each bucket's least and greatest kept.

    Every non-finite run keeps its first and last point, whatever the limit.
    """
    import numpy as np  # noqa: PLC0415 (the worker, which never thins, does without)

    from models.thinning import kept_places  # noqa: PLC0415

    values = np.array([point.value for point in points], np.float64)
    return [points[place] for place in kept_places([values], max_points)]


def _split(value: Any) -> dict[str, Any]:
    number = jsonio.number(value)
    if math.isfinite(number):
        return {"value": float(number), "nonfinite": None}
    return {"value": None, "nonfinite": jsonio.named(float(number))}
