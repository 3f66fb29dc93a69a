"""Split a step into micro-batches whose losses add up to the loss of one large batch.

The loss of a micro-batch is divided by the denominator of the whole step, so its backward pass
gives its part of the gradients of the step's loss. If that denominator depends on targets or
lengths, it is computed from them before the first forward pass. The micro-batches of the step are
then in memory together, without activations.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor, nn

from engine.core.tensor_names import host_lengths_of, root
from engine.data.batches.batch import Batch
from engine.losses.loss_sums import OF_CLASSES, Denominator, LateDenominator, StepPart, Term, total
from engine.losses.losses import Losses
from engine.network.layers import LayerFailed
from engine.network.lengths import Lengths
from engine.network.network import Network
from glasshouse.spec import DenseField, DenseSequenceField, IntegerField, Loss, TrainJob

MicroBatch = tuple[Batch, StepPart | None, bool]
"""A batch, its place in the step (None: it is the whole step), and whether it is the last."""
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)  # pyright: ignore[reportPrivateUsage]


class MicroBatches:
    """Gives each micro-batch of a job's steps its place in the step."""

    def __init__(self, job: TrainJob, loss_fn: Losses) -> None:
        self._denominators = Denominators(job, loss_fn)

    def of_step(self, batches: Iterator[Batch], sizes: Sequence[int]) -> Iterator[MicroBatch]:
        """Yield the next batches, with ``sizes`` rows, as the micro-batches of a step."""
        if len(sizes) == 1:
            yield next(batches), None, True
        elif self._denominators.are_rows:
            yield from self._by_rows(batches, sizes)
        else:
            yield from self._by_targets(batches, sizes)

    def _by_rows(self, batches: Iterator[Batch], sizes: Sequence[int]) -> Iterator[MicroBatch]:
        number = self._denominators.number
        whole = (float(sum(sizes)),) * number
        for at, size in enumerate(sizes, 1):
            yield next(batches), StepPart((float(size),) * number, whole), at == len(sizes)

    def _by_targets(self, batches: Iterator[Batch], sizes: Sequence[int]) -> Iterator[MicroBatch]:
        held = deque(islice(batches, len(sizes)))
        both = zip(held, sizes, strict=True)
        owns = [self._denominators.of(batch, size) for batch, size in both]
        whole = total(owns)
        empty: list[dict[int, Tensor]] = [{} for _ in whole]
        for number, own in enumerate(owns):
            late = [LateDenominator(number, len(owns), noted) for noted in empty]
            both = zip(late, self._denominators.are_late, strict=True)
            batch = held.popleft()
            part = StepPart(own, whole, tuple(item if is_late else None for item, is_late in both))
            yield batch, part, not held


class Denominators:
    """Computes the denominators of a micro-batch's losses before its forward pass."""

    def __init__(self, job: TrainJob, loss_fn: Losses) -> None:
        self._losses = [*zip(job.losses, loss_fn.terms, strict=True)]
        self.number = len(self._losses)
        self._read = tuple(
            dict.fromkeys(
                name for item, term in self._losses for name in _targets_of(job, item, term)
            )
        )
        self.are_rows = not self._read
        """Whether all of them are proportional to rows."""
        self._job = job

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

    def of(self, batch: Mapping[str, Tensor], num_rows: int) -> tuple[Denominator, ...]:
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
            operands.append(
                Lengths(values[item.lengths], values.get(host_lengths_of(item.lengths)))
            )
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
    if _is_of_classes(term) and not _counts_all(job, item, term.criterion):
        found.append(item.inputs[1])
    return found


def _is_of_classes(term: Term) -> bool:
    return isinstance(term.criterion, OF_CLASSES)


def _counts_all(job: TrainJob, item: Loss, criterion: nn.Module) -> bool:
    """Whether all rows' targets count equally: none is ignored, and no class has a weight."""
    field = job.data.fields.get(item.inputs[1])
    if isinstance(field, DenseField | DenseSequenceField):
        return True  # probabilities
    if (
        not isinstance(field, IntegerField)
        or field.dim is None
        or isinstance(criterion.weight, Tensor)
    ):
        return False
    return not 0 <= int(criterion.ignore_index) < field.dim  # pyright: ignore[reportArgumentType]
