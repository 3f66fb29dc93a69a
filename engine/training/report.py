"""Report a training job: metrics, progress, evaluations and checkpoints.

Keeps losses on the device until they have been read back; never makes a step wait.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.saving import Saver
from engine.checkpoint.shared_writing import SharedWriter
from engine.core.snapshot import State
from engine.core.spool import Emit, now
from engine.core.timing import COLLECTIVE, REPORT, Timing
from engine.data.batches.batch import Batch
from engine.data.batches.division import Division
from engine.data.batches.rows import Rows
from engine.distributed.group import Group
from engine.learner.learner import Learner
from engine.losses.loss_sums import LossSums
from engine.losses.losses import LossValue
from engine.losses.micro_batches import MicroBatch
from engine.metrics.derived import Derived
from engine.metrics.epoch_metrics import EpochMetrics
from engine.metrics.metrics import Accuracies
from engine.metrics.sample_predictions import Samples
from engine.network.hidden_state import alone
from engine.optim.dense_and_sparse import rates_of
from engine.probes.hooks import StepWatcher, Unwatched
from engine.probes.probe_set import Probes
from engine.training.control import Decisions
from engine.training.predicting import predict, values_of
from engine.training.rank_times import RankTimes
from engine.training.schedule import Schedule
from glasshouse import jsonio
from glasshouse.spec import TrainJob

_PROGRESS_S = 0.25


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

    losses: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The step's ``loss``, and the value of each loss if there are several."""
    correct: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


