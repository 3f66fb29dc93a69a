"""How a training is told to end well: by its own limit, set to the soonest that lies ahead."""

from collections.abc import Mapping
from typing import Any


class StopLimit:
    """The limit that a spec has, and how far ahead of the last news it must be set."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        stop: Mapping[str, Any] = spec["stop"]
        self._unit = next(unit for unit in ("epochs", "steps", "seconds") if stop.get(unit))
        self._limit = stop[self._unit]
        self._ahead = 1
        self._sent_at = 0

    @property
    def path(self) -> str:
        """The setting."""
        return f"stop.{self._unit}"

    def soonest(self, progress: Mapping[str, Any]) -> float:
        """The least that is surely not done yet, going by what is known of its progress."""
        self._sent_at = progress.get("step") or 0
        if self._unit == "steps":
            return min(self._limit, self._sent_at + self._ahead)
        if self._unit == "epochs":
            return min(self._limit, (progress.get("epoch") or 0) + self._ahead)
        left_s = progress.get("eta_s")
        done_s = 0 if left_s is None else max(0.0, self._limit - left_s)
        return min(self._limit, done_s + self._ahead)

    def widen(self, step: int | None) -> None:
        """Look further ahead: twice as far as it came until the last word was there."""
        steps = 0 if step is None else 2 * max(0, step - self._sent_at)
        self._ahead = max(2 * self._ahead, steps if self._unit == "steps" else 0)
