"""Trace a graph on torch's meta device, layer by layer, and fill in inferred sizes.

Nothing is computed or allocated. Every error names the layer, its pointer and both shapes. Depends
on torch and graphs, not on data or jobs.
"""

import contextlib
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from engine.core import arguments
from engine.core.arguments import Parameter
from engine.core.precision import dtype_name
from engine.core.problems import Findings, SpecProblems
from engine.core.tensor_names import leaves, lengths_of, root, values_of
from engine.network.call_traces import LayerCall, SeenTensor, meta_sum, recording, seen_in
from engine.network.functions import FUNCTIONS, num_inputs
from engine.network.layer_types import build_layer, layer_like, layer_parameters
from engine.network.layers import call, changed
from engine.network.network import inputs_of, parameter_counts
from engine.network.own_layers.attention import PositionEmbedding, TiedEmbedding
from glasshouse.spec import Graph, Layer

_TINY_ELEMENTS = 2_000_000
_TINY_BATCH = 2


@dataclass(frozen=True)
class FieldShape:
    """What the network gets from a data field."""

    shape: tuple[int, ...]
    """Shape of one row."""
    dtype: torch.dtype
    dim: int | None = None
    """For an integer field: its values are below this."""
    is_sequence: bool = False
    """Whether the first axis of a row is its steps. The number is the max; it differs by row."""
    padding_value: int = 0
    """The value after the end of a row of integers."""
    has_values: bool = False
    """Whether the field is the indices of a sparse vector that come with values."""
    is_sparse: bool = False
    """Whether the field is the indices of a sparse vector, which only an EmbeddingBag can use."""

    def tensors(self, name: str, num_rows: int) -> dict[str, Tensor]:
        """Return a batch without data on the meta device: the field, lengths and values."""
        made = torch.empty((num_rows, *self.shape), dtype=self.dtype, device="meta")
        if not self.is_sequence:
            return {name: made}
        lengths = torch.empty((num_rows,), dtype=torch.int64, device="meta")
        known = {name: made, lengths_of(name): lengths}
        if self.has_values:
            known[values_of(name)] = torch.empty(made.shape, dtype=torch.float32, device="meta")
        return known


@dataclass
class TracedLayer:
    """One layer after the trace."""

    layer: Layer
    module: nn.Module
    outputs: dict[str, Tensor]
    """Its leaves, on the meta device."""
    num_flops: int
    record: LayerCall
    """The inputs and outputs of its call and of the modules inside it."""
    is_followed: bool = True
    """Whether the modules inside it were traced; if not, it was tried on a tiny batch."""

    @property
    def owner(self) -> str:
        """The layer that its module and parameters are named after."""
        return self.layer.shared_with or self.layer.name

    def describe(self) -> dict[str, Any]:
        """Return the layer's row of a plan."""
        shapes = {name: list(item.shape[1:]) for name, item in self.outputs.items()}
        num_parameters, trainable = parameter_counts(self.module)
        prefix = self.layer.name
        is_shared = self.layer.shared_with is not None  # then its parameters are that layer's
        learned = () if is_shared else self.module.named_parameters()
        named = {f"{prefix}.{name}": list(item.shape) for name, item in learned}
        first = next(iter(self.outputs.values()))
        return {
            "name": self.layer.name,
            "type": self.layer.type,
            "inputs": list(self.layer.inputs or ()),
            "output_shape": shapes[prefix] if list(shapes) == [prefix] else shapes,
            "output_shapes": shapes,
            "shared_with": self.layer.shared_with,
            "parameters": 0 if is_shared else num_parameters,
            "trainable": trainable,
            "dtype": dtype_name(first.dtype),
            "parameter_names": list(named),
            "parameter_shapes": named,
            "flops": self.num_flops,
            "input_names": _names(self.record.inputs, inside=False),
            "inner_inputs": _names(self.record.inputs, inside=True),
            "inner_outputs": _names(self.record.outputs, inside=True),
        }


def _names(seen: Mapping[str, SeenTensor], *, inside: bool) -> list[str]:
    return [name for name, item in seen.items() if bool(item.path) is inside]


@dataclass
class Trace:
    """A whole graph after the trace."""

    layers: list[TracedLayer] = field(default_factory=list[TracedLayer])
    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Every field and leaf. The bare name of a layer with several leaves is its first."""
    outputs: tuple[str, ...] = ()

    def graph(self) -> Graph:
        """Return the graph with inputs, outputs and sizes filled in."""
        return Graph(layers=tuple(item.layer for item in self.layers), outputs=self.outputs)

    @property
    def num_flops(self) -> int:
        """Floating-point operations of one forward pass."""
        return sum(item.num_flops for item in self.layers)

    def output_leaves(self) -> dict[str, Tensor]:
        """Return every layer output by the name under which it is watched."""
        return {name: item for traced in self.layers for name, item in traced.outputs.items()}

    def network(self) -> nn.ModuleDict:
        """Return the layers' modules on the meta device, by name; a shared one only once."""
        found = nn.ModuleDict()
        # Not with its own methods, which refuse names that a user may choose.
        found._modules.update({item.owner: item.module for item in self.layers})  # pyright: ignore[reportPrivateUsage]
        return found


