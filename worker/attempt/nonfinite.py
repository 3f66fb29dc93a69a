"""Where the numbers of a job first were not finite, as far as what it said tells. Pure."""

import math
from typing import Any

from glasshouse import jsonio
from glasshouse.errors import NonFinite
from glasshouse.events import STATS_COLUMNS

_NAN, _INF = STATS_COLUMNS.index("nan"), STATS_COLUMNS.index("inf")
_FORWARD = ("input", "output")
_BY_NUMBERS = frozenset({"spec", "internal"})
"""Categories of failures that NaN or Inf may have caused. ``data`` is not among them: the same
rows may have caused both the failure and the loss that was not finite before it."""


class Nonfinite:
    """Listens to the metrics, the statistics and the findings of one attempt."""

    def __init__(self) -> None:
        self._metric: tuple[int, str] | None = None
        self._tensor: dict[str, Any] | None = None
        self.is_bad_now = False
        """Whether the newest loss is not finite."""
        self.advice: str | None = None
        """The likeliest cause that a guard has found, and what to do about it."""

    def hear_metric(self, step: int, name: str, value: float) -> None:
        """Hear one value of one series."""
        is_bad = not math.isfinite(value)
        if name == "loss":
            self.is_bad_now = is_bad
        if is_bad and self._metric is None:
            self._metric = (step, name)

    def hear_stats(self, record: dict[str, Any]) -> None:
        """Hear a record of statistics: a row for each watched tensor of one step."""
        step = int(record["step"])
        if self._tensor is not None and self._tensor["step"] <= step:
            return
        bad = [row for row in record["rows"] if _is_bad(row)]
        if bad:
            layer, kind = _first(bad)
            phase = "forward" if kind in _FORWARD else "backward"
            self._tensor = {"step": step, "layer": layer, "kind": kind, "phase": phase}

    def hear_finding(self, record: dict[str, Any]) -> None:
        """Hear what a guard has found out about a step."""
        step = int(record["step"])
        self.advice = self.advice or next(iter(record["causes"]), None)
        is_finite = not any(_is_bad(row) for row in record["tensors"]["rows"][-1:])
        if (
            is_finite
            or record["layer"] is None
            or (self._tensor is not None and self._tensor["step"] <= step)
        ):
            return
        where = {"layer": record["tensor"], "kind": record["kind"], "phase": record["phase"]}
        self._tensor = {"step": step, **where}

    def first(self) -> dict[str, Any]:
        """The first that was not finite: step, and metric, or layer, kind and phase if watched.

        A tensor is named where the statistics show one at or before the first bad metric.
        """
        step, name = self._metric or (-1, "loss")
        if self._tensor is not None and self._tensor["step"] <= step:
            return self._tensor | {"metric": name}
        return {"step": step, "layer": None, "kind": None, "phase": None, "metric": name}

    def told(self) -> str:
        """The same as a sentence."""
        first = self.first()
        if first["layer"] is None:
            return f"{first['metric']} was not finite from step {first['step']} on."
        where = f"{first['kind']} of {first['layer']}, in the {first['phase']}"
        where += "" if first["phase"] == "update" else " pass"
        return f"The first numbers that were not finite: the {where} of step {first['step']}."

    def explain(self, error: dict[str, Any]) -> dict[str, Any]:
        """The error of a job, with the first NaN or Inf where that may have caused the failure."""
        if not self.is_bad_now or error.get("category") not in _BY_NUMBERS:
            return error
        first = self.first()
        text = f"{self.told()} Then it failed: {error['message']}"
        where = {
            "rank": error.get("rank"),
            "layer": first.get("layer") or error.get("layer"),
            "step": first["step"],
        }
        return {**NonFinite(text, found=first, hint=self.advice).as_dict(), **where}


def _is_bad(row: list[Any]) -> bool:
    """Whether the statistics of a tensor count values that are not finite."""
    return bool(jsonio.number(row[_NAN]) or jsonio.number(row[_INF]))


def _first(bad: list[list[Any]]) -> tuple[str, str]:
    """Of the bad tensors of a step the one that came first: of the forward pass, if any."""
    for row in bad:
        if row[1] in _FORWARD:
            return row[0], row[1]
    return bad[0][0], bad[0][1]
