"""The training loop. Knows torch; knows nothing of HTTP, SQL or queues.

Steps are 0-based and count optimizer updates.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.clipping import clipping
from engine.commands import Commands, Follow
from engine.data import Rows
from engine.failures import StepFailed
from engine.guards.guard import Guard
from engine.network import Network
from engine.nonfinite import blame
from engine.optim import build_loss, build_optimizer, loss_of
from engine.probes.desk import Training
from engine.probes.taps import Probes
from engine.probes.tensors.captures import Captures
from engine.probes.watched.wanted import Wanted
from engine.problems import one
from engine.readback import Readback
from engine.report import Control, Learner, Outputs, Reporter
from engine.saving import Saver
from engine.snapshot import State
from engine.starting import Start
from engine.stateful import Generators, OptimizerState, Weights
from engine.timing import Timing, Work, clock_of
from glasshouse.errors import CheckpointMismatch, DataFailed
from glasshouse.spec import TrainJob


@dataclass
class Ending:
    """How training ended."""

    network: Network
    num_steps: int
    state: str
    """``succeeded``, or what it was asked to end as."""


def train(  # noqa: PLR0913, PLR0915 (what a job is, what it reads, who listens; the loop)
    job: TrainJob,
    rows: Rows,
    validation: Rows | None,
    *,
    control: Control,
    out: Outputs,
    watched: Wanted | None = None,
    work: Work = Work(),  # noqa: B008 (frozen)
    start: Start | None = None,
) -> Ending:
    """Train a network to the end of its spec, or until told to stop.

    ``watched`` is what to watch from the first step on; left out, what the spec says. ``work`` is
    what a step computes, where that is known. ``start`` is the checkpoint to begin with.

    Raises:
        CheckpointMismatch: the checkpoint is of another job.
    """
    torch.manual_seed(job.seed)
    network, loss_fn, optimizer, clip = learner = _learner(job, rows.device)
    schedule = Schedule(job, rows)
    probes = _probes(job, learner, rows, Readback(rows.device), out, _captures(out, control))
    probes.watch(watched, 0 if start is None else start.step)
    clock = probes.clock = clock_of(rows.device)
    report = _report(job, learner, validation, probes, out, Timing(clock, work), schedule)
    readback = probes.readback
    guard = Guard(job, learner, rows, readback=readback, clock=clock, emit=out.emit)
    report.saver.parts["guard"] = guard
    if start is not None and _has_ended(start, report, schedule):
        return Ending(network, start.step, "succeeded")

    first = schedule.position["step"]
    follow = _follow(schedule, report)
    commands = Commands(job, learner, control.orders, first=first, follow=follow, emit=out.emit)
    step, epoch, batch = *schedule.newest, None
    state = "succeeded"
    commands.at(first)
    try:
        for step, epoch, batch in schedule.steps():
            clock.mark("data")
            if (wish := control.wanted) is not None and wish is not probes.wanted:
                probes.watch(wish, step)
            guard.begin()
            with probes.at(step) as look, report.derived.at(step, batch):
                clock.mark("probes")
                values = network(batch)
                loss = loss_of(loss_fn, values, job.loss.inputs)
                clock.mark("forward")
                loss.backward()
                clock.mark("backward")
            guard.look(step, epoch, loss)
            clock.mark("probes")
            grad_norm = None if clip is None else clip()
            look.step(optimizer, clock.mark)
            optimizer.zero_grad(set_to_none=True)
            clock.mark("optimizer")

            report.step(step, epoch, loss, values, grad_norm)
            asked = commands.at(step + 1) if control.orders else ()
            if schedule.is_over(step, report.elapsed_s):
                break
            if schedule.evaluates_after(step) or "evaluate" in asked:
                report.evaluate(step, epoch)
            if control.cancel_requested:  # after the evaluation, which would not come again
                state = control.ends_as
                break
            if report.saver.wants(due=schedule.saves_after(step)) or "checkpoint" in asked:
                report.save(schedule.position)
        report.finish(step, epoch, schedule.position, state=state)
        probes.close()
    except Exception as error:
        probes.close()
        report.abandon()
        raise StepFailed(step, blame(error, network, batch)) from error
    return Ending(network, step + 1, state)


def _report(  # noqa: PLR0913, PLR0917 (all that a report is made of)
    job: TrainJob,
    learner: Learner,
    validation: Rows | None,
    probes: Probes,
    out: Outputs,
    timing: Timing,
    schedule: "Schedule",
) -> Reporter:
    saver = Saver(job, out.directory, out.emit, out.flush)
    report = Reporter(
        job, learner, validation, probes, out, timing, saver=saver, num_steps=schedule.num_steps
    )
    # All that a checkpoint holds. What has a state of its own adds itself here.
    saver.parts |= {
        "position": schedule,
        "model": Weights(learner.network),
        "optimizer": OptimizerState(learner.optimizer),
        "report": report,
        "derived": report.derived,
        "probes": probes,
        "generators": Generators(),
    }
    return report


def _has_ended(start: Start, report: Reporter, schedule: "Schedule") -> bool:
    """Begin with a checkpoint; whether training was over and all of it had been said."""
    start.restore(report.saver.parts)
    return start.has_said_all and schedule.is_over(start.step - 1, report.elapsed_s)


def _learner(job: TrainJob, device: torch.device) -> Learner:
    network = Network(job.network, wanted(job)).to(device)
    loss_fn = build_loss(job.loss).to(device)
    optimizer = build_optimizer(job.optimizer, network.parameters())
    return Learner(network, loss_fn, optimizer, clipping(job.grad_clip, network.parameters()))


def _follow(schedule: "Schedule", report: Reporter) -> Follow:
    """Who else must know of changed settings."""

    def follow(changed: TrainJob, step: int) -> None:
        schedule.follow(changed, step, report.elapsed_s)
        report.follow(changed, schedule.num_steps)

    return follow


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
        self.num_steps = self._count(job)
        """Updates that the job will make; None when time decides."""
        self.position = {"step": 0, "epoch": 0, "batch": 0}
        """Updates done, the epoch that training is in, and the batches taken of it."""

    @property
    def newest(self) -> tuple[int, int]:
        """The newest step that is done, 0 before the first, and its epoch."""
        return max(self.position["step"] - 1, 0), self.position["epoch"]

    def state(self) -> State:
        """The position, and what the order of the rows hangs on."""
        return {**self.position, **self._order()}

    def restore(self, state: State) -> None:
        """Go on behind the batches that were taken.

        Raises:
            CheckpointMismatch: the rows would come in another order, or in other batches.
        """
        for name, mine in self._order().items():
            if state[name] != mine:
                detail = f"{name} is {state[name]} in the checkpoint and {mine} in the job: its"
                raise CheckpointMismatch(f"{detail} rows would not be those that are still due.")
        self.position = {name: int(state[name]) for name in self.position}
        if self.position["epoch"] * self._per_epoch + self.position["batch"] != state["step"]:
            raise CheckpointMismatch(f"The position {self.position} is none of the job.")

    def _order(self) -> dict[str, Any]:
        data = self._job.data
        return {
            "seed": self._job.seed,
            "num_rows": self._rows.num_rows,
            "batch_size": data.batch_size,
            "drop_last": data.drop_last,
            "shuffle": self._shuffles,
        }

    def steps(self) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Step, epoch and batch from the position on, for ever; none when all are done."""
        size, drop_last = self._job.data.batch_size, self._job.data.drop_last
        step, first = self.position["step"], self.position["batch"]
        if self.num_steps is not None and step >= self.num_steps:
            return
        for epoch in itertools.count(self.position["epoch"]):
            order = (self._job.seed, epoch) if self._shuffles else None
            batches = self._rows.epoch(size, drop_last=drop_last, order=order, first=first)
            for number, batch in enumerate(batches, start=first + 1):
                self.position = {"step": step + 1, "epoch": epoch, "batch": number}
                yield step, epoch, batch
                step += 1
            first = 0

    def follow(self, job: TrainJob, step: int, elapsed_s: float) -> None:
        """Take a job whose settings changed, after so many updates and seconds.

        Raises:
            SpecProblems: it would have ended already.
        """
        num_steps, seconds = self._count(job), job.stop.seconds
        if num_steps is not None and num_steps < step:
            part = "epochs" if job.stop.epochs else "steps"
            detail = f"the job has made {step} steps already, and would end after {num_steps}"
            raise one(f"/set/stop.{part}", detail, "too_small")
        if seconds is not None and seconds < elapsed_s and seconds != self._job.stop.seconds:
            detail = f"the job has trained for {elapsed_s:.1f} s already"
            raise one("/set/stop.seconds", detail, "too_small")
        self._job, self.num_steps = job, num_steps

    def _count(self, job: TrainJob) -> int | None:
        return job.stop.epochs * self._per_epoch if job.stop.epochs else job.stop.steps

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
        by_default = None if when.every_steps else 1
        return self._falls(step, when.every_epochs or by_default, when.every_steps)

    def _falls(self, step: int, every_epochs: int | None, every_steps: int | None) -> bool:
        if every_steps is not None:
            return (step + 1) % every_steps == 0
        return every_epochs is not None and (step + 1) % (every_epochs * self._per_epoch) == 0
