"""Decide which rows of a job count after it was restarted. Only this module knows the rule.

An attempt that resumes at step s runs s first. Rows of earlier attempts before s stay visible;
those from s on are hidden. So readers see the record of one uninterrupted run. A job that never
restarted has no cuts, and its queries have no additional condition.
"""

from itertools import pairwise
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, and_, case, func, not_, or_, select
from sqlalchemy.orm import Session

from glasshouse import jsonio
from glasshouse.events import UPKEEP
from models.tables import Attempt, Metric

AttemptFilter = int | Literal["all"] | None
"""Which rows to read: None: those that count; ``all``; or those of one attempt."""


class Superseded(NamedTuple):
    """From this attempt and this step on, earlier rows are hidden."""

    attempt: int
    step: int


def cuts(tx: Session, job: str) -> list[Superseded]:
    """Return every restarted attempt with its first step; empty for a job with one attempt."""
    query = (
        select(Attempt.n, Attempt.resumed_from_step)
        .where(Attempt.job == job, Attempt.n > 1, Attempt.resumed_from_step.is_not(None))
        .order_by(Attempt.n)
    )
    return [Superseded(n, step or 0) for n, step in tx.execute(query)]


def steps_of(found: list[Superseded]) -> list[Superseded]:
    """Return only the cuts that hide something: both their attempts and their steps ascend."""
    kept: list[Superseded] = []
    for cut in reversed(found):
        if not kept or cut.step < kept[-1].step:
            kept.append(cut)
    return kept[::-1]


def condition(
    found: list[Superseded], attempt: ColumnElement[Any] | Any, step: ColumnElement[Any] | Any
) -> list[ColumnElement[bool]]:
    """Return the condition for a query's ``where``; empty if nothing is hidden.

    A row without a step is always visible.
    """
    stairs = steps_of(found)
    if not stairs:
        return []
    parts = [step.is_(None), step < stairs[0].step, attempt >= stairs[-1].attempt]
    parts += [and_(attempt >= one.attempt, step < two.step) for one, two in pairwise(stairs)]
    return [or_(*parts)]


def shown(
    tx: Session,
    job: str,
    attempt: ColumnElement[Any] | Any,
    step: ColumnElement[Any] | Any,
    attempt_filter: AttemptFilter = None,
) -> list[ColumnElement[bool]]:
    """Return the condition for visible rows of a job, according to ``attempt_filter``."""
    if attempt_filter == "all":
        return []
    if attempt_filter is not None:
        return [attempt == attempt_filter]
    return condition(cuts(tx, job), attempt, step)


def limits(tx: Session, job: str) -> dict[int, float]:
    """Return the last visible step of each attempt; infinity if all steps are visible."""
    query = select(Attempt.n, Attempt.resumed_from_step).where(Attempt.job == job)
    found: dict[int, float] = {}
    limit = float("inf")
    for n, resumed in tx.execute(query.order_by(Attempt.n.desc())):
        found[n] = limit
        if n > 1 and resumed is not None:
            limit = min(limit, resumed - 1)
    return found


def summary_before(tx: Session, job: str, step: int) -> dict[str, dict[str, Any]]:
    """Return the job's ``summary`` as of ``step`` updates, computed from the series."""
    if step <= 0:
        return {}
    mine = [
        Metric.job == job,
        Metric.step < step,
        not_(or_(*(Metric.name.startswith(prefix, autoescape=True) for prefix in UPKEEP))),
        *shown(tx, job, Metric.attempt, Metric.step),
    ]
    totals = (
        select(
            Metric.name.label("name"),
            func.min(Metric.value).label("low"),
            func.max(Metric.value).label("high"),
            func.max(Metric.step).label("last"),
            func.min(case((Metric.nonfinite.is_not(None), Metric.step))).label("bad"),
        )
        .where(*mine)
        .group_by(Metric.name)
        .cte("totals")
    )

    def first_where(value: Any) -> dict[str, int]:
        """Return the first step with this value, by name."""
        here = (Metric.name == totals.c.name, Metric.value == value)
        query = select(Metric.name, func.min(Metric.step)).where(*mine, *here)
        return {row[0]: row[1] for row in tx.execute(query.group_by(Metric.name))}

    lows, highs = first_where(totals.c.low), first_where(totals.c.high)
    newest = select(
        Metric.name, Metric.value, Metric.nonfinite, totals.c.low, totals.c.high, totals.c.bad
    ).where(*mine, Metric.name == totals.c.name, Metric.step == totals.c.last)
    found: dict[str, dict[str, Any]] = {}
    for name, value, nonfinite, low, high, bad in tx.execute(newest.order_by(Metric.name)):
        last = jsonio.NONFINITE[nonfinite or "NaN"] if value is None else value
        found[name] = {"last": last}
        if low is not None:
            found[name] |= {"min": low, "min_step": lows[name]}
            found[name] |= {"max": high, "max_step": highs[name]}
        if bad is not None:
            found[name]["first_nonfinite_step"] = bad
    return found
