"""Early stopping: end training if the metric stops improving."""

import math

from engine.core.snapshot import State
from glasshouse import jsonio
from glasshouse.spec import Early


class EarlyStop:
    """Tracks the monitored metric over the evaluations of a job."""

    def __init__(self, spec: Early) -> None:
        self.spec = spec
        self._best: float | None = None
        self._best_step = 0
        self._num_worse = 0
        """Consecutive evaluations without an improvement."""

    @property
    def is_over(self) -> bool:
        """Return whether training ends."""
        return self._num_worse >= self.spec.patience

    @property
    def reason(self) -> str:
        """Return the reason for the end, as text."""
        best = (
            "never a number" if self._best is None else f"{self._best:g} at step {self._best_step}"
        )
        name, times = self.spec.metric, self._num_worse
        return f"early stop: {name} was not better for {times} evaluations; its best is {best}"

    def judge(self, value: float, step: int) -> None:
        """Take the value of an evaluation after a step. NaN is no improvement."""
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
        """Return the best value, and the number of evaluations without improvement."""
        return {"best": self._best, "step": self._best_step, "worse": self._num_worse}

    def restore(self, state: State) -> None:
        """Restore the state."""
        self._best = jsonio.number(state["best"])
        self._best_step, self._num_worse = int(state["step"]), int(state["worse"])
