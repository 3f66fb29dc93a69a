"""What probes remember of the steps before: it is saved and comes back with a checkpoint.

Intervals that the governor widened stay wide, so that a job that goes on looks at the steps that it
would have looked at, and does not have to find out anew. What looking costs is measured again.
"""

from collections.abc import Sequence
from typing import Any

from engine.core.snapshot import State
from engine.probes.flight_recorder import FlightRecorder, Key
from engine.probes.watched.probe import ActiveProbe


def state(watches: Sequence[ActiveProbe], off: Sequence[str], num_evaluations: int) -> State:
    """What these remember, by their numbers or ids."""
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
    """Give back what was remembered to those that are as they were."""
    told: dict[int, set[Key]] = {}
    for watch in watches:
        entry = saved["watches"].get(str(watch.number))
        if entry is None or entry["probe"] != watch.probe.model_dump(mode="json"):
            continue
        watch.factor = int(entry["factor"])
        watch.num_failures = int(entry["failures"])
        if isinstance(watch, FlightRecorder):
            watch.restore(entry["recorder"], told)
