"""The error of a failed job, with all that its worker knows beside what the rank said."""

from typing import Any

from glasshouse.errors import NonFinite
from models.tables import Job
from worker import memory
from worker.nonfinite import Nonfinite
from worker.storing import Store

_BY_NUMBERS = frozenset({"spec", "internal"})
"""Failures that numbers which are not finite may have caused. What the data has is none of them:
the loss that was not finite before it may well come of the same rows."""


def explain(error: dict[str, Any], job: Job, store: Store) -> dict[str, Any]:
    """Add the plan to an error of memory, the first bad numbers to one by them, and the log."""
    told = memory.beside_plan(error, job.plan)
    if may_be_by_numbers(error) and store.nonfinite.is_bad_now:
        told = by_nonfinite(told, store.nonfinite)
    return {"log_tail": store.log_tail(), **told}


def may_be_by_numbers(error: dict[str, Any]) -> bool:
    """Whether numbers that are not finite may have caused this failure."""
    return error.get("category") in _BY_NUMBERS


def by_nonfinite(error: dict[str, Any], found: Nonfinite) -> dict[str, Any]:
    """The error of a job whose loss was not finite any more when it failed."""
    first = found.first()
    text = f"{found.told()} Then it failed: {error['message']}"
    failure = NonFinite(text, found=first, hint=found.advice)
    where = {
        "rank": error.get("rank"),
        "layer": first.get("layer") or error.get("layer"),
        "step": first["step"],
    }
    return {**failure.as_dict(), **where}
