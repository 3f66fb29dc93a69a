"""Metric series: one value per name and step. A later attempt's values replace earlier ones."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from glasshouse import jsonio
from models.observations import lineage, rollups
from models.observations.lineage import AttemptFilter
from models.tables import Metric, core

MAX_VALUES = 100_000
"""Maximum values of one page."""
_AT_ONCE = 50_000


class Summary(NamedTuple):
    """Summary of one series. ``min`` and ``max`` ignore NaN and Inf."""

    name: str
    last: float
    last_step: int
    min: float | None
    max: float | None
    num_values: int
    first_nonfinite_step: int | None


class MetricPoint(NamedTuple):
    """One value."""

    step: int
    epoch: int
    value: float
    attempt: int = 1


def add(tx: Session, job: str, attempt: int, rows: Sequence[dict[str, Any]]) -> None:
    """Store rows of ``step, epoch, name, value``. If a step occurs twice, the later row wins."""
    if not rows:
        return
    stored = {
        (row["name"], row["step"]): {
            "job": job,
            "attempt": attempt,
            "step": row["step"],
            "epoch": row["epoch"],
            "name": row["name"],
            **_split(row["value"]),
        }
        for row in rows
    }
    tx.execute(_insert(tx.get_bind().dialect.name), [*stored.values()])
    rollups.add(tx, job, attempt, [*stored.values()])


@cache  # building it takes as long as executing it
def _insert(dialect: str) -> Any:
    query = (postgresql if dialect == "postgresql" else sqlite).insert(core(Metric))
    changed = {name: query.excluded[name] for name in ("epoch", "value", "nonfinite")}
    keys = [column.name for column in core(Metric).primary_key.columns]
    return query.on_conflict_do_update(index_elements=keys, set_=changed)


def names(tx: Session, job: str, attempt_filter: AttemptFilter = None) -> list[Summary]:
    """Summarize every series of a job, without reading all values of long ones."""
    seen = lineage.shown(tx, job, _M.attempt, _M.step, attempt_filter)
    found: list[Summary] = []
    for name, total in rollups.totals(tx, job, attempt_filter).items():
        num, low, high, nonfinite, step = total
        last = _rows(tx, [_M.job == job, _M.name == name, _M.step == step, *seen])
        if last:  # the purge deletes the values of a job in chunks, and its rollups first
            value = _value(*last[-1][2:4])
            found.append(Summary(name, value, step, low, high, num, nonfinite))
    return found


def newest(tx: Session, job: str, name: str) -> float | None:
    """Return the newest value of one series, of any attempt; None: there is none."""
    query = select(Metric.value).where(Metric.job == job, Metric.name == name)
    return tx.scalar(query.order_by(Metric.step.desc(), Metric.attempt.desc()).limit(1))


def query(  # noqa: PLR0913 (each is a parameter of the request)
    tx: Session,
    job: str,
    name: str,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    attempt_filter: AttemptFilter = None,
    max_points: int | None = None,
) -> list[MetricPoint]:
    """Return one series ordered by step. Both limits are inclusive.

    For steps that ran again, only the last attempt's values, unless ``attempt_filter`` selects
    others. At most ``max_points``: see ``models.observations.thinning.kept_places``. Then a long
    series is read in chunks and takes 32 bytes per value.
    """
    where = [*_wanted(tx, job, from_step, to_step, attempt_filter), _M.name == name]
    if max_points is None:
        return _points(_rows(tx, where))
    rows = _rows(tx, where, limit=max_points + 1)
    return _points(rows if len(rows) <= max_points else _thinned(tx, where, max_points))


class MetricPage(NamedTuple):
    """Steps of several series, each with all of its values at these steps."""

    series: dict[str, list[MetricPoint]]
    next_step: int | None
    """The first step of the next page; None on the last."""


def page(  # noqa: PLR0913 (each is a parameter of the request)
    tx: Session,
    job: str,
    names: Sequence[str],
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    attempt_filter: AttemptFilter = None,
    max_values: int = MAX_VALUES,
) -> MetricPage:
    """Return the next steps of several series, with at most about ``max_values`` values in total.

    Each series gets the same share. The page ends before the first step at which one of them would
    exceed its share.
    """
    share = max(1, max_values // len(names))
    found: dict[str, Sequence[Any]] = {}
    end: int | None = None
    for name in names:
        where = [*_wanted(tx, job, from_step, to_step, attempt_filter), _M.name == name]
        rows = found[name] = _rows(tx, where, limit=share + 1)
        if len(rows) > share:
            last = max(rows[-1][0], rows[0][0] + 1)  # at least one step, so that the pages end
            end = last if end is None else min(end, last)
    if end is not None:
        found = {name: [row for row in rows if row[0] < end] for name, rows in found.items()}
    return MetricPage({name: _points(rows) for name, rows in found.items()}, end)


_M = core(Metric).c


def _wanted(
    tx: Session, job: str, from_step: int | None, to_step: int | None, attempt_filter: AttemptFilter
) -> list[ColumnElement[bool]]:
    where = [_M.job == job, *lineage.shown(tx, job, _M.attempt, _M.step, attempt_filter)]
    if from_step is not None:
        where.append(_M.step >= from_step)
    if to_step is not None:
        where.append(_M.step <= to_step)
    return where


def _rows(
    tx: Session, where: Sequence[ColumnElement[bool]], limit: int | None = None
) -> Sequence[Any]:
    """Return the driver's tuples: creating a ``Row`` for each takes as long as reading it."""
    wanted = select(_M.step, _M.epoch, _M.value, _M.nonfinite, _M.attempt).where(*where)
    found: Any = tx.execute(wanted.order_by(_M.step, _M.attempt).limit(limit))
    rows = found.cursor.fetchall()
    found.close()
    return rows


def _points(rows: Sequence[Any]) -> list[MetricPoint]:
    return [MetricPoint(step, epoch, _value(value, odd), n) for step, epoch, value, odd, n in rows]


def _thinned(tx: Session, where: Sequence[ColumnElement[bool]], max_points: int) -> list[Any]:
    """Return the rows to keep of a long series, which is read in chunks."""
    import numpy as np  # noqa: PLC0415 (the worker never thins)

    from models.observations.thinning import kept_places  # noqa: PLC0415

    numbers: list[Any] = []
    values: list[Any] = []
    odd: dict[int, str | None] = {}
    num, part = 0, _rows(tx, where, limit=_AT_ONCE)
    while part:
        numbers.append(np.array([(row[0], row[1], row[4]) for row in part], np.int64))
        # None where the value is NaN or Inf; it becomes NaN
        values.append(np.array([row[2] for row in part], np.float64))
        odd |= {num + place: row[3] for place, row in enumerate(part) if row[2] is None}
        num += len(part)
        later = tuple_(_M.step, _M.attempt) > (part[-1][0], part[-1][4])
        part = _rows(tx, [*where, later], limit=_AT_ONCE)
    series = np.concatenate(values)
    places = kept_places([series], max_points)
    kept = np.concatenate(numbers)[places].tolist()
    return [
        (step, epoch, None if place in odd else series[place].item(), odd.get(place), attempt)
        for place, (step, epoch, attempt) in zip(places.tolist(), kept, strict=True)
    ]


def _value(value: float | None, odd: str | None) -> float:
    return jsonio.NONFINITE[odd or "NaN"] if value is None else value


def _split(value: Any) -> dict[str, Any]:
    number = jsonio.number(value)
    if math.isfinite(number):
        return {"value": float(number), "nonfinite": None}
    return {"value": None, "nonfinite": jsonio.named(float(number))}
