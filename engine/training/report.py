"""Report a training job: metrics, progress, evaluations and checkpoints.

Keeps losses on the device until they have been read back; never makes a step wait.
"""

import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.checkpoint.saving import Saver
from engine.core.snapshot import State
from engine.core.spool import Emit, now
from engine.core.timing import REPORT, Timing
from engine.data.batches.batch import Batch
from engine.data.batches.batching import PaddingCounts
from engine.data.batches.rows import Rows
from engine.learner.learner import Learner
from engine.losses.loss_sums import LossSums
from engine.losses.losses import LossValue
from engine.metrics.derived import Derived
from engine.metrics.epoch_metrics import EpochMetrics
from engine.metrics.metrics import Accuracies
from engine.metrics.sample_predictions import Samples
from engine.network.hidden_state import alone
from engine.optim.dense_and_sparse import rates_of
from engine.probes.probe_set import Probes
from engine.probes.watched.requested import RequestedProbes
from glasshouse import jsonio
from glasshouse.spec import TrainJob

_PROGRESS_S = 0.25


class RunControl(Protocol):
    """Requests to a running job."""

    @property
    def cancel_requested(self) -> bool:
        """Whether the job should end at the next step boundary."""
        ...

    @property
    def ends_as(self) -> str:
        """The final state then: ``cancelled``; or, to resume later, ``paused``, ``interrupted``."""
        ...

    @property
    def wanted(self) -> RequestedProbes | None:
        """The probes from the next step on; None: those of the spec."""
        ...

    @property
    def orders(self) -> deque[dict[str, Any]]:
        """Commands in the order of their requests; see ``engine.training.commands``."""
        ...


@dataclass
class Outputs:
    """Where a job's records and files go."""

    directory: Path
    emit: Emit
    settle: Callable[[], None] = lambda: None
    """Called at every step boundary: waiting records may be written."""
    flush: Callable[[], None] = lambda: None
    """Called before anything that may take long."""
    ring: str | None = None
    """The ring from which the worker takes whole tensors; None: this process writes them to
    files."""


@dataclass
class Taken:
    """The results of a step's batches so far; scalars on the device."""

    num_rows: int = 0
    losses: list[Tensor] = field(default_factory=list[Tensor])
    terms: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The value of each loss, if there are several."""
    correct: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def loss(self) -> Tensor:
        """The step's loss: the sum of the contributions of its micro-batches."""
        return sum(self.losses[1:], self.losses[0])


