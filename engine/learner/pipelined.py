"""Pipeline parallelism: each process has the layers of its stages, through which batches pass.

torch's ``torch.distributed.pipelining`` runs the passes of the micro-batches in the order of a
schedule and sends values and their gradients between stages. Its buffers have fixed shapes, so
there is a schedule for each shape of micro-batches. The first time, the stages run one after
another and tell each other the shapes of their values.

Each process reads the rows itself: values of layers are all that passes between stages. The loss of
a micro-batch is already its part of the step's loss, so gradients are summed and not averaged.
"""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS

from engine.core.precision import dtype_name
from engine.core.shards import is_sharded
from engine.core.timing import COLLECTIVE
from engine.data.batches.batch import Batch
from engine.distributed.group import Group
from engine.distributed.waiting import waiting
from engine.learner.side_effects import untouched
from engine.network.network import Network
from engine.network.pipeline_stages import Stage

MAX_SCHEDULES = 8
"""The most shapes of micro-batches whose buffers are kept."""
_BUCKET_BYTES = 25 * 2**20
"""The most bytes of gradients that are summed with one message, as in DistributedDataParallel."""

Before = Callable[[int, int], None]
"""Called before the forward pass of a micro-batch in a stage, with both numbers."""
After = Callable[[int, Mapping[str, Tensor]], Tensor | None]
"""Called with a micro-batch's number and its values in the last stage; returns its loss."""
Mark = Callable[[str], None]
"""Receives the part of a step whose time has just passed."""
Kind = tuple[Any, ...]
"""The shapes and dtypes of a micro-batch, and whether it trains."""


class Passing(NamedTuple):
    """A value that passes between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor of this kind."""
        made = torch.empty(self.shape, dtype=self.dtype, device=device)
        return made.requires_grad_(self.has_gradient)


@dataclass
class Run:
    """The micro-batches that run now."""

    batches: Sequence[Batch]
    first: int
    """The number of the first one in its step."""
    before: Before
    after: After
    mark: Mark


class TimedStage(PipelineStage):
    """A stage that measures its passes; the rest of a step is communication and waiting."""

    mark: Mark
    before_backward: Callable[[int], None]

    def forward_one_chunk(self, *args: Any, **keywords: Any) -> Any:
        """Run the forward pass of a micro-batch."""
        with self._pass("forward"):
            return super().forward_one_chunk(*args, **keywords)

    def backward_one_chunk(self, *args: Any, **keywords: Any) -> None:
        """Run the backward pass of a micro-batch."""
        self.before_backward(self.stage_index)
        with self._pass("backward"):
            super().backward_one_chunk(*args, **keywords)

    @contextlib.contextmanager
    def _pass(self, part: str) -> Generator[None]:
        self.mark(COLLECTIVE)
        waiting.is_between_passes = False
        yield
        waiting.is_between_passes = True
        self.mark(part)