class Reporter:
    """Turns steps into records, evaluations and checkpoints."""

    def __init__(  # noqa: PLR0913, PLR0917 (all that a report is made of)
        self,
        job: TrainJob,
        learner: Learner,
        validation: Mapping[str, Rows],
        probes: Probes,
        out: Outputs,
        timing: Timing,
        schedule: Schedule,
        decisions: Decisions | None = None,
    ) -> None:
        """``validation``: the rows of evaluations, by the prefix of their series.

        ``decisions``: with several processes, what they exchange at each step.
        """
        self._decisions = decisions
        self._group = learner.group
        self._job = job
        self._learner = learner
        self._validation = validation
        self._probes = probes
        self._readback = probes.readback
        self._out = out
        self._timing = timing
        together = SharedWriter(learner.group) if learner.is_sharded else None
        self.saver = Saver(job, out.directory, out.emit, out.flush, together)
        self._clock = timing.clock
        self._schedule = schedule
        self._rank_times = RankTimes(timing.clock, learner.group)
        self._accuracies = Accuracies(job.metrics)
        self._taken = Taken()
        self._evaluated: int | None = None
        self._num_samples = 0
        self._started = time.monotonic()
        self._before_s = 0.0
        self._reported = (self._started, 0)
        first = next(iter(validation.values()), None)
        self._samples = Samples(job, first, out.directory, out.emit)
        self.derived = Derived(
            learner.network,
            job.metrics,
            out.emit,
            timing.clock,
            fields=job.data.fields,
            scaling=learner.scaling,
            group=learner.group,
            # rows of other processes arrive in host memory
            home=learner.home if learner.group.is_alone else probes.readback.device,
        )
        self._epoch_metrics = EpochMetrics(job, out.directory, out.emit)
        self.latest: dict[str, float] = {}
        """The newest value of each metric that has arrived."""
        self._is_time = False
        """With shards: whether process 0 has decided that it is time for a checkpoint."""
        self._settled: dict[str, tuple[int | str, int]] = {}
        """Settings that the spec leaves open: the value, and the step for which it was reported."""

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, including those before a resume; by process 0's clock."""
        if self._decisions is not None:
            return max(self._before_s, self._decisions.elapsed_s)
        return self._own_elapsed_s

    @property
    def _own_elapsed_s(self) -> float:
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
        settled = state.get("settled", {})  # of an older version: report it again
        self._settled = {what: (to, int(step)) for what, (to, step) in settled.items()}
        self._reported = (time.monotonic(), self._num_samples)
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

    def use_threads(self, wanted: int | None, step: int) -> None:
        """Compute with another number of torch threads from a step on, and report it.

        None: as many as now. A restarted job has the number that its worker has for it then, so
        this is no setting to restore.
        """
        before = torch.get_num_threads()
        if wanted is None or wanted == before:
            return
        torch.set_num_threads(wanted)
        record = {"type": "adjusted", "at": now(), "what": "threads", "from": before, "to": wanted}
        self._out.emit(record | {"by": "scheduler", "step": step})

    @property
    def loss(self) -> Tensor:
        """The loss of the current step, over the batches so far."""
        return self._taken.losses["loss"]

    def take(
        self,
        step: int,
        micro_batch: MicroBatch,
        loss: LossValue,
        values: Mapping[str, Tensor],
    ) -> None:
        """Add the results of a batch; ``loss`` is its contribution to the step's loss."""
        taken = self._taken
        correct = self._accuracies.correct(values, step)
        self._schedule.intake.count(micro_batch.batch, has_rows=micro_batch.has_rows)
        if not micro_batch.has_rows:
            correct = {name: 0 * count for name, count in correct.items()}
        losses = {"loss": loss.total.detach(), **loss.terms}
        for sums, found in ((taken.losses, losses), (taken.correct, correct)):
            for name, value in found.items():
                sums[name] = sums[name] + value if name in sums else value

    def take_none(self, step: int, batches: Iterable[MicroBatch]) -> None:
        """Add nothing, if another process of the pipeline has the results of the step."""
        if not self._taken.losses:
            for one in batches:
                self._schedule.intake.count(one.batch, has_rows=False)
            zero = torch.zeros((), device=self._readback.device)
            names = ["loss", *(f"loss/{name}" for name in self._job.loss_names)]
            self._taken.losses = dict.fromkeys(names, zero)
            self._taken.correct = dict.fromkeys(self._accuracies.due(step), zero)

    def send(self) -> None:
        """With several processes: start to add up the step's results."""
        decisions = self._decisions
        if decisions is None:
            return
        taken, intake = self._taken, self._schedule.intake
        own = map(self._group.counted, [*taken.losses.values(), *taken.correct.values()])
        read = intake.counts if self._group.counts else [0] * len(intake.counts)
        counts = [*self._rank_times.own(), *read]
        changes = self._probes.proposals()
        more: dict[str, Any] = {"factors": changes} if changes else {}
        if self._learner.is_sharded and self.saver.is_time:
            more["save"] = True
        decisions.send([*own], counts, self._own_elapsed_s, more)

    def receive(self, step: int) -> None:
        """With several processes: take the step's sums and process 0's decisions."""
        if self._decisions is None:
            return
        taken, intake = self._taken, self._schedule.intake
        sums, counts, more = self._decisions.receive()
        num_times = len(counts) - len(intake.counts)
        self._rank_times.take(counts[:num_times], step)
        intake.counts = [int(count) for count in counts[num_times:]]
        summed = iter(sums)
        taken.losses = dict(zip(taken.losses, summed, strict=False))
        taken.correct = dict(zip(taken.correct, summed, strict=False))
        self._is_time = bool(more.get("save"))
        if "factors" in more:
            self._probes.apply(more["factors"], step + 1)
        self._clock.mark(COLLECTIVE)

    def step(self, step: int, epoch: int, clipped: Mapping[str, Tensor]) -> int:
        """Report a finished step: its loss before the update, and its batches' metrics.

        ``clipped``: the statistics of clipping. Returns the step's number of rows.
        """
        taken, self._taken = self._taken, Taken()
        num_rows, correct = self._schedule.num_rows, taken.correct
        self._num_samples += num_rows
        intake = self._schedule.intake
        self._clock.end_step(num_rows, intake.num_tokens)
        at = now()
        rates = rates_of(self._learner.optimizer)
        others = {
            **taken.losses,
            **self.derived.take(),
            **clipped,
            **self._learner.network.output_clips.take(self._group),
        }
        if self._learner.scaling is not None:
            others |= self._learner.scaling.figures()
        counted = self._probes.figures() | intake.figures()

        def then(arrived: list[float]) -> None:
            figures = dict(zip([*others, *correct], arrived, strict=True))
            figures |= {name: figures[name] / num_rows for name in correct}
            self._metrics(step, epoch, figures | rates | counted, at)

        self._readback.put([*others.values(), *correct.values()], then)
        self._readback.poll()
        if time.monotonic() - self._reported[0] >= _PROGRESS_S:
            self.progress(step, epoch)
            self._times(step, epoch)
        self._out.settle()
        self._clock.mark(REPORT)
        return num_rows

    def progress(self, step: int, epoch: int) -> None:
        """Report the progress of training; ``step`` is the newest step, 0-based."""
        before, before_samples = self._reported
        self._reported = (time.monotonic(), self._num_samples)
        seconds = self._reported[0] - before
        rate = (self._num_samples - before_samples) / seconds if seconds > 0 else None
        self._out.emit(
            {
                "type": "progress",
                "at": now(),
                "step": step + 1,
                "num_steps": self._schedule.num_steps,
                "epoch": epoch,
                "samples": self._num_samples,
                "samples_per_s": None if rate is None else round(rate, 1),
                "eta_s": self._eta_s(step),
            }
        )

    def evaluate(self, step: int, epoch: int) -> dict[str, float]:
        """Evaluate the validation rows, if there are any; report and return the metrics.

        Probes and samples see the rows of the first source.
        """
        self._evaluated = step
        if not self._validation:
            return {}
        self._out.flush()
        learner = self._learner
        watched = self._probes.evaluate(step)
        figures: dict[str, float] = {}
        with learner.judged():
            for prefix, rows in self._validation.items():
                with alone(learner.hidden_state):
                    found = evaluate(
                        learner,
                        rows,
                        batch_size=self._schedule.pass_size,
                        watched=watched,
                        metrics=self._epoch_metrics,
                    )
                found |= self._epoch_metrics.finish(prefix, self._group)
                figures |= {f"{prefix}/{name}": value for name, value in found.items()}
                watched = Unwatched()
            self._epoch_metrics.keep(step, self._group)
            if self._group.is_first:
                self.saver.judge(figures, step + 1)
            self._readback.drain()
            self._metrics(step, epoch, figures, now())
            if self._group.is_first or learner.is_sharded:
                with alone(learner.hidden_state):
                    self._samples.keep(step, partial(values_of, learner))
        self._clock.mark("evaluate")
        return figures

    def save(self, position: dict[str, int], *, final: bool = False, wait: bool = False) -> None:
        """Save everything; ``position`` counts updates done and epochs begun.

        The checkpoint is reported when it is durable, after all records of earlier steps. With
        ``wait`` that has happened when this returns; otherwise training continues meanwhile.
        """
        self._settle()
        if self._saves:
            self.saver.save(position, self.latest, final=final, wait=wait)
        self._clock.mark("checkpoint")

    @property
    def _saves(self) -> bool:
        """Whether this process saves: one is enough if all have the same state."""
        return self._group.is_first or self._learner.is_sharded

    def keep(self, position: dict[str, int], *, due: bool, asked: bool) -> None:
        """Save if it is due, requested, or time; or hold the best state for a later save."""
        choice = self._choice(position["step"], due=due, asked=asked)
        if choice == "save":
            self.save(position)
        elif choice == "hold":
            self._settle()
            self.saver.hold(position, self.latest)
            self._clock.mark("checkpoint")

    def _choice(self, step: int, *, due: bool, asked: bool) -> str | None:
        """Return what to do at this step boundary. Only processes that take part get an answer."""
        if asked:
            return "save"
        if not self._learner.is_sharded:
            return self.saver.choose(step, due=due) if self._group.is_first else None
        # By the clock of process 0. The others hear of it if they must expect something.
        if due or self._evaluated == step - 1:
            choice = self.saver.choose(step, due=due) if self._group.is_first else None
            return self._group.broadcast(choice)
        return "save" if self._is_time else None

    def _settle(self) -> None:
        """Emit all pending records of the steps so far."""
        self._readback.drain()
        self._probes.captures.settle()
        self._out.flush()

    def follow(self, job: TrainJob) -> None:
        """Take a job with changed settings."""
        self._job = job
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
        resumes = state in ("paused", "interrupted")
        try:
            self.save(position, final=not resumes, wait=True)
        except OSError:
            if not resumes:
                raise
            traceback.print_exc()  # it resumes from the previous checkpoint
        self._times(step, epoch, last=True)

    def abandon(self, step: int, epoch: int) -> None:
        """Report what is still known after a failure in ``step``, whose update was not made."""
        with contextlib.suppress(Exception):  # a failed device cannot be read
            self._readback.drain()
        self.progress(step - 1, epoch)
        self.saver.wait()

    def _times(self, step: int, epoch: int, *, last: bool = False) -> None:
        if values := self._timing.figures(step, last=last):
            values |= self._schedule.intake.upkeep()
            if not self._group.is_alone:
                values |= self._rank_times.figures(step)
            record = {"type": "metrics", "at": now(), "step": step, "epoch": epoch}
            self._out.emit(record | {"values": values})

    def _metrics(self, step: int, epoch: int, values: dict[str, float], at: str) -> None:
        self.latest.update(values)
        record = {"type": "metrics", "at": at, "step": step, "epoch": epoch, "values": values}
        self._out.emit(record)

    def _eta_s(self, step: int) -> float | None:
        if self._job.stop.seconds is not None:
            return round(max(0.0, self._job.stop.seconds - self.elapsed_s), 1)
        num_steps = self._schedule.num_steps
        if num_steps is None or step < 0:
            return None
        return round(self.elapsed_s / (step + 1) * (num_steps - step - 1), 1)