class Reporter:
    """Turns steps into records, evaluations and checkpoints."""

    def __init__(  # noqa: PLR0913 (all that a report is made of)
        self,
        job: TrainJob,
        learner: Learner,
        validation: Rows | None,
        probes: Probes,
        out: Outputs,
        timing: Timing,
        *,
        saver: Saver,
        num_steps: int | None,
    ) -> None:
        self._job = job
        self._learner = learner
        self._validation = validation
        self._probes = probes
        self._readback = probes.readback
        self._out = out
        self._timing = timing
        self.saver = saver
        self._clock = timing.clock
        self._num_steps = num_steps
        self._accuracies = Accuracies(job.metrics)
        self._taken = Taken()
        self._evaluated: int | None = None
        self._num_samples = 0
        self._started = time.monotonic()
        self._before_s = 0.0
        self._told = (self._started, 0)
        self._samples = Samples(job, validation, out.directory)
        self.derived = Derived(
            learner.network,
            job.metrics,
            out.emit,
            timing.clock,
            fields=job.data.fields,
            scaling=learner.scaling,
        )
        self._epoch_metrics = EpochMetrics(job, out.directory, out.emit)
        self.pass_size = job.data.batch_size
        """The most rows in one pass."""
        self.intake: PaddingCounts | None = None
        """The padding counts of the training rows."""
        self.latest: dict[str, float] = {}
        """The newest value of each metric that has arrived."""
        self._settled: dict[str, tuple[int | str, int]] = {}
        """Settings that the spec leaves open: the value, and the step for which it was reported."""

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, including those before a resume."""
        return self._before_s + time.monotonic() - self._started

    def state(self) -> State:
        """Return the state that clients see and that the next step alone does not give."""
        found = {"samples": self._num_samples, "elapsed_s": self.elapsed_s}
        found |= {"latest": dict(self.latest), "settled": dict(self._settled)}
        return {**found, "best": self.saver.best}

    def restore(self, state: State) -> None:
        """Restore the state."""
        self._num_samples = int(state["samples"])
        self._before_s = float(state["elapsed_s"])
        self.latest = {name: jsonio.number(value) for name, value in state["latest"].items()}
        told = state.get("settled", {})  # of an older version: report it again
        self._settled = {what: (to, int(step)) for what, (to, step) in told.items()}
        self._told = (time.monotonic(), self._num_samples)
        self.saver.best = jsonio.number(state.get("best"))

    def settle(self, what: str, asked: int | str, to: int | str, *, by: str, step: int) -> None:
        """Report a setting that the spec leaves open, from a step on, if its value has changed.

        The log of a restarted job then has the report once.
        """
        before, since = self._settled.get(what, (asked, -1))
        if since >= step:  # what was reported then is replaced by this attempt
            before = asked
        if before != to:
            self._settled[what] = (to, step)
            record = {"type": "adjusted", "at": now(), "what": what, "from": before, "to": to}
            self._out.emit(record | {"by": by, "step": step})

    @property
    def loss(self) -> Tensor:
        """The loss of the current step, over the batches so far."""
        return self._taken.loss

    def take(self, step: int, batch: Batch, loss: LossValue, values: Mapping[str, Tensor]) -> None:
        """Add the results of a batch; ``loss`` is its contribution to the step's loss."""
        taken = self._taken
        taken.num_rows += batch.num_rows
        taken.losses.append(loss.total.detach())
        if self.intake is not None:
            self.intake.count(batch)
        for name, term in loss.terms.items():
            before = taken.terms.get(name)
            taken.terms[name] = term if before is None else before + term
        for name, correct in self._accuracies.correct(values, step).items():
            before = taken.correct.get(name)
            taken.correct[name] = correct if before is None else before + correct

    def step(self, step: int, epoch: int, clipped: Mapping[str, Tensor]) -> int:
        """Report a finished step: its loss before the update, and its batches' metrics.

        ``clipped``: the statistics of clipping. Returns the step's number of rows.
        """
        taken, self._taken = self._taken, Taken()
        num_rows, correct = taken.num_rows, taken.correct
        self._num_samples += num_rows
        self._clock.end_step(num_rows, 0 if self.intake is None else self.intake.num_tokens)
        at = now()
        rates = rates_of(self._learner.optimizer)
        others = {
            **taken.terms,
            **self.derived.take(),
            **clipped,
            **self._learner.network.output_clips.take(),
        }
        if self._learner.scaling is not None:
            others |= self._learner.scaling.figures()
        waited = self._probes.figures()
        if self.intake is not None:
            waited |= self.intake.figures()
        numbers = [taken.loss, *correct.values(), *others.values()]

        def then(arrived: list[float]) -> None:
            figures = {"loss": arrived[0], **rates, **waited}
            for name, number in zip([*correct, *others], arrived[1:], strict=True):
                figures[name] = number / num_rows if name in correct else number
            self._metrics(step, epoch, figures, at)

        self._readback.put(numbers, then)
        self._readback.poll()
        if time.monotonic() - self._told[0] >= _PROGRESS_S:
            self.progress(step, epoch)
            self._times(step, epoch)
        self._out.settle()
        self._clock.mark(REPORT)
        return num_rows

    def progress(self, step: int, epoch: int) -> None:
        """Report the progress of training; ``step`` is the newest step, 0-based."""
        told_at, told_samples = self._told
        self._told = (time.monotonic(), self._num_samples)
        seconds = self._told[0] - told_at
        rate = (self._num_samples - told_samples) / seconds if seconds > 0 else None
        self._out.emit(
            {
                "type": "progress",
                "at": now(),
                "step": step + 1,
                "num_steps": self._num_steps,
                "epoch": epoch,
                "samples": self._num_samples,
                "samples_per_s": None if rate is None else round(rate, 1),
                "eta_s": self._eta_s(step),
            }
        )

    def evaluate(self, step: int, epoch: int) -> dict[str, float]:
        """Evaluate the validation rows, if there are any; report and return the metrics."""
        self._evaluated = step
        if self._validation is None:
            return {}
        self._out.flush()
        learner = self._learner
        look = self._probes.evaluations.look(step)
        with learner.judged():
            figures = evaluate(
                self._job,
                learner,
                self._validation,
                batch_size=self.pass_size,
                look=look,
                others=self._epoch_metrics,
            )
            figures |= self._epoch_metrics.finish(step)
            self.saver.judge(figures, step + 1)
            self._readback.drain()
            self._metrics(step, epoch, figures, now())
            with alone(learner.hidden_state):
                self._samples.keep(step, learner.network, self._out.emit)
        self._clock.mark("evaluate")
        return figures

    def save(self, position: dict[str, int], *, final: bool = False, wait: bool = False) -> None:
        """Save everything; ``position`` counts updates done and epochs begun.

        The checkpoint is reported when it is durable, after all records of earlier steps. With
        ``wait`` that has happened when this returns; otherwise training continues meanwhile.
        """
        self._settle()
        self.saver.save(position, self.latest, final=final, wait=wait)
        self._clock.mark("checkpoint")

    def keep(self, position: dict[str, int], *, due: bool, asked: bool) -> None:
        """Save if it is due, requested, or time; or hold the best state for a later save."""
        choice = "save" if asked else self.saver.choose(position["step"], due=due)
        if choice == "save":
            self.save(position)
        elif choice == "hold":
            self._settle()
            self.saver.hold(position, self.latest)
            self._clock.mark("checkpoint")

    def _settle(self) -> None:
        """Emit all pending records of the steps so far."""
        self._readback.drain()
        self._probes.captures.settle()
        self._out.flush()

    def follow(self, job: TrainJob, num_steps: int | None) -> None:
        """Take a job with changed settings."""
        self._job, self._num_steps = job, num_steps
        self.saver.follow(job)

    def finish(self, step: int, epoch: int, position: dict[str, int], *, state: str) -> None:
        """Run the last evaluation and save the last checkpoint.

        ``state`` is the final state of training. Only ``succeeded`` evaluates; ``paused`` and
        ``interrupted`` jobs resume later.
        """
        self._readback.drain()
        if state == "succeeded" and self._evaluated != step:
            self.evaluate(step, epoch)
        self.progress(step, epoch)
        self._save_last(position, state)
        self._times(step, epoch, last=True)

    def _save_last(self, position: dict[str, int], state: str) -> None:
        goes_on = state in ("paused", "interrupted")
        try:
            self.save(position, final=not goes_on, wait=True)
        except OSError:
            if not goes_on:
                raise
            traceback.print_exc()  # it resumes from the previous checkpoint

    def abandon(self, step: int, epoch: int) -> None:
        """Report what is still known after a failure in ``step``, whose update was not made."""
        with contextlib.suppress(Exception):  # a failed device cannot be read
            self._readback.drain()
        self.progress(step - 1, epoch)
        self.saver.wait()

    def _times(self, step: int, epoch: int, *, last: bool = False) -> None:
        if values := self._timing.figures(step, last=last):
            if self.intake is not None:
                values |= self.intake.upkeep()
            record = {"type": "metrics", "at": now(), "step": step, "epoch": epoch}
            self._out.emit(record | {"values": values})

    def _metrics(self, step: int, epoch: int, values: dict[str, float], at: str) -> None:
        self.latest.update(values)
        record = {"type": "metrics", "at": at, "step": step, "epoch": epoch, "values": values}
        self._out.emit(record)

    def _eta_s(self, step: int) -> float | None:
        if self._job.stop.seconds is not None:
            return round(max(0.0, self._job.stop.seconds - self.elapsed_s), 1)
        if self._num_steps is None or step < 0:
            return None
        return round(self.elapsed_s / (step + 1) * (self._num_steps - step - 1), 1)