def trace(
    graph: Graph, fields: Mapping[str, FieldShape], batch_size: int, findings: Findings
) -> Trace:
    """Run a graph without data.

    Raises:
        SpecProblems: a layer does not exist, has wrong arguments or does not fit its input.
    """
    result = Trace()
    for name, item in fields.items():
        result.values.update(item.tensors(name, batch_size))
    positions = {layer.name: position for position, layer in enumerate(graph.layers)}
    _check_references(graph, fields, positions, findings)
    findings.stop()
    counter = FlopCounterMode(display=False)
    with counter:
        for position in range(len(graph.layers)):
            one_layer = _LayerTrace(graph, position, tuple(fields), fields, result, findings)
            before = counter.get_total_flops()
            traced = one_layer.run()
            traced.num_flops = counter.get_total_flops() - before
            result.layers.append(traced)
            result.values.update(traced.outputs)
            result.values[traced.layer.name] = next(iter(traced.outputs.values()))
    result.outputs = graph.outputs or (graph.layers[-1].name,)
    for number, name in enumerate(result.outputs):
        if name not in result.values or root(name) in fields:
            detail = f"there is no layer {name!r} to return{_near(name, result.values)}"
            findings.problem(f"/network/outputs/{number}", detail, "unknown_layer")
    findings.stop()
    return result


def _near(name: str, known: Mapping[str, Any]) -> str:
    found = [item for item in known if root(item) == root(name)]
    return f"; it has {', '.join(found)}" if found else ""


def _check_references(
    graph: Graph,
    fields: Mapping[str, FieldShape],
    positions: Mapping[str, int],
    findings: Findings,
) -> None:
    for position, layer in enumerate(graph.layers):
        for number, name in enumerate(layer.reads):
            pointer = f"/network/layers/{position}/inputs/{number}"
            if number >= len(layer.inputs or ()):
                pointer = f"/network/layers/{position}/lengths"
            source = root(name)
            if source in fields:
                continue
            if source not in positions:
                known = ", ".join([*fields, *list(positions)[:position]][:30])
                detail = f"layer {layer.name!r} reads {name!r}, which is neither a layer nor a data"
                detail += f" field; before it there are: {known}"
                findings.problem(pointer, detail, "unknown_input")
            elif positions[source] >= position:
                what = "itself" if positions[source] == position else f"the later layer {name!r}"
                detail = f"layer {layer.name!r} reads {what}; a layer may read earlier layers and"
                detail += " data fields only, so the graph has no cycles"
                findings.problem(pointer, detail, "forward_reference")


