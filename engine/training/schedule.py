"""Schedule of training: the order of batches, evaluations, checkpoints and the end.

Steps are 0-based and count optimizer updates.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.core.problems import one
from engine.core.snapshot import State
from engine.data.batches.batch import Batch
from engine.data.batches.batching import Batching, PaddingCounts
from engine.data.batches.division import Division
from engine.data.batches.rows import Rows
from engine.distributed.group import ALONE, Group
from engine.losses.losses import Losses
from engine.losses.micro_batches import MicroBatch, MicroBatches
from engine.optim.lr_schedulers import LearningRate
from glasshouse import jsonio
from glasshouse.errors import CheckpointMismatch, DataFailed
from glasshouse.spec import Early, TrainJob


class Schedule:
    """Decides the order of batches, evaluations, checkpoints and the end."""

    def __init__(
        self, job: TrainJob, rows: Rows, loss_fn: Losses, parts: int = 1, group: Group = ALONE
    ) -> None:
        """``parts``: split each batch of each process into this many, or into single rows."""
        self._job = job
        self._micro_batches = MicroBatches(job, loss_fn, group)
        self._batching = Batching(job, rows, Division(parts, group.num_shares, group.share))
        self.pass_size = -(-job.data.batch_size // parts)
        """The most rows in one pass."""
        self._pace = pace = self._batching.pace
        if not pace.batches:
            detail = f"drop_last leaves no batch: the rows are {rows.num_rows}, a batch takes"
            raise DataFailed(f"{detail} {pace.batch_size}")
        self.intake = PaddingCounts(rows)
        self.num_rows = 0
        """Rows of the newest step, in all processes."""
        self.early = None if job.stop.early is None else EarlyStop(job.stop.early)
        self.num_steps = pace.num_steps(job.stop)
        """Number of updates of the job; None if it is limited by time."""
        self.position = {"step": 0, "epoch": 0, "batch": 0}
        """Updates done, the current epoch, and the batches taken of it."""

    @property
    def newest(self) -> tuple[int, int]:
        """The newest finished step (0 before the first), and its epoch."""
        return max(self.position["step"] - 1, 0), self.position["epoch"]

    def state(self) -> State:
        """Return the position, and what the order of the rows depends on."""
        return {**self.position, **self._order()}

    def restore(self, state: State) -> None:
        """Resume after the batches that were taken.

        Raises:
            CheckpointMismatch: the rows would come in another order, or in other batches.
        """
        mine = self._order()
        for name in {**mine, **state}:
            was, is_now = state.get(name), mine.get(name)
            if was != is_now and name not in self.position:
                detail = f"{name} is {was} in the checkpoint and {is_now} in the job: its"
                raise CheckpointMismatch(f"{detail} rows would not be those that are still due.")
        self.position = {name: int(state[name]) for name in self.position}
        steps = -(-self.position["batch"] // self._pace.accumulate)
        if self.position["epoch"] * self._pace.steps + steps != state["step"]:
            raise CheckpointMismatch(f"The position {self.position} is none of the job.")

    def _order(self) -> dict[str, Any]:
        return {"seed": self._job.seed, **self._batching.order()}

    def steps(self) -> Iterator[tuple[int, int, Iterator[MicroBatch]]]:
        """Yield step, epoch and micro-batches from the position on; nothing if training is done."""
        pace, step, first = self._pace, self.position["step"], self.position["batch"]
        if self.num_steps is not None and step >= self.num_steps:
            return
        for epoch in itertools.count(self.position["epoch"]):
            batches, before = self._batching.epoch(epoch, first)
            while first < pace.batches:
                last = min(first + pace.accumulate, pace.batches)
                self.position = {"step": step + 1, "epoch": epoch, "batch": last}
                yield step, epoch, self._of_step(batches, before, first, last)
                step, first = step + 1, last
            first = 0

    def _of_step(
        self, batches: Iterator[Batch], before: Callable[[int], int], first: int, last: int
    ) -> Iterator[MicroBatch]:
        sizes = [before(number + 1) - before(number) for number in range(first, last)]
        self.num_rows = sum(sizes)
        sizes = [part for size in sizes for part in self._batching.parts_of(size)]
        return self._micro_batches.of_step(batches, sizes, self.num_rows)

    @property
    def ends_epoch(self) -> bool:
        """Whether the newest step is the last of its epoch."""
        return self.position["batch"] == self._pace.batches

    def follow(self, job: TrainJob, step: int, elapsed_s: float) -> None:
        """Take a job with changed settings, after ``step`` updates and ``elapsed_s`` seconds.

        Raises:
            SpecProblems: it would have ended already.
        """
        num_steps, seconds = self._pace.num_steps(job.stop), job.stop.seconds
        if num_steps is not None and num_steps < step:
            part = "epochs" if job.stop.epochs else "steps"
            detail = f"the job has made {step} steps already, and would end after {num_steps}"
            raise one(f"/set/stop.{part}", detail, "too_small")
        if seconds is not None and seconds < elapsed_s and seconds != self._job.stop.seconds:
            detail = f"the job has trained for {elapsed_s:.1f} s already"
            raise one("/set/stop.seconds", detail, "too_small")
        self._job, self.num_steps = job, num_steps
        if self.early is not None and job.stop.early is not None:
            self.early.spec = job.stop.early

    def judge(self, figures: Mapping[str, float], step: int, rate: LearningRate | None) -> None:
        """Take the metrics of an evaluation after a step; ignore one that was not due."""
        if not self.evaluates_after(step):
            return
        if rate is not None:
            rate.judge(figures)
        if self.early is not None:
            self.early.judge(figures[self.early.spec.metric], step)

    @property
    def has_stopped(self) -> bool:
        """Return whether training ends early."""
        return self.early is not None and self.early.is_over

    @property
    def reason(self) -> str | None:
        """The reason for that, if it does."""
        return self.early.reason if self.early is not None and self.early.is_over else None

    def is_over(self, step: int, elapsed_s: float) -> bool:
        """Return whether training ends after this step."""
        if self.has_stopped:
            return True
        seconds = self._job.stop.seconds
        return elapsed_s >= seconds if seconds is not None else step + 1 >= (self.num_steps or 0)

    def evaluates_after(self, step: int) -> bool:
        """Return whether the validation rows are evaluated now."""
        when = self._job.evaluate
        return when is not None and self._falls(step, when.every_epochs, when.every_steps)

    def saves_after(self, step: int) -> bool:
        """Return whether a checkpoint is saved now."""
        when = self._job.checkpoint
        by_default = None if when.every_steps else 1
        return self._falls(step, when.every_epochs or by_default, when.every_steps)

    def _falls(self, step: int, every_epochs: int | None, every_steps: int | None) -> bool:
        if every_steps is not None:
            return (step + 1) % every_steps == 0
        return every_epochs is not None and (step + 1) % (every_epochs * self._pace.steps) == 0


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
