"""The training loop. Knows torch; knows nothing of HTTP, SQL or queues.

Steps are 0-based and count optimizer updates.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from engine.checkpoint.stage_states import OfStages
from engine.checkpoint.training_state import Generators, OptimizerState, Weights, lay_out_state
from engine.core.precision import name_of
from engine.core.readback import Readback
from engine.core.snapshot import Parts, Stateful
from engine.core.timing import Timing, Work
from engine.data.batches.rows import Rows
from engine.data.columns.prepared import PART
from engine.distributed.group import ALONE, Group
from engine.guards.guard import Guard
from engine.learner.averaging import AveragedWeights
from engine.learner.learner import Learner, learner_of
from engine.network.hidden_state import alone
from engine.probes.hooks import WatchedTraining
from engine.probes.probe_set import Probes
from engine.probes.tensors.captures import Captures
from engine.probes.watched.requested import RequestedProbes
from engine.training.commands import Commands
from engine.training.control import Decisions, Predictions, RunControl
from engine.training.failures import StepFailed
from engine.training.passes import Passes
from engine.training.report import Outputs, Reporter
from engine.training.schedule import Schedule
from engine.training.start import Start
from glasshouse.spec import TrainJob

_OF_LAYERS = {"model", "optimizer", "newest", "averages"}
"""The parts of a checkpoint that have something for each layer."""


class End(NamedTuple):
    """How a run ended."""

    state: str
    """``succeeded``, ``failed``, or the state that was requested."""
    reason: str | None = None
    """Why training ended early by its own spec, if it did."""


def train(  # noqa: PLR0913, PLR0915 (what a job is, what it reads, who listens; the loop)
    job: TrainJob,
    rows: Rows,
    validation: Mapping[str, Rows],
    *,
    control: RunControl,
    out: Outputs,
    watched: RequestedProbes | None = None,
    work: Work = Work(),  # noqa: B008 (frozen)
    start: Start | None = None,
    parts: int = 1,
    group: Group = ALONE,
    predictions: Predictions | None = None,
) -> End:
    """Train a network until the end of its spec or until a stop is requested.

    ``validation``: the rows of evaluations, by the prefix of their series (`Data.validations`).
    ``watched`` are the probes from the first step on; None: those of the spec. ``work``: the
    operations of a row and the peak of the devices, if known. ``start`` is the checkpoint to begin
    with. ``parts``: run each batch in this many micro-batches; the step is the same as with the
    whole batch. ``group``: the processes that train the network together; with several,
    ``control`` is what they share. ``predictions``: what answers requests for predictions; None:
    this process does not.

    Raises:
        CheckpointMismatch: the checkpoint is of another job.
    """
    torch.manual_seed(job.seed)
    learner = learner_of(job, rows.device, group)
    loss_fn, optimizer, clip = learner[1:4]
    schedule = Schedule(job, rows, loss_fn, parts * job.num_micro_batches, group)
    _settle(job, learner, rows, start, out, schedule.pass_size)
    learner = learner.replicated(lambda: next(rows.in_order(schedule.pass_size)))
    probes = _probes(job, learner, rows, out, control)
    probes.watch(watched, 0 if start is None else start.step)
    clock = probes.clock
    guard = Guard(job, learner, rows, readback=probes.readback, clock=clock, emit=out.emit)
    timing = Timing(clock, work)
    decisions = control if isinstance(control, Decisions) else None
    report = Reporter(job, learner, validation, probes, out, timing, schedule, decisions)
    report.saver.parts |= _saved(learner, rows, schedule, report, probes, guard)
    if start is not None:
        start.restore(report.saver.parts)
        if start.has_said_all and schedule.is_over(start.step - 1, report.elapsed_s):
            return End("succeeded", schedule.reason)

    learner.share_copies()
    if predictions is not None:
        predictions.use(report.saver.parts["model"], rows.prepared, clock)
    commands = _commands(job, learner, control, out, schedule, report)
    passes = Passes(job, learner, probes, guard, report)
    step, epoch = schedule.newest
    state = "succeeded"
    try:
        for step, epoch, batches in schedule.steps():
            _predict(predictions, control, step)
            probes.watch(control.wanted, step)
            report.use_threads(control.threads, step)
            watcher = passes.run(step, batches)
            report.receive(step)
            guard.check(step, epoch, report.loss)
            clock.mark("probes")
            clipped = {} if clip is None else clip()
            watcher.step(learner.update, clock.mark)
            learner.share_copies()
            optimizer.zero_grad(set_to_none=True)
            clock.mark("optimizer")

            num_rows = report.step(step, epoch, clipped)
            learner.follow(
                step,
                num_rows,
                ends_epoch=schedule.ends_epoch,
                has_skipped=guard.has_skipped,
                clock=clock,
            )
            asked = commands.at(step + 1) if control.orders else ()
            if schedule.is_over(step, report.elapsed_s):
                break
            if schedule.evaluates_after(step) or "evaluate" in asked:
                schedule.judge(report.evaluate(step, epoch), step, learner.rate)
            if schedule.has_stopped:
                break
            if control.cancel_requested:  # after the evaluation, which would not be repeated
                state = control.ends_as
                break
            due = schedule.saves_after(step)
            report.keep(schedule.position, due=due, asked="checkpoint" in asked)
        report.finish(step, epoch, schedule.position, state=state)
        _predict(predictions, control, schedule.position["step"], is_last=True)
        probes.close()
    except Exception as error:
        probes.close()
        report.abandon(step, epoch)
        raise StepFailed(step, guard.blame(error, passes.batch)) from error
    return End(state, schedule.reason if state == "succeeded" else None)


def _predict(
    predictions: Predictions | None, control: RunControl, step: int, *, is_last: bool = False
) -> None:
    """Answer requests for predictions, if there ever was one. ``step``: the updates so far."""
    if predictions is not None and (asked := control.listen) is not None:
        predictions.turn(asked, step, is_last=is_last)


def _saved(
    learner: Learner,
    rows: Rows,
    schedule: Schedule,
    report: Reporter,
    probes: Probes,
    guard: Guard,
) -> Parts:
    """Return all parts of a checkpoint. Anything with state is added here."""
    averages = learner.averages
    newest = Weights(learner.network)
    # With averages, the weights saved for use are not the trained ones.
    model = newest if averages is None else AveragedWeights(learner.network, averages)
    saved: dict[str, Stateful | None] = {
        "position": schedule,
        "tuned": learner.tuned,  # its memory format also applies to the optimizer state
        "model": model,
        "optimizer": OptimizerState(learner.optimizer, learner.network),
        "report": report,
        "derived": report.derived,
        "probes": probes,
        "guard": guard,
        "generators": Generators(),
        "newest": None if averages is None else newest,
        "averages": averages,
        "scaler": learner.scaling,
        "clip": learner.clip,
        PART: rows.prepared,
        "carried": learner.hidden_state,
        "scheduler": learner.rate,
        "early": schedule.early,
    }
    parts = {name: part for name, part in saved.items() if part is not None}
    if not learner.network.is_staged:
        return parts
    names = learner.network.parameter_names
    return {
        name: OfStages(part, learner.group, names) if name in _OF_LAYERS else part
        for name, part in parts.items()
    }


def _settle(
    job: TrainJob,
    learner: Learner,
    rows: Rows,
    start: Start | None,
    out: Outputs,
    pass_size: int,
) -> None:
    """Choose the settings that the spec leaves to a trial, if the job has not chosen yet."""
    if learner.tuned is not None and (start is None or start.how != "resume"):
        with alone(learner.hidden_state):
            learner.tuned.choose(job, learner.loss_fn, rows, out.emit, pass_size)
        lay_out_state(learner.optimizer)


def _commands(
    job: TrainJob,
    learner: Learner,
    control: RunControl,
    out: Outputs,
    schedule: Schedule,
    report: Reporter,
) -> Commands:
    """Create the commands of a job; those requested before the first step are already applied."""
    first = schedule.position["step"]
    if job.precision == "auto":
        to = name_of(learner.network.low_precision)
        report.settle("precision", "auto", to, by="device", step=first)
    size = -(-job.data.batch_size // job.num_micro_batches)
    report.settle("batch_size", size, schedule.pass_size, by="guards.memory", step=first)

    def follow(changed: TrainJob, step: int) -> None:
        schedule.follow(changed, step, report.elapsed_s)
        report.follow(changed)

    commands = Commands(job, learner, control.orders, first=first, follow=follow, emit=out.emit)
    commands.at(first)
    return commands


def _probes(
    job: TrainJob, learner: Learner, rows: Rows, out: Outputs, control: RunControl
) -> Probes:
    training = WatchedTraining(
        learner.loss_fn, learner.clip is not None, learner.scaling, learner.optimizer
    )
    captures = Captures(
        out.directory,
        out.emit,
        ring=out.ring,
        flush=out.flush,
        is_over=lambda: control.cancel_requested,
    )
    return Probes(
        learner.network,
        job.probes,
        emit=out.emit,
        readback=Readback(
            learner.home or rows.device,
            is_home=learner.home is not None or learner.is_offloaded,
        ),
        out_dir=out.directory,
        training=training,
        captures=captures,
        group=learner.group,
    )