class _LayerTrace:
    """Builds and runs one layer on the meta device."""

    def __init__(
        self,
        graph: Graph,
        position: int,
        field_names: Sequence[str],
        fields: Mapping[str, FieldShape],
        result: Trace,
        findings: Findings,
    ) -> None:
        self.layer = graph.layers[position]
        self.pointer = f"/network/layers/{position}"
        self.names = inputs_of(graph, position, field_names)
        if self.layer.type == "EmbeddingBag" and len(self.names) == 1:
            field = fields.get(self.names[0])
            if field is not None and field.has_values:
                self.names = (self.names[0], values_of(self.names[0]))
        self.fields = fields
        self.values = result.values
        owner = self.layer.shared_with
        self.first = next((item for item in result.layers if owner and item.owner == owner), None)
        """The layer whose module this one shares."""
        self.findings = findings

    def run(self) -> TracedLayer:
        """Trace the layer; the result contains it with inputs and sizes filled in."""
        inputs = self._inputs()
        known = layer_parameters(self.layer.type, self.pointer)
        given = dict(self.first.layer.args) if self.first else self._sized(known, inputs)
        converted = arguments.check(known, given, f"{self.pointer}/args", self.layer.type)
        with self._noting_warnings():
            module = self.first.module if self.first else self._build(converted)
            with recording(self.layer.name, module) as record:
                output = self._call(module, inputs, converted, record)
        if self.layer.stop_gradient:
            output = changed(output, Tensor.detach)
        outputs = dict(leaves(self.layer.name, output))
        if not outputs:
            self._fail(self.pointer, "its output holds no tensor", "no_output")
        is_followed = bool(record.called)
        if not is_followed:
            record.outputs |= seen_in(leaves(self.layer.name, output), self.layer.name, "")
        layer = self.layer.model_copy(update={"args": given, "inputs": tuple(self.names)})
        return TracedLayer(layer, module, outputs, 0, record, is_followed)

    def _inputs(self) -> list[Tensor]:
        for number, name in enumerate(self.names):
            if name not in self.values:
                pointer = f"{self.pointer}/inputs/{number}"
                self._fail(pointer, f"there is no {name!r}{_near(name, self.values)}", "no_leaf")
        for number, name in enumerate(self.names):
            field = self.fields.get(name)
            if field is not None and field.is_sparse and self.layer.type != "EmbeddingBag":
                detail = f"{name!r} is sparse, and the vector of {field.dim} values is never made:"
                detail += " read it with EmbeddingBag (mode sum is a linear layer over it)"
                self._fail(f"{self.pointer}/inputs/{number}", detail, "sparse")
        if self.layer.type in FUNCTIONS:
            least, most = num_inputs(self.layer.type)
            if len(self.names) < least or (most is not None and len(self.names) > most):
                wanted = str(least) if least == most else f"{least} to {most or 'any number of'}"
                self._fail(
                    f"{self.pointer}/inputs",
                    f"{self.layer.type} takes {wanted} inputs, not {len(self.names)}"
                    f"{layer_like(self.layer.type)}",
                    "num_inputs",
                )
        return [self.values[name] for name in self.names]

    def _sized(self, known: Mapping[str, Parameter], inputs: Sequence[Tensor]) -> dict[str, Any]:
        """Return the layer's arguments with the sizes that follow from its inputs."""
        given = dict(self.layer.args)
        if not given.keys() <= known.keys():  # report a misspelled argument as such, not as missing
            arguments.check(dict(known), given, f"{self.pointer}/args", self.layer.type)
        for name in arguments.missing(dict(known), given):
            size = inferred_size(name, inputs, [self.fields.get(item) for item in self.names])
            if size is None:
                detail = f"{self.layer.type} needs the argument {name!r}"
                if name in INFERRED:
                    shape = list(inputs[0].shape)
                    detail += f", which does not follow from an input of shape {shape}"
                self._fail(f"{self.pointer}/args/{name}", detail, "missing_argument")
            given[name] = cast(JsonValue, size)
        order = {name: number for number, name in enumerate(known)}
        return dict(sorted(given.items(), key=lambda item: order.get(item[0], len(order))))

    def _build(self, converted: dict[str, Any]) -> nn.Module:
        try:
            with torch.device("meta"):
                return build_layer(self.layer.type, converted, trainable=self.layer.trainable)
        except MemoryError:
            raise
        except Exception as cause:
            build = _meta_builder(self.layer.type)
            pointer = arguments.blame(build, converted, f"{self.pointer}/args")
            self._fail(pointer, f"{self.layer.type} refuses its arguments: {_first(cause)}", "args")

    def _call(
        self, module: nn.Module, inputs: Sequence[Tensor], args: dict[str, Any], record: LayerCall
    ) -> Any:
        try:
            return call(module, inputs)
        except MemoryError:
            raise
        except Exception as cause:
            record.forget_inside()
            with contextlib.suppress(_NoTrial):
                output = _trial(self.layer.type, args, inputs)
                source = meta_sum([*inputs, *module.parameters()])

                def depending(item: Tensor) -> Tensor:
                    """Let gradients flow through an output, as it depends on the inputs."""
                    return item.detach() + source.to(item.dtype) if item.requires_grad else item

                return changed(output, depending)
            self._misfit(module, inputs, cause)

    def _misfit(self, module: nn.Module, inputs: Sequence[Tensor], cause: Exception) -> NoReturn:
        came = ", ".join(
            f"{list(item.shape)} ({dtype_name(item.dtype)}) from {name!r}"
            for name, item in zip(self.names, inputs, strict=True)
        )
        wanted = wanted_shape(module)
        detail = f"cannot take input of shape {came}"
        detail += f"; it wants {wanted}" if wanted else ""
        self._fail(self.pointer, f"{detail} (torch: {_first(cause)})", "shape")

    def _fail(self, pointer: str, detail: str, code: str) -> NoReturn:
        self.findings.problem(
            pointer, f"layer {self.layer.name!r} ({self.layer.type}): {detail}", code
        )
        raise SpecProblems(self.findings.problems)

    @contextlib.contextmanager
    def _noting_warnings(self) -> Generator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for item in caught:
            text = str(item.message).splitlines()[0]
            self.findings.warn(self.pointer, f"layer {self.layer.name!r}: {text}", "torch_warning")


