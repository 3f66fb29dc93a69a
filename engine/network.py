"""Networks: a graph of named layers as one torch module, every layer's output within reach.

Knows torch and the words of a graph; knows nothing of data, training or jobs.
"""

import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.loss import _Loss  # pyright: ignore[reportPrivateUsage]

from engine import arguments
from engine.arguments import Parameter
from engine.functions import FUNCTIONS, Function
from engine.lengths import Lengths, TakesLengths
from engine.native import pooling
from engine.output_clips import OutputClips
from engine.precision import in_float32
from engine.problems import one
from engine.recomputing import Segment, segmented
from engine.stepwise import AWARE, OURS
from glasshouse.spec import Graph, Layer

_NOT_LAYERS = (nn.DataParallel, nn.SyncBatchNorm, nn.RNNBase, nn.modules.rnn.RNNCellBase)
_OF_ONE_TYPE = (nn.Bilinear, nn.EmbeddingBag)
"""What they take must be of their parameters' type, and torch.autocast does not see to it."""
_STATE_PAIRS = (nn.LSTM, nn.LSTMCell)


class LayerFailed(Exception):
    """A layer could not compute its output."""

    def __init__(self, layer: str, cause: BaseException) -> None:
        super().__init__(f"layer {layer!r}: {cause}")
        self.layer = layer
        self.cause = cause


@cache
def layer_classes() -> dict[str, type[nn.Module]]:
    """Every torch.nn class that a graph may use, and our own, by name."""
    found = {
        name: cls
        for name, cls in vars(nn).items()
        if isinstance(cls, type) and issubclass(cls, nn.Module) and _is_layer(name, cls)
    }
    return dict(sorted((found | OURS).items()))


def _is_layer(name: str, cls: type[nn.Module]) -> bool:
    if issubclass(cls, (_Loss, LazyModuleMixin)) or cls is nn.Module:
        return False
    if cls.__module__ == nn.Sequential.__module__ or cls in _NOT_LAYERS:
        return False
    takes_code = {"encoder_layer", "decoder_layer"} & set(inspect.signature(cls).parameters)
    return not takes_code and not name.startswith("_")


def layer_parameters(layer_type: str, pointer: str = "") -> dict[str, Parameter]:
    """The arguments of a layer type.

    Raises:
        SpecProblems: there is no such layer type.
    """
    if layer_type in FUNCTIONS:
        return arguments.read_signature(FUNCTIONS[layer_type], keyword_only=True)
    cls = layer_classes().get(layer_type)
    if cls is None:
        raise one(f"{pointer}/type", _unknown(layer_type), "unknown_layer")
    return arguments.parameters(cls)


def _unknown(layer_type: str) -> str:
    if hasattr(nn, layer_type) and inspect.isclass(getattr(nn, layer_type)):
        reason = "it is a loss, a container, or takes other layers as arguments"
        return f"torch.nn.{layer_type} cannot be a layer of a graph: {reason}"
    known = [*layer_classes(), *FUNCTIONS]
    near = [name for name in known if name.lower() == layer_type.lower()]
    hint = f"; did you mean {near[0]}?" if near else "; GET /catalog/layers lists what there is"
    return f"torch.nn has no layer {layer_type!r}, nor is it a listed function{hint}"


def layer_like(function: str) -> str:
    """A question after the torch.nn layer of a function's name, where there is one."""
    plain = function.replace("_", "")
    near = [name for name in layer_classes() if name.lower() == plain]
    return f"; did you mean the layer {near[0]}?" if near else ""


def build_layer(layer_type: str, args: Mapping[str, Any], *, trainable: bool = True) -> nn.Module:
    """Make one layer from arguments that have been checked and converted."""
    if layer_type in FUNCTIONS:
        return Function(layer_type, dict(args))
    module = (AWARE.get(layer_type) or layer_classes()[layer_type])(**args)
    return module if trainable else module.requires_grad_(False)


def takes_lengths(layer_type: str) -> bool:
    """Whether a layer of this type can tell the steps of a row from what it is padded with."""
    return layer_type in AWARE


def leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer's output by name: ``lstm.0``, ``lstm.1.0`` …; one tensor: itself."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from leaves(f"{name}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):  # pyright: ignore[reportUnknownArgumentType]
            yield from leaves(f"{name}.{index}", item)


