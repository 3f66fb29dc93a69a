"""Metric series: one value per name and step; a later attempt's values replace a lost one's."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from glasshouse import jsonio
from models import lineage, spans
from models.lineage import Asked
from models.tables import Metric, core


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
    attempt: int = 1


def add(tx: Session, job: str, attempt: int, rows: Sequence[dict[str, Any]]) -> None:
    """Store rows of ``step, epoch, name, value``; of two for one step the later stays."""
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
    spans.add(tx, job, attempt, [*stored.values()])


@cache  # making it takes as long as what it does
def _insert(dialect: str) -> Any:
    query = (postgresql if dialect == "postgresql" else sqlite).insert(core(Metric))
    changed = {name: query.excluded[name] for name in ("epoch", "value", "nonfinite")}
    keys = [column.name for column in core(Metric).primary_key.columns]
    return query.on_conflict_do_update(index_elements=keys, set_=changed)


def names(tx: Session, job: str, asked: Asked = None) -> list[Summary]:
    """Every series of a job; of a long one it does not read the values."""
    seen = lineage.shown(tx, job, _M.attempt, _M.step, asked)
    found: list[Summary] = []
    for name, total in spans.totals(tx, job, asked).items():
        num, low, high, nonfinite, step = total
        last = _rows(tx, [_M.job == job, _M.name == name, _M.step == step, *seen])[-1]
        found.append(Summary(name, _value(last[2], last[3]), step, low, high, num, nonfinite))
    return found


def query(  # noqa: PLR0913 (each is a parameter of the request)
    tx: Session,
    job: str,
    name: str,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    asked: Asked = None,
    max_points: int | None = None,
) -> list[Point]:
    """One series in the order of its steps; both ends are included.

    Of steps that were run again the last attempt's values, unless ``asked`` says otherwise. At most
    about ``max_points``: first, last, each bucket's least and greatest kept; every non-finite run
    keeps its first and last point, whatever the limit.
    """
    where = [_M.job == job, _M.name == name]
    where += lineage.shown(tx, job, _M.attempt, _M.step, asked)
    if from_step is not None:
        where.append(_M.step >= from_step)
    if to_step is not None:
        where.append(_M.step <= to_step)
    rows = _rows(tx, where)
    if max_points is not None and len(rows) > max_points:
        rows = _thinned(rows, max_points)
    return [Point(step, epoch, _value(value, odd), n) for step, epoch, value, odd, n in rows]


_M = core(Metric).c


def _rows(tx: Session, where: Sequence[ColumnElement[bool]]) -> Sequence[Any]:
    """As the driver's tuples: a ``Row`` for each of a million would take as long as reading it."""
    wanted = select(_M.step, _M.epoch, _M.value, _M.nonfinite, _M.attempt).where(*where)
    found: Any = tx.execute(wanted.order_by(_M.step, _M.attempt))
    rows = found.cursor.fetchall()
    found.close()
    return rows


def _thinned(rows: Sequence[Any], max_points: int) -> list[Any]:
    import numpy as np  # noqa: PLC0415 (the worker, which never thins, does without)

    from models.thinning import kept_places  # noqa: PLC0415

    values = np.array([row[2] for row in rows], np.float64)  # of what is not finite None, so NaN
    return [rows[place] for place in kept_places([values], max_points)]


def _value(value: float | None, odd: str | None) -> float:
    return jsonio.NONFINITE[odd or "NaN"] if value is None else value


def _split(value: Any) -> dict[str, Any]:
    number = jsonio.number(value)
    if math.isfinite(number):
        return {"value": float(number), "nonfinite": None}
    return {"value": None, "nonfinite": jsonio.named(float(number))}
