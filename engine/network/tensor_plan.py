"""Choose how the layers of a network are divided among processes: tensor parallelism.

The scheme is that of Megatron-LM (Shoeybi et al., 2019). Depends on torch and graphs.

A Linear layer is divided by columns: each process computes some of its outputs. If what reads them
can work on a part, down to Linear layers that add up the parts of their inputs (divided by rows),
nothing is exchanged in between. Otherwise the outputs are put together right away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from engine.core.tensor_names import root
from engine.network.functions import Function
from engine.network.own_layers.attention import DotProductAttention, TiedEmbedding
from glasshouse.spec import Graph, Layer

_ELEMENTWISE = (
    *(nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity),
    *(nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU),
    *(nn.Softplus, nn.Softsign, nn.Tanh),
)
"""Layers without parameters that compute each value of its own input value."""
_ELEMENTWISE_FUNCTIONS = frozenset({"add", "mul", "sub", "gelu"})
_FEED_FORWARD = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Layers whose two Linear layers are divided, with all that is between them."""


@dataclass
class TensorPlan:
    """How layers are divided, by the names of their modules (``block.linear1``)."""

    size: int
    """The number of processes among which a layer is divided."""
    columns: dict[str, int] = field(default_factory=dict[str, int])
    """Linear layers of which each process computes a part of every block of outputs, and the
    number of blocks: 3 if queries, keys and values are one layer."""
    gathered: list[str] = field(default_factory=list[str])
    """Linear and Embedding layers divided by outputs, which are put together after them."""
    rows: list[str] = field(default_factory=list[str])
    """Linear layers divided by inputs, whose outputs are added up."""
    entries: list[str] = field(default_factory=list[str])
    """Tied embeddings, divided by entries."""
    heads: list[str] = field(default_factory=list[str])
    """Attention layers of which each process computes some heads."""
    drawing: list[str] = field(default_factory=list[str])
    """Layers that draw random numbers for the part of a process."""
    values: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Values of which each process has a part, by layer or leaf and kind (``input``, ``output``,
    ``output_grad``), and the number of blocks along their last axis."""

    @property
    def divided(self) -> list[str]:
        """The modules whose parameters are divided."""
        return [*self.columns, *self.gathered, *self.rows, *self.entries]

    def parameters(self, network: nn.Module) -> set[str]:
        """Return the names of the parameters of which each process has a part."""
        named = (f"{module}.{name}" for module in self.divided for name in ("weight", "bias"))
        added = {f"{module}.bias" for module in self.rows}  # once, to the sum
        return {*named} & {*dict(network.named_parameters())} - added

    def merge(self, other: "TensorPlan") -> None:
        """Add the layers of another plan."""
        self.columns |= other.columns
        self.values |= other.values
        for name in ("gathered", "rows", "entries", "heads", "drawing"):
            getattr(self, name).extend(getattr(other, name))


class _NotDivisible(Exception):
    """A group of layers cannot be divided."""


def tensor_plan(
    graph: Graph, modules: Mapping[str, nn.Module], wanted: Sequence[str], size: int
) -> TensorPlan:
    """Choose the division of a resolved graph among ``size`` processes.

    ``modules``: by layer. ``wanted``: outputs that losses and metrics read, which stay whole.
    """
    return _Search(graph, modules, wanted, size).plan


class _Search:
    def __init__(
        self, graph: Graph, modules: Mapping[str, nn.Module], wanted: Sequence[str], size: int
    ) -> None:
        self.plan = TensorPlan(size)
        self._layers = {layer.name: layer for layer in graph.layers}
        self._modules = modules
        self._wanted = {root(name) for name in wanted}
        self._readers: dict[str, list[Layer]] = {}
        """The layers that read each value, which is a layer or a leaf of it."""
        for layer in graph.layers:
            for source in dict.fromkeys(layer.reads):
                self._readers.setdefault(source, []).append(layer)
        self._shared = {owner for layer in graph.layers if (owner := layer.shared_with) is not None}
        for layer in graph.layers:
            self._divide(layer)

    def _divide(self, layer: Layer) -> None:
        if layer.shared_with is not None:
            return
        if self._is_free(layer):
            group = TensorPlan(self.plan.size)
            try:
                self._with_source(layer, group)
            except _NotDivisible:
                pass
            else:
                self.plan.merge(group)
        if layer.name not in self.plan.divided:
            self._divide_alone(layer.name)

    def _divide_alone(self, name: str) -> None:
        """Divide a layer whose outputs are put together right away, if it can be divided."""
        plan, module = self.plan, self._modules[name]
        if type(module) is nn.Linear:
            width = module.out_features
        elif type(module) is nn.Embedding and module.max_norm is None and not module.sparse:
            width = module.embedding_dim
        elif type(module) is TiedEmbedding:
            if module.num_embeddings % plan.size == 0:
                plan.entries.append(name)
            return
        else:
            if isinstance(module, _FEED_FORWARD):
                self._divide_feed_forward(name, module)
            return
        if width % plan.size == 0:
            plan.gathered.append(name)

    def _divide_feed_forward(self, name: str, module: nn.Module) -> None:
        first, second, dropout = (
            module.get_submodule(part) for part in ("linear1", "linear2", "dropout")
        )
        assert isinstance(first, nn.Linear) and isinstance(dropout, nn.Dropout)  # noqa: S101, PT018
        if first.out_features % self.plan.size or not isinstance(second, nn.Linear):
            return
        self.plan.columns[f"{name}.linear1"] = 1
        self.plan.rows.append(f"{name}.linear2")
        self.plan.drawing.append(f"{name}.dropout")
        for part, kind in (
            *(("linear1", "output"), ("linear1", "output_grad"), ("linear2", "input")),
            *(("dropout", "input"), ("dropout", "output"), ("dropout", "output_grad")),
        ):
            self.plan.values[f"{name}.{part}", kind] = 1

    # --- one group of layers -------------------------------------------------------------------

    def _is_free(self, layer: Layer) -> bool:
        """Whether a layer is a Linear layer that may be divided by columns."""
        return (
            type(self._modules[layer.name]) is nn.Linear
            and layer.name not in self.plan.divided
            and layer.name not in self._shared
            and layer.shared_with is None
        )

    def _with_source(self, layer: Layer, group: TensorPlan) -> None:
        """Divide a Linear layer by columns, and everything that reads it.

        Raises:
            _NotDivisible: something cannot be divided.
        """
        if layer.name in group.columns:
            return
        if not self._is_free(layer) or layer.name in group.rows:
            raise _NotDivisible
        readers = self._readers.get(layer.name, [])
        blocks = self._blocks(readers)
        module = self._modules[layer.name]
        assert isinstance(module, nn.Linear)  # noqa: S101
        if module.out_features % (blocks * group.size):
            raise _NotDivisible
        group.columns[layer.name] = blocks
        self._spread(layer.name, layer.name, blocks, group)

    def _blocks(self, readers: Sequence[Layer]) -> int:
        """Return into how many blocks the outputs of a layer are cut by what reads them."""
        if len(readers) != 1 or readers[0].type != "chunk":
            return 1
        function = self._modules[readers[0].name]
        assert isinstance(function, Function)  # noqa: S101
        return int(function.arguments["chunks"])

    def _spread(self, layer: str, value: str, blocks: int, group: TensorPlan) -> None:
        """Note that each process has a part of a value, and divide everything that reads it."""
        if layer in self._wanted:
            raise _NotDivisible
        if (value, "output") in group.values:
            return
        self._note(value, blocks, group)
        self._divide_readers(value, blocks, group)

    def _note(self, value: str, blocks: int, group: TensorPlan) -> None:
        group.values |= {(value, "output"): blocks, (value, "output_grad"): blocks}

    def _divide_readers(self, value: str, blocks: int, group: TensorPlan) -> None:
        for reader in self._readers.get(value, []):
            self._with_reader(reader, value, blocks, group)

    def _with_reader(self, layer: Layer, value: str, blocks: int, group: TensorPlan) -> None:
        module, inputs = self._modules[layer.name], layer.inputs or ()
        if layer.shared_with is not None or layer.name in self._shared:
            raise _NotDivisible
        if blocks > 1:
            group.values[layer.name, "input"] = blocks
            self._with_chunk(layer, module, blocks, group)
        elif type(module) is nn.Linear:
            group.values[layer.name, "input"] = 1
            self._with_sink(layer, module, group)
        elif type(module) is DotProductAttention:
            if module.num_heads % group.size or value not in inputs:
                raise _NotDivisible
            if layer.name not in group.heads:
                group.heads.append(layer.name)
            self._draws(layer, module.dropout, group)
            self._with_all_inputs(layer, group)
        elif _is_elementwise(layer, module):
            self._draws(layer, module.p if isinstance(module, nn.Dropout) else 0, group)
            self._with_all_inputs(layer, group)
        else:
            raise _NotDivisible

    def _draws(self, layer: Layer, rate: float, group: TensorPlan) -> None:
        if rate and layer.name not in group.drawing:
            group.drawing.append(layer.name)

    def _with_chunk(self, layer: Layer, module: nn.Module, blocks: int, group: TensorPlan) -> None:
        """Divide each chunk of the outputs of a layer; ``blocks``: how many there are."""
        leaves = [f"{layer.name}.{number}" for number in range(blocks)]
        readers = [reader for leaf in leaves for reader in self._readers.get(leaf, [])]
        axis = module.arguments.get("dim") if isinstance(module, Function) else None
        # attention takes three axes, so there the last one is 2
        is_last = axis == -1 or (
            axis == 2 and all(item.type == DotProductAttention.__name__ for item in readers)
        )
        if not is_last or layer.name in self._readers or layer.name in self._wanted:
            raise _NotDivisible
        for leaf in leaves:  # all of them before a reader of one asks for the others
            self._note(leaf, 1, group)
        for leaf in leaves:
            self._divide_readers(leaf, 1, group)

    def _with_sink(self, layer: Layer, module: nn.Linear, group: TensorPlan) -> None:
        """Divide a Linear layer by rows."""
        taken = layer.name in self.plan.divided or layer.name in group.columns
        if taken or module.in_features % group.size:
            raise _NotDivisible
        if layer.name not in group.rows:
            group.rows.append(layer.name)

    def _with_all_inputs(self, layer: Layer, group: TensorPlan) -> None:
        """Divide all inputs of a layer, and its output."""
        for number, source in enumerate(layer.inputs or ()):
            self._with_value(source, group)
            leaf = layer.name if len(layer.inputs or ()) == 1 else f"{layer.name}.{number}"
            group.values[leaf, "input"] = 1
        self._spread(layer.name, layer.name, 1, group)

    def _with_value(self, value: str, group: TensorPlan) -> None:
        """Divide a value, and what makes it."""
        if (value, "output") in group.values:
            return
        layer = self._layers.get(root(value))
        if layer is None or value != layer.name:
            raise _NotDivisible
        module = self._modules[layer.name]
        if type(module) is nn.Linear:
            self._with_source(layer, group)
        elif _is_elementwise(layer, module):
            self._with_all_inputs(layer, group)
        else:
            raise _NotDivisible


def _is_elementwise(layer: Layer, module: nn.Module) -> bool:
    if isinstance(module, Function):
        return layer.type in _ELEMENTWISE_FUNCTIONS
    return isinstance(module, _ELEMENTWISE)
