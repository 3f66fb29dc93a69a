"""The error of a failed job, with all that its worker knows beside what the rank said."""

from typing import Any

from glasshouse.errors import NonFinite
from models.tables import Job
from worker import memory
from worker.nonfinite import Nonfinite
from worker.storing import Store

_BY_NUMBERS = frozenset({"spec", "data", "internal"})
"""Failures that numbers which are not finite may have caused."""


def explain(error: dict[str, Any], job: Job, store: Store) -> dict[str, Any]:
    """Add the plan to an error of memory, the first bad numbers to one by them, and the log."""
    told = memory.beside_plan(error, job.plan)
    if error.get("category") in _BY_NUMBERS and store.nonfinite.is_bad_now:
        told = by_nonfinite(told, store.nonfinite)
    return {"log_tail": store.log_tail(), **told}


def by_nonfinite(error: dict[str, Any], found: Nonfinite) -> dict[str, Any]:
    """The error of a job whose loss was not finite any more when it failed."""
    failure = NonFinite(f"{found.told()} Then it failed: {error['message']}")
    first = found.first()
    where = {
        "rank": error.get("rank"),
        "layer": first.get("layer") or error.get("layer"),
        "step": first["step"],
    }
    return {**failure.as_dict(), **where, "nonfinite": first}
