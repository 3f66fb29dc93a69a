"""Early stop of a training: lower the limit of its spec to a value just ahead of its progress."""

from collections.abc import Mapping
from typing import Any


class StopLimit:
    """The limit in ``stop`` of a spec, and the margin by which it must exceed known progress."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        stop: Mapping[str, Any] = spec["stop"]
        self._unit = next(unit for unit in ("epochs", "steps", "seconds") if stop.get(unit))
        self._limit = stop[self._unit]
        self._ahead = 1
        self._sent_at = 0

    @property
    def path(self) -> str:
        """The path of the setting."""
        return f"stop.{self._unit}"

    def soonest(self, progress: Mapping[str, Any]) -> float:
        """The lowest limit that the job has not passed, according to its last known progress."""
        self._sent_at = progress.get("step") or 0
        if self._unit == "steps":
            return min(self._limit, self._sent_at + self._ahead)
        if self._unit == "epochs":
            return min(self._limit, (progress.get("epoch") or 0) + self._ahead)
        left_s = progress.get("eta_s")
        done_s = 0 if left_s is None else max(0.0, self._limit - left_s)
        return min(self._limit, done_s + self._ahead)

    def widen(self, step: int | None) -> None:
        """Increase the margin to twice the progress since the last command was sent."""
        steps = 0 if step is None else 2 * max(0, step - self._sent_at)
        self._ahead = max(2 * self._ahead, steps if self._unit == "steps" else 0)