def evaluate(
    learner: Learner,
    rows: Rows,
    *,
    batch_size: int,
    watched: StepWatcher | Unwatched,
    metrics: EpochMetrics,
) -> dict[str, float]:
    """Run the validation rows once; return the loss over all of them, for any batch size.

    A loss is the sum of the batches' numerators over the sum of their denominators. ``watched`` is
    entered around the first batch; ``metrics`` receive every batch. Several processes share the
    rows, ``batch_size`` for each.
    """
    network, loss_fn, group = learner.network, learner.loss_fn, learner.group
    was_training = network.training
    network.eval()
    sums: LossSums | None = None
    batches = own_batches(rows, batch_size, group, alike=learner.is_sharded)

    def take(batch: Batch, values: Mapping[str, Tensor]) -> None:
        nonlocal sums
        found = loss_fn.sums(values, batch.num_rows)
        sums = found if sums is None else sums + found
        metrics.update(values)

    predict(learner, batches, take, watched)
    network.train(was_training)
    if sums is None and learner.pipeline is not None:  # another process has the losses
        zeros = torch.zeros(len(loss_fn.terms), dtype=torch.float64, device=rows.device)
        sums = LossSums(zeros, zeros)
    return {} if sums is None else loss_fn.figures(sums.over(group))


def own_batches(
    rows: Rows, batch_size: int, group: Group, *, alike: bool = False
) -> Iterator[tuple[Batch, bool]]:
    """Yield the rows of one process once, in the stored order, ``batch_size`` rows at a time.

    Every row is in exactly one process. Each batch comes with whether it counts: with ``alike`` all
    processes get as many batches, and one that has no row left gets another's, which does not.
    """
    if group.is_alone:
        for batch in rows.in_order(batch_size):
            yield batch, True
        return
    size = batch_size * group.num_shares
    division = Division(1, group.num_shares, group.share)
    for number, batch in enumerate(rows.in_order(size, division)):
        counts = any(division.sizes(min(size, rows.num_rows - number * size)))
        if counts or alike:
            yield batch, counts
