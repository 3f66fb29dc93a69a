"""The training loop. Knows torch; knows nothing of HTTP, SQL or queues.

Steps are 0-based and count optimizer updates.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.data import Rows
from engine.failures import StepFailed
from engine.network import Network
from engine.optim import build_loss, build_optimizer
from engine.probes.taps import Probes
from engine.readback import Readback
from engine.report import Reporter, evaluate, save_checkpoint
from glasshouse.spec import TrainJob


class Control(Protocol):
    """What may be asked of a running job."""

    @property
    def cancel_requested(self) -> bool:
        """Whether the job should end at the next step boundary."""
        ...


@dataclass
class Outputs:
    """Where a job's records and files go."""

    directory: Path
    emit: Callable[[dict[str, Any]], None]
    settle: Callable[[], None] = lambda: None
    """Called at every step boundary: records that wait may be written."""
    flush: Callable[[], None] = lambda: None
    """Called before anything that may take long."""


@dataclass
class Ending:
    """How training ended."""

    network: Network
    num_steps: int
    cancelled: bool


def train(
    job: TrainJob, rows: Rows, validation: Rows | None, *, control: Control, out: Outputs
) -> Ending:
    """Train a network to the end of its spec, or until told to stop."""
    torch.manual_seed(job.seed)
    network = Network(job.network, wanted(job)).to(rows.device)
    loss_fn = build_loss(job.loss).to(rows.device)
    optimizer = build_optimizer(job.optimizer, network.parameters())
    readback = Readback(rows.device)
    report = Reporter(job, out.emit, readback, num_steps=num_steps(job, rows))
    probes = Probes(
        network, job.probes, emit=out.emit, readback=readback, out_dir=out.directory
    )
    schedule = Schedule(job, rows)
    step = epoch = -1

    def save(*, final: bool) -> None:
        report.drain()
        out.flush()
        position = {"step": step + 1, "epoch": epoch + 1, "batch": schedule.num_in_epoch}
        save_checkpoint(
            job, (network, optimizer), position, (out.directory, out.emit),
            metrics=report.latest, final=final,
        )  # fmt: skip

    def judge() -> None:
        out.flush()
        if validation is not None:
            report.evaluated(step, epoch, evaluate(job, network, loss_fn, validation))

    try:
        for step, (epoch, batch) in enumerate(schedule.batches()):  # noqa: B007 - read in save
            with probes.at(step):
                values = network(batch)
                loss = loss_fn(*[values[name] for name in job.loss.inputs])
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            report.step(step, epoch, loss, values, optimizer.param_groups[0]["lr"])
            out.settle()
            if control.cancel_requested or schedule.is_over(step + 1, report.elapsed_s):
                break
            if schedule.evaluates_after(step + 1):
                judge()
            if schedule.saves_after(step + 1):
                save(final=False)
    except Exception as error:
        probes.close()
        report.drain()
        raise StepFailed(step, error) from error
    probes.close()
    if validation is not None and not control.cancel_requested:
        judge()
    report.progress(step, epoch)
    save(final=True)
    return Ending(network, step + 1, control.cancel_requested)


def wanted(job: TrainJob) -> tuple[str, ...]:
    """The layer outputs that outlive the forward pass."""
    names = [*job.loss.inputs, *(name for metric in job.metrics for name in metric.inputs)]
    return tuple(dict.fromkeys([*names, *(job.network.outputs or ())]))


def num_steps(job: TrainJob, rows: Rows) -> int | None:
    """Updates that the job will make; None when time decides."""
    if job.stop.epochs is not None:
        return job.stop.epochs * rows.num_batches(job.data.batch_size, drop_last=job.data.drop_last)
    return job.stop.steps


class Schedule:
    """When things happen: the order of batches, evaluations, checkpoints and the end."""

    def __init__(self, job: TrainJob, rows: Rows) -> None:
        self._job = job
        self._rows = rows
        self._per_epoch = rows.num_batches(job.data.batch_size, drop_last=job.data.drop_last)
        self._last = num_steps(job, rows)
        self._shuffles = job.data.shuffle.enabled is not False
        self.num_in_epoch = 0
        """Batches of the current epoch that were handed out."""

    def batches(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Batches with their epoch, for ever."""
        epoch = 0
        data = self._job.data
        while self._per_epoch:
            order = (self._job.seed, epoch) if self._shuffles else None
            self.num_in_epoch = 0
            for batch in self._rows.epoch(data.batch_size, drop_last=data.drop_last, order=order):
                self.num_in_epoch += 1
                yield epoch, batch
            epoch += 1

    def is_over(self, done: int, elapsed_s: float) -> bool:
        """Whether training ends after this many updates."""
        seconds = self._job.stop.seconds
        return elapsed_s >= seconds if seconds is not None else done >= (self._last or 0)

    def evaluates_after(self, done: int) -> bool:
        """Whether the validation rows are run now."""
        when = self._job.evaluate
        return when is not None and self._falls(done, when.every_epochs, when.every_steps)

    def saves_after(self, done: int) -> bool:
        """Whether a checkpoint is made now."""
        when = self._job.checkpoint
        return self._falls(done, when.every_epochs, when.every_steps)

    def _falls(self, done: int, every_epochs: int | None, every_steps: int | None) -> bool:
        if every_steps is not None:
            return done % every_steps == 0
        return every_epochs is not None and done % (every_epochs * self._per_epoch) == 0
