"""The states of a job and the moves between them. Pure; no SQL."""

STATES = (
    "queued",
    "starting",
    "running",
    "cancelling",
    "succeeded",
    "failed",
    "cancelled",
)
ENDED = frozenset({"succeeded", "failed", "cancelled"})
LIVE = frozenset({"starting", "running", "cancelling"})
"""An attempt holds devices."""

MOVES: dict[str, frozenset[str]] = {
    "queued": frozenset({"starting", "cancelled"}),
    "starting": frozenset({"running", "cancelling", "failed", "queued"}),
    "running": frozenset({"succeeded", "failed", "cancelling", "queued"}),
    "cancelling": frozenset({"cancelled", "succeeded", "failed"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}


def sources(target: str) -> tuple[str, ...]:
    """The states from which a job may move to this one."""
    return tuple(state for state in STATES if target in MOVES[state])
