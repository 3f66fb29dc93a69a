"""What probes remember of the steps before: it is saved and comes back with a checkpoint.

Intervals that the governor widened stay wide, so that a job that goes on looks at the steps that it
would have looked at, and does not have to find out anew. What looking costs is measured again.
"""

from collections.abc import Sequence
from typing import Any

from engine.probes.recorder import Key, Recorder
from engine.probes.watch import Watch
from engine.snapshot import State


def state(watches: Sequence[Watch], num_evaluations: int) -> State:
    """What these remember, by their numbers or ids."""
    found = {str(watch.number): _of(watch) for watch in watches}
    return {"evaluations": num_evaluations, "watches": found}


def _of(watch: Watch) -> dict[str, Any]:
    asked = watch.probe.model_dump(mode="json")
    found: dict[str, Any] = {"probe": asked, "factor": watch.factor}
    found["failures"] = watch.num_failures
    if isinstance(watch, Recorder):
        found["recorder"] = watch.state()
    return found


def restore(saved: State, watches: Sequence[Watch], *, has_ids: bool) -> list[Watch]:
    """Give back what was remembered; returns those that look on.

    Without ids the watches are those of the spec, and one that is not in the state was off.
    """
    left: list[Watch] = []
    told: dict[int, set[Key]] = {}
    for watch in watches:
        entry = saved["watches"].get(str(watch.number))
        if entry is None:
            left += [watch] if has_ids else []
            continue
        left.append(watch)
        if entry["probe"] != watch.probe.model_dump(mode="json"):
            continue
        watch.factor = int(entry["factor"])
        watch.num_failures = int(entry["failures"])
        if isinstance(watch, Recorder):
            watch.restore(entry["recorder"], told)
    return left
