"""Run the layers of a network in order.

A ReLU and the pooling after it may run as a pair. A segment of layers recomputes its activations in
the backward pass to save memory. Depends on torch, not on graphs.
"""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.core.precision import in_float32
from engine.core.shards import gather_parameters
from engine.core.tensor_names import leaves, root
from engine.native import pooling
from engine.network.lengths import Lengths, TakesLengths
from engine.optim.output_gradient_clipping import OutputClips

OF_ONE_TYPE = (nn.Bilinear, nn.EmbeddingBag)
"""Their inputs must have the dtype of their parameters, which torch.autocast does not ensure."""
STATE_PAIRS = (nn.LSTM, nn.LSTMCell)
"""They take their two states as a tuple."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
Leaves = dict[str, Tensor]
Made = dict[str, Tensor | Leaves]
"""The outputs of layers, by name: a tensor, or several tensors by their names."""


class Runnable(Protocol):
    """What a network runs one after the other: a layer, or several, or a copy of a value."""

    @property
    def name(self) -> str:
        """The name of its output, unless it returns outputs by name."""
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of all values that it needs."""
        ...

    @property
    def finished(self) -> tuple[str, ...]:
        """The layers whose output nothing later reads."""
        ...

    def run(self, values: dict[str, Tensor]) -> Any:
        """Return its output."""
        ...


Item = TypeVar("Item", bound=Runnable)


class LayerFailed(Exception):
    """A layer could not compute its output."""

    def __init__(self, layer: str, cause: BaseException) -> None:
        super().__init__(f"layer {layer!r}: {cause}")
        self.layer = layer
        self.cause = cause


def call(module: nn.Module, inputs: Sequence[Any], lengths: Lengths | None = None) -> Any:
    """Run a layer on its inputs in order; an LSTM's two states are passed as a tuple.

    ``lengths``: only for a layer that `TakesLengths`.
    """
    if len(inputs) == 3 and isinstance(module, STATE_PAIRS):
        inputs = inputs[0], (inputs[1], inputs[2])
    return module(*inputs) if lengths is None else module(*inputs, lengths=lengths)