class StageModule(nn.Module):
    """One stage as torch's schedules call it: with the number of a micro-batch."""

    def __init__(self, pipelined: "Pipelined", stage: Stage) -> None:
        super().__init__()
        self._run = lambda number, given: pipelined.run_stage(stage, number, given)

    def forward(self, *given: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        """Compute what the stage gives of what the previous one has given."""
        return self._run(int(number), given)


class Pipelined:
    """A network whose stages are in several processes."""

    def __init__(
        self,
        network: Network,
        num_stages: int,
        device: torch.device,
        group: Group,
        schedule: Literal["gpipe", "1f1b", "interleaved"],
        shared: Mapping[str, Sequence[int]],
    ) -> None:
        """Create what runs the stages of this process.

        Args:
            network: has the stages of this process only.
            num_stages: the number of all stages.
            device: the device of this process.
            group: the processes of the job.
            schedule: the order of the passes.
            shared: the modules whose parameters layers of other processes share: the places of the
                process that trains them and of those that have copies.
        """
        self._network = network
        self._num_stages = num_stages
        self._device = device
        self._group = group
        self._schedule = schedule
        self._shared = shared
        self._rows = group.same_rows()
        self._base = group.rank - group.place
        self._known: dict[Kind, dict[int, list[Passing]]] = {}
        """By the kind of micro-batches: what passes out of each stage, by its number."""
        self._schedules: OrderedDict[tuple[Kind, int], Any] = OrderedDict()
        self._now: Run | None = None
        self._num_left = Counter[int]()
        """The backward passes of each stage that the present step has left."""
        self._failure: Exception | None = None
        """What a layer raised, which torch hides in an exception of its own."""

    # --- running ----------------------------------------------------------------------------

    def run(
        self,
        batches: Sequence[Batch],
        *,
        before: Before,
        after: After,
        before_trial: Callable[[], object] = lambda: None,
        mark: Mark = lambda _: None,
        trains: bool = True,
    ) -> None:
        """Run the micro-batches of a step through all stages. Collective.

        Args:
            batches: the micro-batches.
            before: called before each forward pass, with the numbers of micro-batch and stage.
            after: called after each forward pass of the last stage.
            before_trial: called before passes that only find out shapes, for which nothing else is
                called. They come before the first micro-batch of a new shape, so also between two
                micro-batches.
            mark: called after each part of the step.
            trains: whether to run backward passes too. The gradients of the parameters are then
                complete when this returns.
        """
        first, self._failure = 0, None
        self._num_left = Counter(dict.fromkeys(self._network.stages, len(batches)))
        kinds = groupby(batches, lambda batch: self._kind(batch, trains=trains))
        for kind, alike in kinds:
            some = [*alike]
            if kind not in self._known:
                before_trial()
                self._known[kind] = self._tried(some[0], trains=trains)
            self._now = Run(some, first, before, after, mark)
            schedule = self._schedule_of(kind, len(some), trains=trains)
            waiting.is_between_passes = True
            try:
                self._step(schedule, len(some), trains=trains)
            except Exception:
                if self._failure is not None:
                    raise self._failure from self._failure.__cause__
                raise
            finally:
                waiting.is_between_passes = False
            first += len(some)
        self._now = None
        if self._network.sharded is not None:
            self._network.sharded.free()
        if trains:
            self._collect_gradients()
            self._sum_gradients()
        mark(COLLECTIVE)

    def run_stage(self, stage: Stage, number: int, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the forward pass of a stage for a micro-batch of the present run."""
        run = self._now
        assert run is not None  # noqa: S101 (only a schedule calls it)
        try:
            return self._run_stage(run, stage, run.first + number, run.batches[number], given)
        except Exception as error:
            self._failure = error
            raise

    def _run_stage(
        self, run: Run, stage: Stage, number: int, batch: Batch, given: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        run.before(number, stage.number)
        values = self._values(stage, batch, given)
        if stage.number + 1 < self._num_stages:
            return tuple(values[name].contiguous() for name in stage.gives)
        loss = run.after(number, values)
        return (torch.zeros(1, device=self._device) if loss is None else loss.reshape(1),)

    def _values(self, stage: Stage, batch: Batch, given: Sequence[Tensor]) -> dict[str, Tensor]:
        if stage.overwrites:  # torch's buffers, which must keep their values
            given = [item.clone() for item in given]
        read = dict(zip(stage.reads, given, strict=True))
        return self._network.run_stage(stage, {**batch.tensors, **read})

    def _step(self, schedule: Any, num: int, *, trains: bool) -> None:
        numbers = torch.arange(num)
        if trains:
            schedule.step(number=numbers, target=numbers)
            return
        schedule.step(number=numbers)

    def _kind(self, batch: Batch, *, trains: bool) -> Kind:
        shapes = tuple(
            (name, tuple(item.shape), item.dtype) for name, item in batch.tensors.items()
        )
        return (trains, self._network.training, shapes)

    # --- schedules --------------------------------------------------------------------------

    def _schedule_of(self, kind: Kind, num: int, *, trains: bool) -> Any:
        """Return the schedule of ``num`` micro-batches of a kind. Collective."""
        key = kind, num
        if key in self._schedules:
            self._schedules.move_to_end(key)
            return self._schedules[key]
        while len(self._schedules) >= MAX_SCHEDULES:
            self._schedules.popitem(last=False)
        stages = [self._stage(item, self._known[kind]) for item in self._network.stages.values()]
        found = self._schedules[key] = self._made(stages, num, trains=trains)
        return found

    def _stage(self, stage: Stage, passing: Mapping[int, Sequence[Passing]]) -> PipelineStage:
        reads = passing.get(stage.number - 1, ())
        gives = passing.get(stage.number) or [Passing((1,), torch.float32, has_gradient=False)]
        # made of no memory: torch takes shapes and dtypes of them
        meta = torch.device("meta")
        made = TimedStage(
            StageModule(self, stage),
            stage.number,
            self._num_stages,
            self._device,
            input_args=tuple(item.empty(meta) for item in reads),
            output_args=tuple(item.empty(meta) for item in gives),
            group=self._rows,
        )
        made.mark = self._mark
        made.before_backward = self._before_backward
        return made

    def _before_backward(self, stage: int) -> None:
        self._num_left[stage] -= 1
        if self._network.sharded is not None:
            self._network.sharded.begin_backward(stage, is_last=not self._num_left[stage])

    def _mark(self, part: str) -> None:
        if self._now is not None:
            self._now.mark(part)

    def _made(self, stages: list[Any], num: int, *, trains: bool) -> Any:
        options: dict[str, Any] = {"scale_grads": False}
        if trains:
            options["loss_fn"] = lambda output, _: output[0].squeeze(0)
        size = self._group.num_peers
        if len(stages) > 1:
            is_even = num % max(1, num // size) == 0
            if trains and self._schedule == "interleaved" and is_even and num >= size:
                return ScheduleInterleaved1F1B(stages, num, **options)
            return ScheduleLoopedBFS(stages, num, **options)
        if trains and self._schedule == "1f1b" and num >= self._num_stages:
            return Schedule1F1B(stages[0], num, **options)
        return ScheduleGPipe(stages[0], num, **options)

    # --- shapes -----------------------------------------------------------------------------

    def _tried(self, batch: Batch, *, trains: bool) -> dict[int, list[Passing]]:
        """Run a micro-batch through the stages one after another; return what passes. Collective.

        Nothing of the training changes.
        """
        found: dict[int, list[Passing]] = {}
        with untouched(self._network, self._device), torch.set_grad_enabled(trains):
            given: list[Tensor] = []
            for number in range(self._num_stages - 1):
                stage = self._network.stages.get(number)
                if stage is not None:
                    values = self._values(stage, batch, given)
                    given = [values[name].contiguous() for name in stage.gives]
                    found[number] = [
                        Passing(tuple(x.shape), x.dtype, x.requires_grad) for x in given
                    ]
                following = number + 1
                if self._place_of(following) == self._place_of(number):
                    continue
                if stage is not None:
                    self._send(given, following)
                elif following in self._network.stages:
                    given = self._receive(number)
                    found[number] = [
                        Passing(tuple(x.shape), x.dtype, x.requires_grad) for x in given
                    ]
                given = [item.detach().requires_grad_(item.requires_grad) for item in given]
        return found

    def _place_of(self, stage: int) -> int:
        return stage % self._group.num_peers

    def _send(self, tensors: Sequence[Tensor], stage: int) -> None:
        to = self._base + self._place_of(stage)
        kinds = [[*x.shape, dtype_name(x.dtype), x.requires_grad] for x in tensors]
        self._group.send(kinds, to)
        for item in tensors:
            dist.send(item.detach(), to)

    def _receive(self, stage: int) -> list[Tensor]:
        sender = self._base + self._place_of(stage)
        found: list[Tensor] = []
        for *shape, dtype, has_gradient in self._group.receive(sender):
            item = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            dist.recv(item, sender)
            found.append(item.requires_grad_(has_gradient))
        return found

    # --- parameters that stages share ---------------------------------------------------------

    @torch.no_grad()
    def share_copies(self) -> None:
        """Send the newest values of shared parameters to the copies of them. Collective."""
        for name, places in self._shared.items():
            for here, place in self._of_this(places):
                for item in self._module(name).parameters():
                    if here:
                        dist.send(item.detach().contiguous(), self._base + place)
                    else:
                        item.copy_(self._received(item, place))

    @torch.no_grad()
    def _collect_gradients(self) -> None:
        """Add the gradients of copies to those of the parameters that they are copies of."""
        for name, places in self._shared.items():
            for here, place in self._of_this(places):
                for item in self._module(name).parameters():
                    if not item.requires_grad:
                        continue
                    own = torch.zeros_like(item) if item.grad is None else item.grad
                    if not here:
                        dist.send(own.contiguous(), self._base + place)
                        item.grad = None
                    else:
                        item.grad = own + self._received(item, place)

    def _received(self, like: Tensor, place: int) -> Tensor:
        found = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        dist.recv(found, self._base + place)
        return found

    def _of_this(self, places: Sequence[int]) -> Iterator[tuple[bool, int]]:
        """Yield the places that this process sends values to, or the one that it gets them from.

        Each comes with whether the parameters are this process's own. ``places``: first theirs.
        """
        owner, *others = places
        if self._group.place == owner:
            yield from ((True, place) for place in others)
        elif self._group.place in others:
            yield False, owner

    def _module(self, name: str) -> nn.Module:
        copies = self._network.copies
        return copies[name] if name in copies else self._network.layers[name]

    # --- several pipelines ------------------------------------------------------------------

    def _sum_gradients(self) -> None:
        """Sum the gradients over the processes with the same stages and other rows.

        Those of sharded parameters are sums already.
        """
        if self._group.num_shares == 1:
            return
        group = self._group.other_rows()
        for bucket in _buckets(self._network):
            flat = torch.cat([item.reshape(-1) for item in bucket])
            dist.all_reduce(flat, group=group)
            for item, part in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
                item.copy_(part.view_as(item))


def _buckets(network: nn.Module) -> Iterator[list[Tensor]]:
    """Yield the gradients of a network, those of one message together."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in network.parameters():
        if (gradient := parameter.grad) is None or is_sharded(parameter):
            continue
        if bucket and (size + gradient.nbytes > _BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
