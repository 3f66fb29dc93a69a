"""Run batches through a network without training it, also if its layers are in other processes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from torch import Tensor

from engine.data.batches.batch import Batch
from engine.learner.learner import Learner
from engine.probes.hooks import StepWatcher, Unwatched

if TYPE_CHECKING:
    from engine.learner.pipelined import Pipelined

Take = Callable[[Batch, Mapping[str, Tensor]], None]
"""Receives a batch and its values."""
Batches = Iterable[tuple[Batch, bool]]
"""Batches, each with whether it counts: if not, its rows are another process's."""
_AT_ONCE = 4
"""How many batches for each process run through a pipeline at once."""


def predict(
    learner: Learner, batches: Batches, take: Take, watched: StepWatcher | Unwatched | None = None
) -> None:
    """Run batches and call ``take`` with the values of each that counts.

    In a pipeline, only the process with the last stage has values. ``watched`` is entered around
    the first batch.
    """
    watched = Unwatched() if watched is None else watched
    if learner.pipeline is not None:
        size = _AT_ONCE * learner.group.num_peers
        for some in _chunks(batches, size):
            _through_stages(learner.pipeline, some, take, watched)
            watched = Unwatched()
        return
    for batch, counts in batches:
        with watched if counts else contextlib.nullcontext():
            values = learner.network(batch.tensors)
        if counts:
            watched = Unwatched()
            take(batch, values)


def values_of(learner: Learner, batch: Batch, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Return some values of a batch in evaluation mode. Collective in a pipeline."""
    was_training = learner.network.training
    learner.network.eval()
    found: dict[str, Tensor] = {}

    def take(_batch: Batch, values: Mapping[str, Tensor]) -> None:
        found.update({name: values[name] for name in names})

    try:
        predict(learner, [(batch, True)], take)
    finally:
        learner.network.train(was_training)
    return found if learner.pipeline is None else learner.group.of_rows(found)


def _through_stages(
    pipeline: "Pipelined",
    some: Sequence[tuple[Batch, bool]],
    take: Take,
    watched: StepWatcher | Unwatched,
) -> None:
    def before(number: int, _stage: int) -> None:
        watched.look(on=number == 0)

    def after(number: int, values: Mapping[str, Tensor]) -> None:
        batch, counts = some[number]
        if counts:
            take(batch, values)

    with watched:
        pipeline.run(
            [batch for batch, _ in some],
            before=before,
            after=after,
            before_trial=lambda: watched.look(on=False),
            trains=False,
        )


def _chunks(batches: Batches, size: int) -> Iterator[list[tuple[Batch, bool]]]:
    coming = iter(batches)
    while some := [*islice(coming, size)]:
        yield some