def changed(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with each of its tensors changed; a list becomes a tuple."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, Mapping):
        return {key: changed(item, change) for key, item in output.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(output, (tuple, list)):
        return tuple(changed(item, change) for item in output)  # pyright: ignore[reportUnknownVariableType]
    return output


def run_all(
    plan: Sequence["Runnable"],
    values: dict[str, Tensor],
    tuples: dict[str, dict[str, Tensor]],
    *,
    bare: bool = False,
) -> None:
    """Run steps in order, and free each value after its last reader.

    ``tuples``: the leaves of layers that output several tensors. ``bare``: exceptions of layers are
    not wrapped in `LayerFailed`.

    Raises:
        LayerFailed: a layer could not compute its output.
    """
    for step in plan:
        name, finished = step.name, step.finished
        try:
            output = step.run(values)
        except Exception as cause:
            if bare or isinstance(cause, LayerFailed):
                raise
            raise LayerFailed(name, cause) from cause
        if type(output) is Tensor:
            values[name] = output
        else:
            made = output if isinstance(step, Several) else {name: dict(leaves(name, output))}
            for layer, found in made.items():
                if isinstance(found, Tensor):
                    values[layer] = found
                else:
                    tuples[layer] = found
                    values.update(found)
                    values[layer] = next(iter(found.values()))
        for source in finished:
            values.pop(source, None)
            for leaf in tuples.pop(source, ()):
                values.pop(leaf, None)


class Step(NamedTuple):
    """One layer of a network."""

    name: str
    module: nn.Module
    inputs: tuple[str, ...]
    lengths: str | None
    finished: tuple[str, ...]
    """The layers whose output no later step reads."""
    cuts: bool
    clips: OutputClips | None
    is_plain: bool
    """Whether its module takes its inputs unchanged."""
    host_lengths: str | None = None
    """The name of the host copy of its lengths."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of all values that it needs."""
        lengths = (name for name in (self.lengths, self.host_lengths) if name is not None)
        return (*self.inputs, *lengths)

    def run(self, values: Mapping[str, Tensor]) -> Any:
        """Call the layer on its inputs."""
        output = self._call(values)
        if self.clips is not None:
            for _, tensor in leaves(self.name, output):
                self.clips.watch(self.name, tensor)
        return changed(output, Tensor.detach) if self.cuts else output

    def _call(self, values: Mapping[str, Tensor]) -> Any:
        given = [values[source] for source in self.inputs]
        if self.is_plain:
            return call(self.module, given)
        if isinstance(self.module, OF_ONE_TYPE):
            given = [in_float32(item) for item in given]
        if self.lengths is None or not isinstance(self.module, TakesLengths):
            return call(self.module, given)
        host_B = None if self.host_lengths is None else values.get(self.host_lengths)
        return call(self.module, given, Lengths(values[self.lengths], host_B))


class Pair(NamedTuple):
    """A ReLU and the max pooling that is its only reader: equal results with the pooling first.

    The max of ReLUs is the ReLU of the max, so outputs and gradients are equal bit for bit. After a
    pooling of 2 by 2 the ReLU has a quarter of the elements. If either has hooks, they run in the
    order of the graph.
    """

    relu: Step
    pool: Step

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of all values that it needs."""
        return self.relu.reads

    @property
    def name(self) -> str:
        """The name of the pooling, whose output is stored."""
        return self.pool.name

    @property
    def finished(self) -> tuple[str, ...]:
        """The layers whose output no later step reads."""
        return (*self.relu.finished, *self.pool.finished)

    def run(self, values: dict[str, Tensor]) -> Any:
        """Run both on the ReLU's input."""
        relu, pool = self.relu, self.pool
        if is_hooked(relu.module) or is_hooked(pool.module):
            try:
                values[relu.name] = relu.run(values)
            except Exception as cause:
                raise LayerFailed(relu.name, cause) from cause
            return pool.run(values)
        x = values[relu.inputs[0]]
        if isinstance(pool.module, nn.MaxPool2d) and pooling.takes(pool.module, x):
            return pooling.relu_of_max_pool2d(pool.module, x)
        return relu.module(pool.module(x))


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module has forward hooks of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]


def in_pairs(steps: Sequence[Step], wanted: Sequence[str]) -> list[Step | Pair]:
    """Return the steps with each ReLU before a max pooling combined with it."""
    readers = Counter(root(source) for step in steps for source in step.reads)
    kept = {root(source) for source in wanted}
    found: list[Step | Pair] = []
    for step in steps:
        before = found[-1] if found else None
        if (
            isinstance(before, Step)
            and _belong(before, step, readers, kept)
            and not _is_overwritten(step, steps)
        ):
            found[-1] = Pair(before, step)
        else:
            found.append(step)
    return found


def _belong(relu: Step, pool: Step, readers: Mapping[str, int], kept: Collection[str]) -> bool:
    if type(relu.module) is not nn.ReLU or type(pool.module) is not nn.MaxPool2d:
        return False
    if relu.cuts or pool.cuts or relu.clips or pool.clips or pool.module.return_indices:
        return False
    alone = pool.inputs == (relu.name,) and readers[relu.name] == 1 and relu.name not in kept
    source = root(relu.inputs[0])
    shows = relu.module.inplace and (readers[source] > 1 or source in kept)
    return alone and not shows


def _is_overwritten(pool: Step, steps: Sequence[Step]) -> bool:
    """Whether a later step may change the pooling's output in place: a ReLU's backward needs it."""
    same_memory = {pool.name}
    for step in steps:
        if same_memory & {root(source) for source in step.inputs}:
            if getattr(step.module, "inplace", False):
                return True
            if next(step.module.parameters(), None) is None:
                same_memory.add(step.name)
    return False


class Several:
    """A run of items as one item. Its outputs are those that later items read."""

    def __init__(self, items: "Sequence[Runnable]") -> None:
        self.items = tuple(items)
        self.steps = tuple(step for item in self.items for step in steps_of(item))
        """The layers, in order."""
        self.name = self.steps[0].name
        made = {step.name for step in self.steps}
        self.reads = tuple(dict.fromkeys(name for step in self.steps for name in step.reads))
        finished = (name for item in self.items for name in item.finished)
        self.finished = tuple(name for name in finished if name not in made)
        """Layers outside of it whose output is no longer needed after it."""

    def given(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what it reads of ``values``."""
        return {name: values[name] for name in self.reads if name in values}

    def run(self, values: Mapping[str, Tensor]) -> Made:
        """Return the outputs of its layers that later layers read."""
        return self.compute(self.given(values))

    def compute(self, given: Mapping[str, Tensor], *, bare: bool = False) -> Made:
        """Return its outputs; ``given``: what it reads; ``bare``: as in `run_all`."""
        values = dict(given)
        tuples: dict[str, Leaves] = {}
        run_all(self.items, values, tuples, bare=bare)
        inner = {leaf for found in tuples.values() for leaf in found}
        made = (name for name in values if name not in given and name not in inner)
        return {name: tuples.get(name, values[name]) for name in made}


def steps_of(item: "Runnable") -> "tuple[Step, ...]":
    """Return the layers that an item of a plan runs, in the order of the graph."""
    if isinstance(item, Several):
        return item.steps
    if isinstance(item, Pair):
        return (item.relu, item.pool)
    return (item,) if isinstance(item, Step) else ()


class Segment(Several):
    """A run of layers of which only the inputs stay in memory: activation checkpointing.

    Uses torch.utils.checkpoint (non-reentrant). The backward pass recomputes the rest with the same
    random numbers. Hooks do not run for the recomputation, and buffers keep their values. Sharded
    parameters are gathered before it; the backward pass of their layer frees them.
    """

    def __init__(self, items: Sequence[Step]) -> None:
        super().__init__(items)
        found = (inner for item in self.steps for inner in item.module.modules())
        self.modules = tuple(dict.fromkeys(found))
        self._is_again = False

    def run(self, values: Mapping[str, Tensor]) -> Made:
        """Return the outputs of its layers that later layers read."""
        given = self.given(values)
        if not torch.is_grad_enabled():
            return self.compute(given)
        found: Made = checkpoint(
            partial(self._forward, [*given]),
            *given.values(),
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), self._again()),
        )
        return found

    def _forward(self, names: Sequence[str], *tensors: Tensor) -> Made:
        return self.compute(dict(zip(names, tensors, strict=True)), bare=self._is_again)

    @contextlib.contextmanager
    def _again(self) -> Generator[None]:
        """Disable hooks in this context, and discard its changes to buffers."""
        hooks = [
            (vars(module), name, vars(module)[name])
            for module in self.modules
            for name in _HOOKS
            if vars(module)[name]
        ]
        buffers = [
            (module._buffers, name, buffer)  # pyright: ignore[reportPrivateUsage]
            for module in self.modules
            for name, buffer in module._buffers.items()  # pyright: ignore[reportPrivateUsage]
            if buffer is not None
        ]
        self._is_again = True
        gather_parameters(self.modules)
        for owner, name, _ in hooks:
            owner[name] = OrderedDict()
        for owner, name, buffer in buffers:
            owner[name] = buffer.clone()
        try:
            yield
        finally:
            self._is_again = False
            for owner, name, kept in (*hooks, *buffers):
                owner[name] = kept


def segmented(items: Sequence[Item], kept_at: Iterable[str]) -> list[Item | Segment]:
    """Group the layers between two checkpoint boundaries into segments.

    Layers before the first boundary, and from the last one on, stay as they are. A copy to another
    device is in no segment, so it ends one, and the rest is the next one: torch keeps the random
    numbers of the devices that the inputs of a segment are on.
    """
    begins, is_inside = {*kept_at}, False
    found: list[Item | Segment] = []
    part: list[Item] = []
    for item in items:
        is_boundary = item.name in begins
        if is_boundary or not isinstance(item, Step):
            found += _in_segment(part) if is_inside else part
            is_inside, part = is_inside or is_boundary, []
        if isinstance(item, Step):
            part.append(item)
        else:
            found.append(item)
    return found + part


def _in_segment(part: Sequence[Item]) -> "list[Item | Segment]":
    steps = [item for item in part if isinstance(item, Step)]
    return [Segment(steps)] if steps else []


def work_out_of_place(network: nn.Module) -> None:
    """Let no layer overwrite the output of another in place: somebody else reads it too."""
    for module in network.modules():
        if getattr(module, "inplace", False):
            setattr(module, "inplace", False)  # noqa: B010 (not an attribute of all modules)
