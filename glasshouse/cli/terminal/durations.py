"""Ages and durations, and the best metric of a job."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from glasshouse import jsonio
from glasshouse.cli.terminal.output import figure
from glasshouse.metric_direction import direction_of, sources_of


def age(created_at: str, now: datetime | None = None) -> str:
    """The age of a time: ``40 s``, ``3 min``, ``5 h``, ``12 d``."""
    return short(_seconds(created_at, now))


def lasted(job: Mapping[str, Any], now: datetime | None = None) -> str | None:
    """The duration of a job without pauses; None if it has not started."""
    if not job.get("started_at"):
        return None
    until = job.get("ended_at") or job.get("paused_at")
    end = None if until is None else datetime.fromisoformat(until)
    paused = float(job.get("paused_s") or 0)
    return short(max(0.0, _seconds(job["started_at"], end or now) - paused))


def short(seconds: float) -> str:
    """A duration in its largest unit."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size or (unit == "min" and seconds >= 100):
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def best(summary: Mapping[str, Any]) -> str | None:
    """The best value of the first validation metric, else the lowest validation loss.

    The same as in the job list of the dashboard. Without evaluations: the lowest training loss.
    """
    judged = [name for name in summary if name.startswith("validation/")]
    sources = sources_of(judged)
    losses = {"validation/loss", *(f"validation/{source}/loss" for source in sources)}
    name = next((one for one in judged if one not in losses), None)
    if name is not None:
        reached = summary[name].get(direction_of(name, sources) or "max")
        return f"{name.removeprefix('validation/')} {figure(reached)}"
    name = judged[0] if judged else "loss"
    value = jsonio.number(summary.get(name, {}).get("min"))
    return None if value is None else f"{name} {figure(value)}"


def _seconds(since: str, until: datetime | None) -> float:
    return ((until or datetime.now(UTC)) - datetime.fromisoformat(since)).total_seconds()