class _NoTrial(Exception):
    """The layer could not be tried on real numbers either."""


def _meta_builder(layer_type: str) -> Any:
    def build(**args: Any) -> nn.Module:
        with torch.device("meta"):
            return build_layer(layer_type, args)

    return build


def _trial(layer_type: str, args: dict[str, Any], inputs: Sequence[Tensor]) -> Any:
    """Run a layer without a meta kernel on a tiny batch; return its output shapes on meta."""
    num_rows = inputs[0].shape[0] if inputs[0].dim() else 1
    small = [tiny(item) for item in inputs]
    module = _meta_builder(layer_type)(**args)
    size = sum(item.numel() for item in [*small, *module.parameters()])
    if size > _TINY_ELEMENTS or num_rows <= _TINY_BATCH:
        raise _NoTrial
    try:
        module = build_layer(layer_type, args)
        output = call(module, small)
    except Exception as cause:
        raise _NoTrial from cause

    def grown(item: Tensor) -> Tensor:
        shape = list(item.shape)
        if shape and shape[0] == _TINY_BATCH:
            shape[0] = num_rows
        made = torch.empty(shape, dtype=item.dtype, device="meta")
        return made.requires_grad_() if item.requires_grad else made

    return changed(output, grown)


def tiny(item: Tensor) -> Tensor:
    """Return two rows of zeros with the shape of a meta tensor."""
    shape = (min(_TINY_BATCH, item.shape[0]), *item.shape[1:]) if item.dim() else ()
    if torch.Size(shape).numel() > _TINY_ELEMENTS:
        raise _NoTrial
    made = torch.zeros(shape, dtype=item.dtype)
    return made.requires_grad_() if item.requires_grad else made


def _first(cause: BaseException) -> str:
    return (str(cause).strip() or type(cause).__name__).splitlines()[0][:300]


# --- sizes that follow from the input's shape ------------------------------------------------

_LAST, _SECOND, _SECOND_INPUT = -1, 1, "second input"
INFERRED: dict[str, Any] = {
    "in_features": _LAST,
    "in1_features": _LAST,
    "in2_features": _SECOND_INPUT,
    "in_channels": _SECOND,
    "num_features": _SECOND,
    "num_channels": _SECOND,
    "normalized_shape": _LAST,
    "input_size": _LAST,
    "embed_dim": _LAST,
    "d_model": _LAST,
    "num_embeddings": "dim",
}
"""Arguments that may be unset, and where in the input's shape their value is."""


def inferred_size(
    name: str, inputs: Sequence[Tensor], fields: Sequence[FieldShape | None]
) -> int | list[int] | None:
    """Return the size that an argument must have; None if the input does not determine it."""
    where = INFERRED.get(name)
    if where is None:
        return None
    if where == "dim":
        return fields[0].dim if fields[0] is not None else None
    if where == _SECOND_INPUT:
        return inputs[1].shape[-1] if len(inputs) > 1 and inputs[1].dim() else None
    shape = inputs[0].shape
    if len(shape) < 2:
        return None
    return [shape[where]] if name == "normalized_shape" else shape[where]


_IDS = "integers in [0, {num_embeddings})"
_WANTED: dict[type[nn.Module] | str, str] = {
    nn.Bilinear: "[batch, …, {in1_features}] and [batch, …, {in2_features}]",
    PositionEmbedding: "[batch, at most {num_embeddings} steps, …]",
    TiedEmbedding: f"{_IDS} or [batch, …, {{embedding_dim}}]",
    nn.Embedding: _IDS,
    nn.EmbeddingBag: _IDS,
    "in_channels": "[batch, {in_channels}, {axes}]",
    "normalized_shape": "[batch, …, {last_axes}]",
    "in_features": "[batch, …, {in_features}]",
    "input_size": "[batch, …, {input_size}]",
    "embed_dim": "[batch, …, {embed_dim}]",
    "num_features": "[batch, {num_features}, …]",
    "num_channels": "[batch, {num_channels}, …]",
}
"""The input shape that a layer takes, by its class or an attribute of it; the first counts."""


def wanted_shape(module: nn.Module) -> str | None:
    """Return the input shape that a layer takes, in words; None if the layer does not define it."""
    sizes = {name: value for name, value in vars(module).items() if value is not None}
    if "in_channels" in sizes:
        axes = ["length", "height, width", "depth, height, width"]
        sizes["axes"] = axes[len(sizes["kernel_size"]) - 1]
    sizes["last_axes"] = ", ".join(map(str, sizes.get("normalized_shape", ())))
    for kind, text in _WANTED.items():
        if kind in sizes if isinstance(kind, str) else isinstance(module, kind):
            return text.format_map(sizes)
    return None
