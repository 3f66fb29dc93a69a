"""Split a step into micro-batches whose losses add up to the loss of one large batch.

The loss of a micro-batch is divided by the denominator of the whole step, so its backward pass
gives its part of the gradients of the step's loss. If that denominator depends on targets or
lengths, it is computed from them before the first forward pass. The micro-batches of the step are
then in memory together, without activations.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.core.tensor_names import host_lengths_of, root
from engine.data.batches.batch import Batch
from engine.distributed.group import ALONE, Group
from engine.losses.loss_sums import OF_CLASSES, Denominator, LateDenominator, StepPart, Term, total
from engine.losses.losses import Losses
from engine.network.layers import LayerFailed
from engine.network.lengths import Lengths
from engine.network.network import Network
from glasshouse.spec import DenseField, DenseSequenceField, IntegerField, Loss, TrainJob


class MicroBatch(NamedTuple):
    """A batch and its place in its step."""

    batch: Batch
    part: StepPart | None
    """Its denominators; None: it is the whole step."""
    is_last: bool
    """Whether it is the last of its step."""

    @property
    def has_rows(self) -> bool:
        """Whether its rows count, and are not those of another process."""
        return self.part is None or self.part.counts


_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)  # pyright: ignore[reportPrivateUsage]


class MicroBatches:
    """Gives each micro-batch of a job's steps its place in the step."""

    def __init__(self, job: TrainJob, loss_fn: Losses, group: Group = ALONE) -> None:
        """``group``: the processes that share each step."""
        self._group = group
        self._losses = [*zip(job.losses, loss_fn.terms, strict=True)]
        targets = [_targets_of(job, item, term) for item, term in self._losses]
        self._read = tuple(dict.fromkeys(chain.from_iterable(targets)))
        self.are_rows = not self._read
        """Whether all denominators are proportional to rows."""
        self._job = job

    def of_step(
        self, batches: Iterator[Batch], sizes: Sequence[int], num_rows: int
    ) -> Iterator[MicroBatch]:
        """Yield the next batches, with ``sizes`` rows, as the micro-batches of a step.

        ``num_rows``: the rows of the step in all processes. Size 0: the process has no row of a
        batch.
        """
        is_local = self._group.is_alone or self.are_rows  # else all processes exchange below
        if is_local and sizes == [num_rows]:
            yield MicroBatch(next(batches), None, is_last=True)
            return
        if self.are_rows:
            owns = [(float(size),) * len(self._losses) for size in sizes]
            are_late = (False,) * len(self._losses)
            whole = (float(num_rows),) * len(self._losses)
        else:
            held = deque(islice(batches, len(sizes)))
            owns = [self._own(*both) for both in zip(held, sizes, strict=True)]
            are_late = self.are_late
            batches = (held.popleft() for _ in sizes)
            whole = self._of_all(total(owns))
        empty: list[dict[int, Tensor]] = [{} for _ in whole]
        for number, own in enumerate(owns):
            late = tuple(
                LateDenominator(number, len(owns), noted) if is_late else None
                for noted, is_late in zip(empty, are_late, strict=True)
            )
            counts = sizes[number] > 0
            part = StepPart(own, whole, late, counts)
            yield MicroBatch(next(batches), part, is_last=number + 1 == len(owns))

    def _own(self, batch: Batch, size: int) -> tuple[Denominator, ...]:
        found = self.denominators(batch, size)
        return found if size else tuple(0 * item for item in found)

    def _of_all(self, own: tuple[Denominator, ...]) -> tuple[Denominator, ...]:
        """Return the denominators of a step over all processes.

        The plan refuses those that are known only after the forward pass (`are_late`).
        """
        if self._group.is_alone:
            return own
        device = next((x.device for x in own if isinstance(x, Tensor)), None)
        numbers = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in own]
        sums = self._group.sum_of_rows(torch.stack(numbers)).unbind()
        both = zip(own, sums, strict=True)
        return tuple(x if isinstance(before, Tensor) else float(x) for before, x in both)

    @cached_property
    def are_late(self) -> tuple[bool, ...]:
        """For each loss, whether its denominator needs the forward pass: rows are used instead."""
        known = {*self._job.data.fields} | {*self._known}
        return tuple(
            any(root(name) not in known for name in _targets_of(self._job, item, term))
            for item, term in self._losses
        )

    @cached_property
    def _known(self) -> list[str]:
        """The layers that targets and lengths come from and that can be computed before a step."""
        layers = sorted({root(name) for name in self._read} - set(self._job.data.fields))
        return [layer for layer in layers if is_known_before(self._job, layer)]

    @cached_property
    def _network(self) -> Network | None:
        """The network that computes targets and lengths that are not fields; None: all are."""
        known = self._known
        return Network(self._job.network, known, prune=True) if known else None

    def denominators(self, batch: Mapping[str, Tensor], num_rows: int) -> tuple[Denominator, ...]:
        """Return the denominators of each loss over a batch of ``num_rows`` rows.

        Raises:
            LayerFailed: targets cannot be computed.
        """
        values = batch
        if self._network is not None:
            with torch.no_grad():
                values = self._network(batch)
        try:
            return tuple(self._of(item, term, values, num_rows) for item, term in self._losses)
        except Exception as cause:
            raise LayerFailed("loss", cause) from cause

    def _of(
        self, item: Loss, term: Term, values: Mapping[str, Tensor], num_rows: int
    ) -> Denominator:
        if any(name not in values for name in _targets_of(self._job, item, term)):
            return float(num_rows)  # only the forward pass computes them
        operands: list[object] = [values.get(name) for name in item.inputs]
        if item.lengths:
            on_host = values.get(host_lengths_of(item.lengths))
            operands.append(Lengths(values[item.lengths], on_host))
        return term.denominator(operands, num_rows)


def is_known_before(job: TrainJob, layer: str) -> bool:
    """Whether a layer is computed from fields by layers without parameters and without dropout.

    The output of other layers is known only in the forward pass.
    """
    with torch.device("meta"):
        found = Network(job.network, [layer], prune=True)
    return not (found.state_dict() or any(isinstance(m, _RANDOM) for m in found.modules()))


def _targets_of(job: TrainJob, item: Loss, term: Term) -> list[str]:
    """Return what the denominator of a loss is computed from; empty if that is the rows."""
    if term.is_sum:
        return []
    found = [item.lengths] if item.lengths else []
    is_of_classes = isinstance(term.criterion, OF_CLASSES)
    if is_of_classes and not _counts_all(job, item, term.criterion):
        found.append(item.inputs[1])
    return found


def _counts_all(job: TrainJob, item: Loss, criterion: nn.Module) -> bool:
    """Whether all rows' targets count equally: none is ignored, and no class has a weight."""
    field = job.data.fields.get(item.inputs[1])
    if isinstance(field, DenseField | DenseSequenceField):
        return True  # probabilities
    if not isinstance(field, IntegerField) or field.dim is None:
        return False
    if isinstance(criterion.weight, Tensor):
        return False
    return not 0 <= int(criterion.ignore_index) < field.dim  # pyright: ignore[reportArgumentType]
