"""Finds, from a job's records, where its first NaN or Inf was. Pure."""

import math
from typing import Any

from glasshouse import jsonio
from glasshouse.errors import NonFinite
from glasshouse.events import STATS_COLUMNS

_NAN, _INF = STATS_COLUMNS.index("nan"), STATS_COLUMNS.index("inf")
_FORWARD = ("input", "output")
_BY_NUMBERS = frozenset({"spec", "internal"})
"""Categories of failures that NaN or Inf may have caused. ``data`` is not among them: the same
rows may have caused both the failure and the NaN or Inf loss before it."""


class Nonfinite:
    """Follows the metrics, the statistics and the findings of one attempt."""

    def __init__(self) -> None:
        self._metric: tuple[int, str] | None = None
        self._tensor: dict[str, Any] | None = None
        self.is_bad_now = False
        """Whether the newest loss is NaN or Inf."""
        self.advice: str | None = None
        """The most likely cause that a guard has found, and what to do about it."""

    def on_metric(self, step: int, name: str, value: float) -> None:
        """Take one value of one metric."""
        is_bad = not math.isfinite(value)
        if name == "loss":
            self.is_bad_now = is_bad
        if is_bad and self._metric is None:
            self._metric = (step, name)

    def on_stats(self, record: dict[str, Any]) -> None:
        """Take a record of statistics: a row for each watched tensor of one step."""
        bad = [row for row in record["rows"] if _is_bad(row)]
        if bad:
            # the first one of the forward pass, if there is any
            layer, kind, *_ = min(bad, key=lambda row: row[1] not in _FORWARD)
            phase = "forward" if kind in _FORWARD else "backward"
            self._keep_first(record, {"layer": layer, "kind": kind, "phase": phase})

    def on_finding(self, record: dict[str, Any]) -> None:
        """Take a guard's finding about a step."""
        self.advice = self.advice or next(iter(record["causes"]), None)
        if record["layer"] is not None and any(map(_is_bad, record["tensors"]["rows"][-1:])):
            where = {"layer": record["tensor"], "kind": record["kind"], "phase": record["phase"]}
            self._keep_first(record, where)

    def _keep_first(self, record: dict[str, Any], where: dict[str, Any]) -> None:
        step = int(record["step"])
        if self._tensor is None or step < self._tensor["step"]:
            self._tensor = {"step": step, **where}

    def first(self) -> dict[str, Any]:
        """Return the first NaN or Inf: step and metric; layer, kind and phase if known.

        A tensor is named if statistics show NaN or Inf in it at or before the first bad metric.
        """
        step, name = self._metric or (-1, "loss")
        if self._tensor is not None and self._tensor["step"] <= step:
            return self._tensor | {"metric": name}
        return {"step": step, "layer": None, "kind": None, "phase": None, "metric": name}

    def summary(self) -> str:
        """Return the same as a sentence."""
        first = self.first()
        if first["layer"] is None:
            return f"{first['metric']} was not finite from step {first['step']} on."
        where = f"{first['kind']} of {first['layer']}, in the {first['phase']}"
        where += "" if first["phase"] == "update" else " pass"
        return f"The first numbers that were not finite: the {where} of step {first['step']}."

    def explain(self, error: dict[str, Any]) -> dict[str, Any]:
        """Return a job's error, with the first NaN or Inf if that may have caused the failure."""
        if not self.is_bad_now or error.get("category") not in _BY_NUMBERS:
            return error
        first = self.first()
        text = f"{self.summary()} Then it failed: {error['message']}"
        where = {
            "rank": error.get("rank"),
            "layer": first.get("layer") or error.get("layer"),
            "step": first["step"],
        }
        return {**NonFinite(text, found=first, hint=self.advice).as_dict(), **where}


def _is_bad(row: list[Any]) -> bool:
    """Return whether the statistics of a tensor count NaN or Inf."""
    return bool(jsonio.number(row[_NAN]) or jsonio.number(row[_INF]))
