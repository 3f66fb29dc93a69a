"""Rollups of long metric series, so that a summary does not read all values.

There is one row per series, attempt and range of ``LENGTH`` steps, written in the transaction that
stores the values. When steps run again, rollups of earlier attempts that are fully hidden are
skipped, and the range with the cut is recounted from its visible values. So a summary of a million
values reads a thousand rows, and nothing has to be repaired when a job restarts.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, bindparam, case, func, not_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from models.observations import lineage
from models.observations.lineage import AttemptFilter
from models.tables import Metric, MetricSpan, core

LENGTH = 1000


class Rollup(NamedTuple):
    """Totals of one series. ``low`` and ``high`` ignore NaN and Inf."""

    num_values: int
    low: float | None
    high: float | None
    first_nonfinite_step: int | None
    last_step: int


Key = tuple[str, int]
"""A series and the number of a rollup."""
_M, _S = core(Metric).c, core(MetricSpan).c


def add(tx: Session, job: str, attempt: int, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows of metrics that were just stored. Each step occurs once per series."""
    groups = _grouped(rows)
    new = [_as_row(job, attempt, key, _total(group)) for key, group in groups.items()]
    first = [{"first_step": min(row["step"] for row in group)} for group in groups.values()]
    given = [row | step for row, step in zip(new, first, strict=True)]
    dialect = tx.get_bind().dialect.name
    found: Any = tx.execute(_insert(dialect, grows=True), given)
    if found.rowcount < len(given):  # a value replaced an existing one
        again = [_as_row(job, attempt, key, _counted(tx, job, attempt, key)) for key in groups]
        tx.execute(_insert(dialect, grows=False), again)


def totals(tx: Session, job: str, attempt_filter: AttemptFilter = None) -> dict[str, Rollup]:
    """Return the totals of the visible values of each series, by name."""
    whole = lineage.shown(tx, job, _S.attempt, _S.last_step, attempt_filter)
    parts: dict[str, list[Rollup]] = {}
    query = select(_S.name, *_totals_of_spans()).where(_S.job == job, *whole).group_by(_S.name)
    found: Iterable[Any] = tx.execute(query)
    if whole and attempt_filter is None:
        found = [*found, *_cut(tx, job, whole)]
    for name, *total in found:
        parts.setdefault(name, []).append(Rollup(*total))
    return {name: merged(parts[name]) for name in sorted(parts)}


def merged(totals: Sequence[Rollup]) -> Rollup:
    """Merge several totals."""

    def least(values: Iterable[Any], which: Any = min) -> Any:
        return which((value for value in values if value is not None), default=None)

    return Rollup(
        sum(one.num_values for one in totals),
        least(one.low for one in totals),
        least((one.high for one in totals), max),
        least(one.first_nonfinite_step for one in totals),
        max(one.last_step for one in totals),
    )


def _cut(tx: Session, job: str, whole: list[ColumnElement[bool]]) -> Sequence[Any]:
    """Return totals of the visible values in ranges that are partly hidden."""
    begins = lineage.shown(tx, job, _S.attempt, _S.number * LENGTH)
    inside = and_(
        _M.job == _S.job,
        _M.name == _S.name,
        _M.attempt == _S.attempt,
        _M.step.between(_S.number * LENGTH, _S.last_step),
    )
    return tx.execute(
        select(_M.name, *_totals_of_values())
        .select_from(core(MetricSpan).join(core(Metric), inside))
        .where(_S.job == job, *begins, not_(and_(*whole)))
        .where(*lineage.shown(tx, job, _M.attempt, _M.step))
        .group_by(_M.name)
    ).all()


def _counted(tx: Session, job: str, attempt: int, key: Key) -> Rollup:
    name, number = key
    within = _M.step.between(number * LENGTH, (number + 1) * LENGTH - 1)
    mine = (_M.job == job, _M.name == name, _M.attempt == attempt, within)
    return Rollup(*tx.execute(select(*_totals_of_values()).where(*mine)).one())


def _totals_of_values() -> list[Any]:
    """Return the columns of a total, computed from values."""
    odd = func.min(case((_M.nonfinite.is_not(None), _M.step)))
    return [func.count(), func.min(_M.value), func.max(_M.value), odd, func.max(_M.step)]


def _totals_of_spans() -> list[Any]:
    """Return the columns of a total, computed from rollups."""
    odd, last = func.min(_S.first_nonfinite_step), func.max(_S.last_step)
    return [func.sum(_S.num_values), func.min(_S.low), func.max(_S.high), odd, last]


def _grouped(rows: Sequence[dict[str, Any]]) -> dict[Key, list[dict[str, Any]]]:
    groups: dict[Key, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["step"] // LENGTH), []).append(row)
    return groups


def _total(rows: Sequence[dict[str, Any]]) -> Rollup:
    finite = [row["value"] for row in rows if row["value"] is not None]
    odd = [row["step"] for row in rows if row["value"] is None]
    return Rollup(
        len(rows),
        min(finite, default=None),
        max(finite, default=None),
        min(odd, default=None),
        max(row["step"] for row in rows),
    )


def _as_row(job: str, attempt: int, key: Key, total: Rollup) -> dict[str, Any]:
    name, number = key
    return {"job": job, "attempt": attempt, "name": name, "number": number, **total._asdict()}


@cache  # building one takes as long as executing it
def _insert(dialect: str, *, grows: bool) -> Any:
    """Return a statement that inserts rollups, and adds them to existing ones or replaces those."""
    query = (postgresql if dialect == "postgresql" else sqlite).insert(core(MetricSpan))
    keys = [column.name for column in core(MetricSpan).primary_key.columns]
    changed = _merged(query.excluded) if grows else _replaced(query.excluded)
    where = _S.last_step < bindparam("first_step") if grows else None
    return query.on_conflict_do_update(index_elements=keys, set_=changed, where=where)


def _replaced(new: Any) -> dict[str, Any]:
    return {name: new[name] for name in Rollup._fields}


def _merged(new: Any) -> dict[str, Any]:
    """Return a rollup plus later values.

    Either may have no finite value; then the other's applies.
    """
    return {
        "num_values": _S.num_values + new.num_values,
        "low": case((_S.low <= new.low, _S.low), else_=func.coalesce(new.low, _S.low)),
        "high": case((_S.high >= new.high, _S.high), else_=func.coalesce(new.high, _S.high)),
        "first_nonfinite_step": func.coalesce(_S.first_nonfinite_step, new.first_nonfinite_step),
        "last_step": new.last_step,
    }
