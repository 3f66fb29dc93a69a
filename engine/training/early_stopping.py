"""Early stopping: the end of a training whose metric has stopped getting better."""

import math

from engine.core.snapshot import State
from glasshouse import jsonio
from glasshouse.spec import Early


class EarlyStop:
    """Judges the evaluations of a job, one after the other."""

    def __init__(self, spec: Early) -> None:
        self.spec = spec
        self._best: float | None = None
        self._best_step = 0
        self._num_worse = 0
        """Evaluations in a row that were no better."""

    @property
    def is_over(self) -> bool:
        """Whether training ends."""
        return self._num_worse >= self.spec.patience

    @property
    def reason(self) -> str:
        """Why it ends, in words."""
        best = (
            "never a number" if self._best is None else f"{self._best:g} at step {self._best_step}"
        )
        name, times = self.spec.metric, self._num_worse
        return f"early stop: {name} was not better for {times} evaluations; its best is {best}"

    def judge(self, value: float, step: int) -> None:
        """Take the value of an evaluation after a step. What is not a number is no better."""
        if self._is_better(value):
            self._best, self._best_step, self._num_worse = value, step, 0
        else:
            self._num_worse += 1

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self._best is None:
            return True
        gain = self._best - value if self.spec.mode == "min" else value - self._best
        return gain > self.spec.min_delta

    def state(self) -> State:
        """The best so far, and how often there was none better."""
        return {"best": self._best, "step": self._best_step, "worse": self._num_worse}

    def restore(self, state: State) -> None:
        """Judge on from there."""
        self._best = jsonio.number(state["best"])
        self._best_step, self._num_worse = int(state["step"]), int(state["worse"])