def input_leaves(
    name: str, args: Sequence[Any], keywords: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    """The tensors that go into a call: one alone has the layer's name, else ``name.0`` …."""
    given = {**dict(enumerate(args)), **keywords}
    found = list(leaves(name, given))
    return [(name, found[0][1])] if len(found) == 1 else found


def call(module: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """Run a layer on its inputs in order; an LSTM's two states go in as the pair it wants."""
    if len(inputs) == 3 and isinstance(module, _STATE_PAIRS):
        return module(inputs[0], (inputs[1], inputs[2]))
    return module(*inputs)


def cut(output: Any) -> Any:
    """The same tensors as constants for the backward pass."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {key: cut(item) for key, item in output.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(output, (tuple, list)):
        return tuple(cut(item) for item in output)  # pyright: ignore[reportUnknownVariableType]
    return output


def root(name: str) -> str:
    """The layer or field that a reference such as ``lstm.1.0`` belongs to."""
    return name.partition(".")[0]


def lengths_of(field: str) -> str:
    """The name of the lengths of a sequence field's rows."""
    return f"{field}.lengths"


def values_of(field: str) -> str:
    """The name of the values beside the places of a sparse field."""
    return f"{field}.values"


def host_lengths_of(lengths: str) -> str:
    """The name under which a batch has lengths in host memory too, if they are elsewhere."""
    return f"{lengths}:host"


def inputs_of(graph: Graph, position: int, fields: Sequence[str]) -> tuple[str, ...]:
    """What a layer reads: its own inputs, or the layer before, or the first field."""
    layer = graph.layers[position]
    if layer.inputs is not None:
        return layer.inputs
    return (graph.layers[position - 1].name if position else fields[0],)


def needed_layers(graph: Graph, wanted: Sequence[str]) -> list[Layer]:
    """The layers of a resolved graph that the wanted outputs depend on, in order."""
    needed = {root(name) for name in wanted}
    kept: list[Layer] = []
    for layer in reversed(graph.layers):
        if layer.name in needed:
            kept.append(layer)
            needed.update(root(name) for name in layer.reads)
    return kept[::-1]


class Network(nn.Module):
    """A resolved graph (inputs and sizes filled in) as a module.

    Calling it with a batch, a mapping of field names to tensors, gives a mapping with the wanted
    outputs and the fields. Layers are made in the graph's order, each with torch's own
    initialisation. ``state_dict`` keys are the layer's name and torch's: ``conv1.weight``. A layer
    that is shared is the module of the first; its parameters are that one's.
    """

    def __init__(
        self,
        graph: Graph,
        wanted: Sequence[str],
        *,
        prune: bool = False,
        kept_at: Sequence[str] = (),
    ) -> None:
        """``kept_at``: between two of these layers activations are computed again, not kept."""
        super().__init__()
        layers = needed_layers(graph, wanted) if prune else list(graph.layers)
        finished = _last_reads(layers, wanted)
        self.output_clips = OutputClips(graph)
        self.low_precision: torch.dtype | None = None
        """In which type products are computed that may be; None: all in float32."""
        self.memory_format = torch.contiguous_format
        self._steps: list[Step] = []
        for position, layer in enumerate(layers):
            owner = layer.shared_with or layer.name
            # Past add_module, which refuses names such as "forward" that a user may well choose.
            module = self._modules.get(owner)
            if module is None:
                module = _construct(layer, f"/network/layers/{position}")
            self._modules[owner] = module
            inputs = tuple(layer.inputs or ())
            clips = self.output_clips if layer.name in self.output_clips else None
            step = Step(
                layer.name,
                module,
                inputs,
                layer.lengths or None,
                finished.get(position, ()),
                layer.stop_gradient,
                clips,
                layer.lengths is None and not isinstance(module, _OF_ONE_TYPE),
            )
            self._steps.append(step)

        self._usual = segmented(self._steps, kept_at, run_all)
        # Run again nobody looks, and a pair would run otherwise than it has.
        self._paired = self._usual if kept_at else in_pairs(self._steps, wanted)
        self._plan: Sequence[Step | Pair | Segment] = self._usual

    def lay_out(self, memory_format: torch.memory_format) -> None:
        """Have images and the weights of convolutions lie in memory so from now on.

        Only where channels lie together is a pooling of numbers of either sign as fast as one of
        positive parts: else it goes by branches that are hard to foresee.
        """
        self.memory_format = memory_format
        self._plan = self._paired if memory_format is torch.channels_last else self._usual
        self.to(memory_format=memory_format)  # pyright: ignore[reportCallIssue]

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers by name, in order; layers that are shared have one module."""
        return {step.name: step.module for step in self._steps}

    def train(self, mode: bool = True) -> "Network":
        """Switch between training and evaluation; a layer may be named ``training``."""
        self.__dict__["training"] = mode
        for module in self._modules.values():
            if module is not None:
                module.train(mode)
        return self

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute every layer in order; what no later layer reads is let go at once."""
        if self.memory_format is not torch.contiguous_format:
            batch = {name: self._laid_out(item) for name, item in batch.items()}
        if self.low_precision is None:
            return self._run(batch)
        device = next(iter(batch.values())).device.type
        with torch.autocast(device, dtype=self.low_precision):
            return self._run(batch)

    def _laid_out(self, item: Tensor) -> Tensor:
        is_image = item.dim() == 4 and item.is_floating_point()
        return item.contiguous(memory_format=self.memory_format) if is_image else item

    def _run(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = dict(batch)
        run_all(self._plan, values, {})
        return values


def run_all(
    plan: Sequence["Step | Pair | Segment"],
    values: dict[str, Tensor],
    tuples: dict[str, dict[str, Tensor]],
    *,
    bare: bool = False,
) -> None:
    """Compute steps in order; what no later one reads is let go at once.

    ``tuples``: the leaves of layers that put out several tensors. ``bare``: what a layer raises is
    left as it is.

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
            made = output if type(step) is Segment else {name: dict(leaves(name, output))}
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
    """One layer of a network, in its place."""

    name: str
    module: nn.Module
    inputs: tuple[str, ...]
    lengths: str | None
    finished: tuple[str, ...]
    """The layers whose output nobody reads after it."""
    cuts: bool
    clips: OutputClips | None
    is_plain: bool
    """Whether its module takes its inputs just as they are."""

    @property
    def first(self) -> str:
        """The layer that it begins with: itself."""
        return self.name

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """What it calls."""
        return (self.module,)

    @property
    def reads(self) -> tuple[str, ...]:
        """All that it needs."""
        if self.lengths is None:
            return self.inputs
        return (*self.inputs, self.lengths, host_lengths_of(self.lengths))

    def run(self, values: Mapping[str, Tensor]) -> Any:
        """Call the layer on what it reads."""
        output = self._call(values)
        if self.clips is not None:
            for _, tensor in leaves(self.name, output):
                self.clips.watch(self.name, tensor)
        return cut(output) if self.cuts else output

    def _call(self, values: Mapping[str, Tensor]) -> Any:
        given = [values[source] for source in self.inputs]
        if self.is_plain:
            return call(self.module, given)
        if isinstance(self.module, _OF_ONE_TYPE):
            given = [in_float32(item) for item in given]
        if self.lengths is None or not isinstance(self.module, TakesLengths):
            return call(self.module, given)
        known = values[self.lengths]
        self.module.lengths = Lengths(known, values.get(host_lengths_of(self.lengths)))
        try:
            return call(self.module, given)
        finally:
            self.module.lengths = None


class Pair(NamedTuple):
    """A ReLU and the max pooling that alone reads it: the same numbers from the pooling first.

    The largest of positive parts is the positive part of the largest, and so are the gradients: bit
    for bit, with a quarter of the elements for a ReLU after a pooling of 2 by 2. While somebody
    looks at one of the two they run as they stand.
    """

    relu: Step
    pool: Step

    @property
    def first(self) -> str:
        """The layer that it begins with."""
        return self.relu.name

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """What it calls."""
        return (self.relu.module, self.pool.module)

    @property
    def reads(self) -> tuple[str, ...]:
        """All that it needs."""
        return self.relu.reads

    @property
    def name(self) -> str:
        """What is left behind is the pooling's."""
        return self.pool.name

    @property
    def finished(self) -> tuple[str, ...]:
        """The layers whose output nobody reads after it."""
        return (*self.relu.finished, *self.pool.finished)

    def run(self, values: dict[str, Tensor]) -> Any:
        """Call both on what the first reads."""
        relu, pool = self.relu, self.pool
        if _is_hooked(relu.module) or _is_hooked(pool.module):
            try:
                values[relu.name] = relu.run(values)
            except Exception as cause:
                raise LayerFailed(relu.name, cause) from cause
            return pool.run(values)
        x = values[relu.inputs[0]]
        if isinstance(pool.module, nn.MaxPool2d) and pooling.takes(pool.module, x):
            return pooling.relu_of_max_pool2d(pool.module, x)
        return relu.module(pool.module(x))


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]


def in_pairs(steps: Sequence[Step], wanted: Sequence[str]) -> list[Step | Pair]:
    """The steps with each ReLU in front of a max pooling put together with it."""
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
    """Whether what it puts out may be changed in place: a ReLU needs it as it was."""
    same_memory = {pool.name}
    for step in steps:
        if same_memory & {root(source) for source in step.inputs}:
            if getattr(step.module, "inplace", False):
                return True
            if next(step.module.parameters(), None) is None:
                same_memory.add(step.name)
    return False


def _construct(layer: Layer, pointer: str) -> nn.Module:
    known = layer_parameters(layer.type, pointer)
    args = arguments.check(known, dict(layer.args), f"{pointer}/args", layer.type)
    try:
        return build_layer(layer.type, args, trainable=layer.trainable)
    except Exception as cause:
        raise LayerFailed(layer.name, cause) from cause


def _last_reads(layers: Sequence[Layer], wanted: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """For each position the layers whose output nobody reads after it."""
    last = {layer.name: position for position, layer in enumerate(layers)}
    for position, layer in enumerate(layers):
        for source in layer.reads:
            if root(source) in last:
                last[root(source)] = position
    kept = {root(source) for source in wanted}
    finished: dict[int, tuple[str, ...]] = {}
    for name, position in last.items():
        if name not in kept:
            finished[position] = (*finished.get(position, ()), name)
    return finished


def parameter_counts(module: nn.Module) -> tuple[int, bool]:
    """How many numbers a layer learns, and whether any of them is trainable."""
    found = list(module.parameters())
    return sum(item.numel() for item in found), any(item.requires_grad for item in found)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as it is written everywhere outside torch: ``float32``."""
    return str(dtype).removeprefix("torch.")
