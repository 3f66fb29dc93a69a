"""The training loop. Knows torch; knows nothing of HTTP, SQL or queues.

Steps are 0-based and count optimizer updates.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.clipping import clipping
from engine.data import Rows
from engine.failures import StepFailed
from engine.network import Network
from engine.optim import build_loss, build_optimizer
from engine.probes.desk import Training
from engine.probes.taps import Probes
from engine.probes.tensors.captures import Captures
from engine.probes.watched.wanted import Wanted
from engine.readback import Readback
from engine.report import Control, Learner, Outputs, Reporter
from engine.timing import Timing, Work, clock_of
from glasshouse.errors import DataFailed
from glasshouse.spec import TrainJob


@dataclass
class Ending:
    """How training ended."""

    network: Network
    num_steps: int
    cancelled: bool


def train(  # noqa: PLR0913 (what a job is, what it reads, who listens)
    job: TrainJob,
    rows: Rows,
    validation: Rows | None,
    *,
    control: Control,
    out: Outputs,
    watched: Wanted | None = None,
    work: Work = Work(),  # noqa: B008 (frozen)
) -> Ending:
    """Train a network to the end of its spec, or until told to stop.

    ``watched`` is what to watch from the first step on; left out, what the spec says. ``work`` is
    what a step computes, where that is known.
    """
    torch.manual_seed(job.seed)
    network, loss_fn, optimizer, clip = learner = _learner(job, rows.device)
    schedule = Schedule(job, rows)
    readback = Readback(rows.device)
    probes = _probes(job, learner, rows, readback, out, _captures(out, control))
    probes.watch(watched, 0)
    clock = probes.clock = clock_of(rows.device)
    report = Reporter(
        job, learner, validation, probes, out, Timing(clock, work), num_steps=schedule.num_steps
    )

    step = epoch = 0
    try:
        for step, epoch, batch in schedule.steps():
            clock.mark("data")
            if (asked := control.wanted) is not None and asked is not probes.wanted:
                probes.watch(asked, step)
            with probes.at(step) as look, report.derived.at(step, batch):
                clock.mark("probes")
                values = network(batch)
                loss = loss_fn(*[values[name] for name in job.loss.inputs])
                clock.mark("forward")
                loss.backward()
                clock.mark("backward")
            clock.mark("probes")
            grad_norm = None if clip is None else clip()
            look.step(optimizer, clock.mark)
            optimizer.zero_grad(set_to_none=True)
            clock.mark("optimizer")

            report.step(step, epoch, loss, values, grad_norm)
            if control.cancel_requested or schedule.is_over(step, report.elapsed_s):
                break
            if schedule.evaluates_after(step):
                report.evaluate(step, epoch)
            if schedule.saves_after(step):
                report.save(schedule.position)
        cancelled = control.cancel_requested
        report.finish(step, epoch, schedule.position, cancelled=cancelled)
        probes.close()
    except Exception as error:
        probes.close()
        report.abandon()
        raise StepFailed(step, error) from error
    return Ending(network, step + 1, cancelled)


def _learner(job: TrainJob, device: torch.device) -> Learner:
    network = Network(job.network, wanted(job)).to(device)
    loss_fn = build_loss(job.loss).to(device)
    optimizer = build_optimizer(job.optimizer, network.parameters())
    return Learner(network, loss_fn, optimizer, clipping(job.grad_clip, network.parameters()))


def _probes(
    job: TrainJob,
    learner: Learner,
    rows: Rows,
    readback: Readback,
    out: Outputs,
    captures: Captures,
) -> Probes:
    training = Training(learner.loss_fn, rows, clips=learner.clip is not None)
    return Probes(
        learner.network,
        job.probes,
        emit=out.emit,
        readback=readback,
        out_dir=out.directory,
        training=training,
        captures=captures,
    )


def _captures(out: Outputs, control: Control) -> Captures:
    """Where whole tensors go."""
    return Captures(
        out.directory,
        out.emit,
        ring=out.ring,
        flush=out.flush,
        is_over=lambda: control.cancel_requested,
    )


def wanted(job: TrainJob) -> tuple[str, ...]:
    """The layer outputs that outlive the forward pass."""
    judged = [metric for metric in job.metrics if metric.type == "accuracy"]
    names = [*job.loss.inputs, *(name for metric in judged for name in metric.inputs)]
    return tuple(dict.fromkeys([*names, *(job.network.outputs or ())]))


class Schedule:
    """When things happen: the order of batches, evaluations, checkpoints and the end."""

    def __init__(self, job: TrainJob, rows: Rows) -> None:
        self._job = job
        self._rows = rows
        size, drop_last = job.data.batch_size, job.data.drop_last
        self._per_epoch = rows.num_batches(size, drop_last=drop_last)
        if not self._per_epoch:
            detail = (
                f"drop_last leaves no batch: the rows are {rows.num_rows}, a batch takes {size}"
            )
            raise DataFailed(detail)
        self._shuffles = job.data.shuffle.enabled is not False
        self.num_steps = job.stop.epochs * self._per_epoch if job.stop.epochs else job.stop.steps
        """Updates that the job will make; None when time decides."""
        self.position = {"step": 0, "epoch": 0, "batch": 0}
        """Updates done, the epoch that training is in, and the batches taken of it."""

    def steps(self) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Step, epoch and batch, for ever."""
        size, drop_last = self._job.data.batch_size, self._job.data.drop_last
        step = 0
        for epoch in itertools.count():
            order = (self._job.seed, epoch) if self._shuffles else None
            batches = self._rows.epoch(size, drop_last=drop_last, order=order)
            for number, batch in enumerate(batches, start=1):
                self.position = {"step": step + 1, "epoch": epoch, "batch": number}
                yield step, epoch, batch
                step += 1

    def is_over(self, step: int, elapsed_s: float) -> bool:
        """Whether training ends after this step."""
        seconds = self._job.stop.seconds
        return elapsed_s >= seconds if seconds is not None else step + 1 >= (self.num_steps or 0)

    def evaluates_after(self, step: int) -> bool:
        """Whether the validation rows are run now."""
        when = self._job.evaluate
        return when is not None and self._falls(step, when.every_epochs, when.every_steps)

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is made now."""
        when = self._job.checkpoint
        return self._falls(step, when.every_epochs, when.every_steps)

    def _falls(self, step: int, every_epochs: int | None, every_steps: int | None) -> bool:
        if every_steps is not None:
            return (step + 1) % every_steps == 0
        return every_epochs is not None and (step + 1) % (every_epochs * self._per_epoch) == 0
