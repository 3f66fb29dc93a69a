"""Save the state of probes with a checkpoint and restore it.

Widened intervals stay wide: a resumed job watches the steps that it would have watched without the
interruption. The cost of watching is measured again.
"""

from collections.abc import Sequence
from typing import Any

from engine.core.snapshot import State
from engine.probes.flight_recorder import FlightRecorder, Key
from engine.probes.watched.probe import ActiveProbe


def state(watches: Sequence[ActiveProbe], off: Sequence[str], num_evaluations: int) -> State:
    """Return the state of these probes, by number or id."""
    found = {str(watch.number): _of(watch) for watch in watches}
    return {"evaluations": num_evaluations, "watches": found, "off": [*off]}


def _of(watch: ActiveProbe) -> dict[str, Any]:
    asked = watch.probe.model_dump(mode="json")
    found: dict[str, Any] = {"probe": asked, "factor": watch.factor}
    found["failures"] = watch.num_failures
    if isinstance(watch, FlightRecorder):
        found["recorder"] = watch.state()
    return found


def restore(saved: State, watches: Sequence[ActiveProbe]) -> None:
    """Restore the saved state to the probes that have not changed."""
    told: dict[int, set[Key]] = {}
    for watch in watches:
        entry = saved["watches"].get(str(watch.number))
        if entry is None or entry["probe"] != watch.probe.model_dump(mode="json"):
            continue
        watch.factor = int(entry["factor"])
        watch.num_failures = int(entry["failures"])
        if isinstance(watch, FlightRecorder):
            watch.restore(entry["recorder"], told)
