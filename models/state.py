"""The states of a job and the transitions between them. No SQL."""

from typing import Literal, get_args

State = Literal[
    "queued",
    "starting",
    "running",
    "pausing",
    "paused",
    "cancelling",
    "succeeded",
    "failed",
    "cancelled",
]
STATES: tuple[State, ...] = get_args(State)
ENDED = frozenset({"succeeded", "failed", "cancelled"})
OPEN = frozenset(STATES) - ENDED
LIVE = frozenset({"starting", "running", "pausing", "cancelling"})
"""An attempt holds devices. A paused job has not ended and holds no devices."""

MOVES: dict[str, frozenset[str]] = {
    "queued": frozenset({"starting", "paused", "cancelled"}),
    "starting": frozenset({"running", "pausing", "cancelling", "failed", "queued"}),
    "running": frozenset({"succeeded", "failed", "pausing", "paused", "cancelling", "queued"}),
    "pausing": frozenset({"paused", "succeeded", "failed", "cancelling"}),
    "paused": frozenset({"queued", "cancelled"}),
    "cancelling": frozenset({"cancelled", "succeeded", "failed"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}


def sources(target: str) -> tuple[str, ...]:
    """Return the states from which a job may move to this one."""
    return tuple(state for state in STATES if target in MOVES[state])
