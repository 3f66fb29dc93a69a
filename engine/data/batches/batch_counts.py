"""Count how rows become batches, and batches become steps. Pure arithmetic."""

from dataclasses import dataclass
from typing import Literal

from glasshouse.spec import Stop, TrainJob


@dataclass(frozen=True)
class BatchCounts:
    """The counts of one epoch. All epochs have the same."""

    num_rows: int
    batch_size: int
    """Rows of a batch of all processes together."""
    drop_last: bool = False
    accumulate: int = 1
    """Batches of one step; the last step of an epoch may have fewer."""
    num_batches: int | None = None
    """Batches of an epoch, if their sizes differ; None: each has ``batch_size`` rows."""

    @staticmethod
    def of(job: TrainJob, num_rows: int, num_batches: int | None = None) -> "BatchCounts":
        """Return the counts of a job over ``num_rows`` rows."""
        size, drop_last = job.global_batch_size, job.data.drop_last
        return BatchCounts(num_rows, size, drop_last, job.accumulate, num_batches)

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        if self.num_batches is not None:
            return self.num_batches
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole if self.drop_last else whole + (rest > 0)

    @property
    def rows(self) -> int:
        """Rows of an epoch that are trained on."""
        if self.num_batches is not None:
            return self.num_rows
        return min(self.num_rows, self.batches * self.batch_size)

    @property
    def steps(self) -> int:
        """Updates of an epoch."""
        return -(-self.batches // self.accumulate)

    def rows_before(self, batch: int) -> int:
        """Return the rows of an epoch before a batch, if all batches have ``batch_size`` rows."""
        return min(batch * self.batch_size, self.rows)

    def num_steps(self, stop: Stop) -> int | None:
        """Return the updates of the whole training; None if time decides."""
        return stop.epochs * self.steps if stop.epochs else stop.steps

    def length(self, stop: Stop, unit: Literal["steps", "epochs", "samples"]) -> int | None:
        """Return the length of the whole training in steps, started epochs or rows.

        None if time decides. For rows also None if training ends within an epoch and batches differ
        in size.
        """
        num_steps = self.num_steps(stop)
        if num_steps is None or not self.steps:
            return None
        epochs, steps = divmod(num_steps, self.steps)
        if unit == "samples" and steps and self.num_batches is not None:
            return None
        return {
            "steps": num_steps,
            "epochs": epochs + (steps > 0),
            "samples": epochs * self.rows + self.rows_before(steps * self.accumulate),
        }[unit]
