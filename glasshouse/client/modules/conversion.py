"""Converts the nodes of a torch.fx trace to layers of a graph, in order."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from glasshouse.client.modules import calls, layers
from glasshouse.client.modules.call_inputs import inputs_of, pack, unpack
from glasshouse.client.modules.functional_layers import KNOWN
from glasshouse.client.modules.graph_builder import Drawing, trainable
from glasshouse.client.modules.plain_torch import call_packed, leaves
from glasshouse.client.modules.reshapes import reshaping
from glasshouse.client.modules.source_lines import Stopped
from glasshouse.client.modules.values import (
    Fixed,
    Packed,
    Ref,
    Varying,
    Weight,
    has_varying,
    named,
    reads,
    settled,
    steady,
)

_OF_SIZES = {"size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "stride"}
_SIZED = {"shape", "ndim", "dtype", "device", "is_cuda", "requires_grad", "layout"}
_COUNTING = (nn.RNN, nn.LSTM, nn.GRU, nn.EmbeddingBag)
"""Layers that receive the lengths of rows by default."""
_TIES = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")


class Converter:
    """Converts the nodes of one trace."""

    def __init__(self, drawing: Drawing, inputs: Mapping[str, str], num_samples: int) -> None:
        self.drawing = drawing
        self._inputs = inputs
        self.num_samples = num_samples
        self.known: dict[fx.Node, Any] = {}
        self._first_calls: dict[nn.Module, str] = {}

    def convert(self, node: fx.Node) -> None:
        """Convert one node.

        Raises:
            Stopped: a graph cannot express it.
        """
        self.known[node] = getattr(self, f"_{node.op}")(node)

    def resolved(self, item: Any) -> Any:
        """An argument with its nodes replaced by their converted values."""
        if isinstance(item, fx.Node):
            return self.known[item]
        if isinstance(item, (tuple, list)):
            made = [self.resolved(part) for part in item]  # pyright: ignore[reportUnknownVariableType]
            return tuple(made) if isinstance(item, tuple) else made
        if isinstance(item, dict):
            return {key: self.resolved(part) for key, part in item.items()}  # pyright: ignore[reportUnknownVariableType]
        if isinstance(item, slice):
            return slice(*(self.resolved(part) for part in (item.start, item.stop, item.step)))
        return item

    def concrete(self, item: Any, sample: int) -> Any:  # noqa: PLR0911 (one for each kind)
        """The value of an argument for one sample."""
        if isinstance(item, Ref):
            return self.drawing.values[item.name][sample]
        if isinstance(item, (Fixed, Weight)):
            return item.value
        if isinstance(item, Varying):
            return item.values[sample]
        if isinstance(item, (tuple, list)):
            made = [self.concrete(part, sample) for part in item]  # pyright: ignore[reportUnknownVariableType]
            return tuple(made) if isinstance(item, tuple) else made
        if isinstance(item, dict):
            return {key: self.concrete(part, sample) for key, part in item.items()}  # pyright: ignore[reportUnknownVariableType]
        if isinstance(item, slice):
            parts = (item.start, item.stop, item.step)
            return slice(*(self.concrete(part, sample) for part in parts))
        return item

    def evaluate(self, run: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, ...]:
        """The result of a call for each sample."""
        return tuple(
            run(*self.concrete(args, sample), **self.concrete(kwargs, sample))
            for sample in range(self.num_samples)
        )

    # --- nodes ---------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> Any:
        field = self._inputs.get(str(node.target))
        return None if field is None else Ref(field)

    def _get_attr(self, node: fx.Node) -> Any:
        path = str(node.target)
        value: Any = self.drawing.module
        for part in path.split("."):
            value = getattr(value, part)
        if isinstance(value, nn.Parameter):
            return Weight(value, path)
        is_own = path in dict(self.drawing.module.named_buffers())
        return Fixed(value, path if is_own else None) if isinstance(value, Tensor) else value

    def _call_module(self, node: fx.Node) -> Any:
        path = str(node.target)
        module = self.drawing.module.get_submodule(path)
        args, kwargs = self.resolved(node.args), self.resolved(node.kwargs)
        inputs = self.as_layers(inputs_of(module, args, kwargs))
        packed = inputs[0] if inputs and isinstance(inputs[0], Packed) else None
        if packed is not None:
            return self._packed_layer(module, path, node.name, [packed.tensor, *inputs[1:]], packed)
        ref = self._layer_of(module, path, node.name, inputs, None)
        values = self.evaluate(module, args, kwargs)
        if isinstance(values[0], Tensor):
            return self.drawing.see(ref, values)
        return self._parts(ref.name, values)

    def _packed_layer(
        self, module: nn.Module, path: str, name: str, inputs: list[Any], packed: Packed
    ) -> Any:
        """A recurrent layer with the option ``lengths``, which replaces packing."""
        if not isinstance(module, nn.RNNBase) or module.batch_first != packed.batch_first:
            raise Stopped(
                "only an RNN, LSTM or GRU with the same batch_first can read a packed sequence"
            )
        ref = self._layer_of(module, path, name, inputs, packed)

        def run(*given: Tensor) -> Any:
            return call_packed(module, given[:-1], given[-1])

        values = self.evaluate(run, (*inputs, packed.lengths), {})
        output, state = self._parts(ref.name, values)
        return Packed(output, packed.lengths, packed.batch_first), state

    def _layer_of(
        self, module: nn.Module, path: str, name: str, inputs: list[Any], packed: Packed | None
    ) -> Ref:
        drawing = self.drawing
        options: dict[str, Any] = {"path": path}
        if packed is not None:
            options["lengths"] = packed.lengths.name
        elif type(module) in _COUNTING and any(".lengths" in name for name in drawing.fields):
            options["lengths"] = False  # the module does not use lengths here
        owner = self._first_calls.get(module) or self._tied_with(module)
        if owner is not None:
            return drawing.add("", name, inputs, shared_with=owner, **options)
        if not trainable(module, path):
            options["trainable"] = False
        args = layers.arguments_of(module)
        ref = drawing.add(type(module).__name__, name, inputs, args=args, **options)
        drawing.take(ref.name, module)
        self._first_calls[module] = ref.name
        return ref

    def _tied_with(self, module: nn.Module) -> str | None:
        """The layer that already has the parameters of this module; None if there is none.

        Raises:
            Stopped: the parameters are tied in a way that a graph cannot express.
        """
        known = self.drawing.owned(module)
        if not any(known.values()):
            return None
        owners = set(known.values())
        owner = next(iter(owners)) if len(owners) == 1 else None
        if owner is not None:
            drawn = self.drawing.layer(owner)
            same = drawn["type"] == type(module).__name__
            if same and drawn.get("args", {}) == layers.arguments_of(module):
                return owner
            if isinstance(module, nn.Linear) and self._tie(owner):
                return owner
        tied = ", ".join(name for name, other in known.items() if other)
        raise Stopped(
            f"its {tied} is shared with {next(item for item in known.values() if item)!r}; layers "
            "can share all parameters, or a Linear without bias the weight of an Embedding"
        )

    def _tie(self, owner: str) -> bool:
        """Change an Embedding to a TiedEmbedding; return whether that is possible."""
        drawn = self.drawing.layer(owner)
        args: Mapping[str, Any] = drawn.get("args", {})
        if drawn["type"] == "TiedEmbedding":
            return True
        if drawn["type"] != "Embedding" or any(key in args for key in _TIES):
            return False
        drawn["type"] = "TiedEmbedding"
        return True

    def tied(self, weight: Any) -> str | None:
        """The embedding that owns this weight, or None."""
        if not isinstance(weight, Weight) or id(weight.value) not in self.drawing.owners:
            return None
        owner, name = self.drawing.owners[id(weight.value)]
        return owner if name == "weight" and self._tie(owner) else None

    def _call_function(self, node: fx.Node) -> Any:
        args, kwargs = self.resolved(node.args), self.resolved(node.kwargs)
        if node.target is pack_padded_sequence:
            return pack(*args, **kwargs)
        if node.target is pad_packed_sequence:
            return unpack(*args, **kwargs)
        if node.target is getattr:
            return self._attribute(node, *args)
        if not reads(args, kwargs):
            return settled(self.evaluate(node.target, args, kwargs))  # pyright: ignore[reportArgumentType]
        name = calls.name_of(node.target)
        if name is None:
            shown = getattr(node.target, "__name__", str(node.target))
            raise Stopped(f"{shown}() is not supported in a graph")
        return self._draw(node, name, node.target, args, kwargs)

    def _call_method(self, node: fx.Node) -> Any:
        args, kwargs = self.resolved(node.args), self.resolved(node.kwargs)
        method = str(node.target)
        # a tensor of the graph may have another memory layout than that of the module
        run = _method("reshape" if method == "view" else method)
        if method in _OF_SIZES or not reads(args, kwargs):
            return settled(self.evaluate(run, args, kwargs))
        name = calls.plain_name(method)
        if name not in KNOWN:
            raise Stopped(f"the method {method}() is not supported in a graph")
        return self._draw(node, name, run, args, kwargs)

    def _attribute(self, node: fx.Node, of: Any, name: str) -> Any:
        if name in _SIZED or not reads((of,), {}):
            return settled(self.evaluate(getattr, (of, name), {}))
        if name in ("T", "mT"):
            return self._draw(node, "transpose", _method(name), (of, -2, -1), {})
        raise Stopped(f"the tensor attribute .{name} is not supported in a graph")

    def _draw(self, node: fx.Node, name: str, run: Any, args: Any, kwargs: Any) -> Any:
        # the function decides whether a weight is tied or becomes its own layer
        call = Call(self, name, node.name, (run, args, kwargs))
        if name != "linear":
            args, kwargs = self.as_layers(args), self.as_layers(kwargs)
        try:
            return KNOWN[name](call, *args, **kwargs)
        except TypeError as cause:
            if cause.__traceback__ is not None and cause.__traceback__.tb_next is not None:
                raise
            raise Stopped(f"unsupported arguments of {name}(): {cause}") from cause

    def as_layers(self, item: Any) -> Any:
        """An argument with its parameters replaced by Parameter layers."""
        if isinstance(item, Weight):
            return self.drawing.parameter(item.value, item.path)
        if isinstance(item, (tuple, list)):
            made = [self.as_layers(part) for part in item]  # pyright: ignore[reportUnknownVariableType]
            return tuple(made) if isinstance(item, tuple) else made
        if isinstance(item, dict):
            return {key: self.as_layers(part) for key, part in item.items()}  # pyright: ignore[reportUnknownVariableType]
        return item

    def _parts(self, name: str, values: tuple[Any, ...]) -> Any:
        """The leaves of a tuple that a layer returns."""
        found = [leaves(name, value) for value in values]
        for leaf in found[0]:
            self.drawing.see(Ref(leaf), tuple(item[leaf] for item in found))
        return named(name, values[0])

    def _output(self, node: fx.Node) -> Any:
        return self.as_layers(self.resolved(node.args[0]))


class Call:
    """One call while it is converted."""

    def __init__(
        self, converter: Converter, name: str, wanted: str, ran: tuple[Any, Any, Any]
    ) -> None:
        self._converter = converter
        self._drawing = converter.drawing
        self.name = name
        self._wanted = wanted
        self._ran = ran

    @property
    def after(self) -> tuple[Any, ...]:
        """The result of the call for each sample."""
        return self._converter.evaluate(*self._ran)

    def layer(self, function: str, *inputs: Any, **args: Any) -> Ref:
        """Add a function layer."""
        return self.draw(function, inputs, args=args)

    def draw(self, kind: str, inputs: Sequence[Any], **layer: Any) -> Ref:
        """Add a layer without its own weights."""
        inputs = self._converter.as_layers(list(inputs))
        if any(has_varying(item) for item in layer.get("args", {}).values()):
            raise Stopped(f"{self.name}() with a size that differs between batches")
        if "shared_with" in layer:
            ref = self._drawing.add(kind, self._wanted, inputs, **layer)
            return self._drawing.see(ref, self.after)
        return self._drawing.layer_of(kind, self._wanted, inputs, **layer)

    def several(self, function: str, input: Any, **args: Any) -> Any:  # noqa: A002
        """Add a function layer that returns several tensors."""
        ref = self._drawing.add(function, self._wanted, [input], args=args)
        return self._converter._parts(ref.name, self.after)  # pyright: ignore[reportPrivateUsage]

    def reshaped(self, input: Any) -> Any:  # noqa: A002
        """Add layers that reshape the input to the shape of the result."""
        before = [tuple(item.shape) for item in self._values(input)]
        after = [tuple(item.shape) for item in self.after]
        for function, args in reshaping(before, after):
            input = self.layer(function, input, **args)  # noqa: A001
        return input

    def expanded(self, input: Any) -> Any:  # noqa: A002
        """Add a layer that expands axes of size 1."""
        before, after = self._values(input), self.after
        if all(mine.shape == other.shape for mine, other in zip(before, after, strict=True)):
            return input
        sizes = steady([tuple(item.shape) for item in after])
        missing = after[0].dim() - before[0].dim()
        for mine, other in zip(before, after, strict=True):
            whole = (1,) * missing + tuple(mine.shape)
            if any(old not in (1, new) for old, new in zip(whole, other.shape, strict=True)):
                raise Stopped(f"{self.name}() of an axis whose size is not 1")
        like = self._like(sizes, [tuple(item.shape) for item in after])
        own = [0 if size is None else size for size in sizes]
        return self.layer("expand", input, *like, sizes=own)

    def _like(self, sizes: list[int | None], shapes: list[tuple[int, ...]]) -> list[Any]:
        """A field whose sizes match the varying axes."""
        varying = [axis for axis, size in enumerate(sizes) if size is None]
        if not varying:
            return []
        for name, tensors in self._drawing.fields.items():
            both = list(zip(tensors, shapes, strict=True))
            fits = all(item.dim() > max(varying) for item, _ in both)
            if fits and all(item.shape[a] == shape[a] for item, shape in both for a in varying):
                return [Ref(name)]
        raise Stopped(f"{self.name}() to varying sizes that match no data field")

    def sliced(self, input: Any, item: slice, dim: int) -> Any:  # noqa: A002
        """Add a slice of an axis."""
        if item == slice(None):
            return input
        lengths = [tensor.shape[dim] for tensor in self._values(input)]
        found: list[tuple[int, int, int]] = []
        for sample, length in enumerate(lengths):
            found.append(self._converter.concrete(item, sample).indices(length))
        if any(step != 1 for _, _, step in found):
            raise Stopped("a slice with a step other than 1")
        starts = [start for start, _, _ in found]
        sizes = [max(0, stop - start) for start, stop, _ in found]
        if starts == [0] * len(found) and sizes == lengths:
            return input
        if len(set(starts)) > 1 or len(set(sizes)) > 1:
            raise Stopped("a slice whose bounds differ between batches")
        return self.layer("narrow", input, dim=dim, start=starts[0], length=sizes[0])

    def tied(self, weight: Any) -> str | None:
        """The embedding that owns this weight, or None."""
        return self._converter.tied(weight)

    def rank(self, input: Any) -> int:  # noqa: A002
        """The number of axes of a tensor."""
        return self._values(input)[0].dim()

    def length(self, input: Any, dim: int) -> int:  # noqa: A002
        """The size of an axis.

        Raises:
            Stopped: the size differs between batches.
        """
        size = steady([tuple(item.shape) for item in self._values(input)])[dim]
        if size is None:
            raise Stopped(f"{self.name}() of an axis whose size differs between batches")
        return size

    def dtype_before(self, input: Any) -> Any:  # noqa: A002
        """The dtype of a tensor."""
        return self._values(input)[0].dtype

    def _values(self, input: Any) -> list[Tensor]:  # noqa: A002
        num = self._converter.num_samples
        return [self._converter.concrete(input, sample) for sample in range(num)]


def _method(name: str) -> Callable[..., Any]:
    def run(of: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(of, name)
        return found(*args, **kwargs) if callable(found) else found

    return run