@torch.inference_mode()
def evaluate(
    job: TrainJob,
    learner: Learner,
    rows: Rows,
    *,
    batch_size: int,
    look: contextlib.AbstractContextManager[object] | None = None,
    others: EpochMetrics | None = None,
) -> dict[str, float]:
    """Run the validation rows once: loss and metrics over all of them, for any batch size.

    A loss is the sum of the batches' numerators over the sum of their denominators. ``look`` is
    entered around the first batch; ``others`` receive every batch.
    """
    network, loss_fn = learner.network, learner.loss_fn
    was_training = network.training
    network.eval()
    accuracies = Accuracies(job.metrics)
    sums: LossSums | None = None
    totals = torch.zeros(len(accuracies.names), dtype=torch.float64, device=rows.device)
    for batch in rows.in_order(batch_size):
        with look or contextlib.nullcontext():
            values = network(batch.tensors)
        look = None
        found = loss_fn.sums(values, batch.num_rows)
        sums = found if sums is None else sums + found
        for number, correct in enumerate(accuracies.correct(values).values()):
            totals[number] += correct
        if others is not None:
            others.update(values)
    network.train(was_training)
    figures = {} if sums is None else loss_fn.figures(sums)
    shares = (totals / rows.num_rows).tolist()
    figures |= dict(zip(accuracies.names, shares, strict=True))
    return {f"validation/{name}": value for name, value in figures.items()}
