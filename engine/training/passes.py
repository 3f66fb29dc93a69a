"""The forward and the backward passes of a step, and those who look at them."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from engine.core.timing import REPORT
from engine.data.batches.batch import Batch
from engine.distributed.data_parallel import seed_step
from engine.guards.guard import Guard
from engine.learner.learner import Learner
from engine.losses.losses import loss_of
from engine.losses.micro_batches import MicroBatch
from engine.probes.hooks import StepWatcher, Unwatched
from engine.probes.probe_set import Probes
from engine.training.report import Reporter
from glasshouse.spec import TrainJob

if TYPE_CHECKING:
    from engine.learner.pipelined import Pipelined

UNWATCHED = Unwatched()


class Passes:
    """Runs the passes of each step."""

    def __init__(
        self, job: TrainJob, learner: Learner, probes: Probes, guard: Guard, report: Reporter
    ) -> None:
        self._seed = job.seed
        self._learner = learner
        self._probes = probes
        self._guard = guard
        self._report = report
        self._clock = probes.clock
        self.batch: Batch | None = None
        """The newest batch whose passes have begun."""

    def run(self, step: int, batches: Iterable[MicroBatch]) -> StepWatcher | Unwatched:
        """Run the passes of a step; return who watches its update too."""
        if self._learner.pipeline is None:
            return self._one_by_one(step, batches)
        return self._through_stages(self._learner.pipeline, step, [*batches])

    def _one_by_one(self, step: int, batches: Iterable[MicroBatch]) -> StepWatcher | Unwatched:
        learner, clock = self._learner, self._clock
        seen: StepWatcher | Unwatched = UNWATCHED
        learner.seed(self._seed, step)
        for micro_batch in batches:
            batch, part, is_last = micro_batch
            self.batch, has_rows = batch, micro_batch.has_rows
            clock.mark("data")
            self._guard.begin(batch, part)
            seen = self._probes.at(step, batch, has_rows=has_rows) if is_last else UNWATCHED
            with (
                seen,
                self._report.derived.at(step, batch, is_last=is_last, has_rows=has_rows),
            ):
                clock.mark("probes")
                values = learner.forward(batch, is_last=is_last, has_rows=has_rows)
                loss = loss_of(learner.loss_fn, values, part)
                clock.mark("forward")
                self._report.take(step, micro_batch, loss, values)
                if is_last:
                    self._report.send()
                clock.mark(REPORT)
                learner.backward(loss.total, clock, is_last=is_last)
            clock.mark("probes")
        return seen

    def _through_stages(
        self, pipeline: "Pipelined", step: int, batches: list[MicroBatch]
    ) -> StepWatcher | Unwatched:
        """Run all micro-batches of a step through the stages of a pipeline.

        A process that waits for another stage does so between two passes of its own.
        """
        clock, last = self._clock, batches[-1]
        self.batch = last.batch
        clock.mark("data")
        seeds = [
            partial(seed_step, self._seed, step, self._learner.group, number)
            for number in range(len(batches))
        ]
        for one, seed_stage in zip(batches, seeds, strict=True):
            self._guard.begin(one.batch, one.part, seed_stage)
        seen = self._probes.at(step, last.batch, has_rows=last.has_rows)
        derived = self._report.derived
        with seen, derived.at(step, last.batch, has_rows=last.has_rows):

            def look(*, on: bool) -> None:
                seen.look(on=on)
                derived.look(on=on)

            clock.mark("probes")

            def before(number: int, stage: int) -> None:
                look(on=batches[number] is last)
                seeds[number](stage)

            def after(number: int, values: Mapping[str, Tensor]) -> Tensor:
                one = batches[number]
                loss = loss_of(self._learner.loss_fn, values, one.part)
                self._report.take(step, one, loss, values)
                return loss.total

            micro_batches = [one.batch for one in batches]
            pipeline.run(
                micro_batches,
                before=before,
                after=after,
                before_trial=partial(look, on=False),
                mark=clock.mark,
            )
        self._report.take_none(step, batches)
        self._report.send()
        clock.mark("probes")
        return seen
