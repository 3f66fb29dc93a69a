"""Builds a graph of layers in plain torch, for comparison with the module it was traced from.

This is an implementation of the spec that shares no code with the engine. Tests check that both
give the same results.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Document = Mapping[str, Any]
_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_DTYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}


def _axes(dim: Any) -> Any:
    return tuple(dim) if isinstance(dim, list) else dim


def _expand(x: Tensor, like: Tensor | None = None, *, sizes: Sequence[int]) -> Tensor:
    shape = sizes if like is None else [size or like.shape[a] for a, size in enumerate(sizes)]
    return x.expand(tuple(shape))


def _pow(x: Tensor, other: Any = None, *, exponent: Any = None) -> Tensor:
    return torch.pow(x, exponent if other is None else other)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **args: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, **args)


def _causal_mask(x: Tensor, dim: int = 1) -> Tensor:
    steps = torch.arange(x.shape[dim], device=x.device)
    return steps[:, None] >= steps


def _layer_norm(x: Tensor, weight: Any = None, bias: Any = None, **args: Any) -> Tensor:
    return F.layer_norm(x, args["normalized_shape"], weight, bias, args.get("eps", 1e-5))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("matmul", "bmm", "neg", "exp", "log", "sqrt", "abs", "clamp", "reshape", "flatten"),
            *("unflatten", "permute", "transpose", "squeeze", "unsqueeze", "softmax"),
            *("log_softmax", "sigmoid", "tanh", "relu", "mean", "sum", "amax", "amin", "argmax"),
            *("narrow", "select", "chunk", "square", "reciprocal", "maximum", "minimum", "cumsum"),
            *("flip", "cosine_similarity", "logical_and", "logical_or", "logical_not", "tril"),
            *("triu", "add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge"),
        )
    },
    "cat": lambda *items, dim=0: torch.cat(items, dim),
    "stack": lambda *items, dim=0: torch.stack(items, dim),
    "einsum": lambda *items, equation: torch.einsum(equation, *items),
    "pow": _pow,
    "gather": lambda x, index, dim: torch.gather(x, dim, index),
    "index_select": lambda x, index, dim: torch.index_select(x, dim, index),
    "masked_fill": lambda x, mask, value: x.masked_fill(mask.bool(), value),
    "where": lambda condition, a, b: torch.where(condition.bool(), a, b),
    "norm": lambda x, p=2, dim=None, keepdim=False: torch.linalg.vector_norm(
        x, ord=p, dim=_axes(dim), keepdim=keepdim
    ),
    "split": lambda x, split_size_or_sections, dim=0: torch.split(x, split_size_or_sections, dim),
    "positions": lambda x, dim=1: torch.arange(x.shape[dim], device=x.device),
    "causal_mask": _causal_mask,
    "scaled_dot_product_attention": _attention,
    "expand": _expand,
    "linear": F.linear,
    "embedding": F.embedding,
    "layer_norm": _layer_norm,
}


class _Function(nn.Module):
    def __init__(self, name: str, args: Document) -> None:
        super().__init__()
        self.name, self.args = name, dict(args)

    def forward(self, *inputs: Any) -> Any:
        return _FUNCTIONS[self.name](*inputs, **self.args)


class _Parameter(nn.Module):
    def __init__(self, shape: Sequence[int], kind: str = "float32") -> None:
        super().__init__()
        empty = torch.zeros(tuple(shape), dtype=_DTYPES[kind])
        if kind == "float32":
            self.weight = nn.Parameter(empty)
        else:
            self.register_buffer("weight", empty)

    def forward(self, _: Any) -> Any:
        return self.weight


class _TiedEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        if input.is_floating_point():
            return F.linear(input, self.weight)
        return super().forward(input)


_OURS: dict[str, Callable[..., nn.Module]] = {
    "Parameter": _Parameter,
    "TiedEmbedding": _TiedEmbedding,
}


def build(kind: str, args: Document) -> nn.Module:
    """Create one layer."""
    named = {name: _value(item) for name, item in args.items()}
    if kind in _FUNCTIONS:
        return _Function(kind, named)
    return (_OURS.get(kind) or getattr(nn, kind))(**named)


def _value(item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        return tuple(_value(part) for part in item)  # pyright: ignore[reportUnknownVariableType]
    return _NUMBERS.get(item, item) if isinstance(item, str) else item


def leaves(name: str, value: Any) -> dict[str, Tensor]:
    """The tensors of a layer's output, by the names that other layers use as inputs."""
    if isinstance(value, Tensor):
        return {name: value}
    found: dict[str, Tensor] = {}
    if isinstance(value, (tuple, list)):
        for number, item in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            found |= leaves(f"{name}.{number}", item)
    return found


class Rebuilt(nn.Module):
    """A graph as a module that maps data fields to outputs."""

    def __init__(self, graph: Document) -> None:
        super().__init__()
        self.graph = graph
        for layer in graph["layers"]:
            if "shared_with" not in layer:
                made = build(layer["type"], layer.get("args", {}))
                # not with add_module, which refuses names such as "forward"
                self._modules[layer["name"]] = made.requires_grad_(layer.get("trainable", True))

    def forward(self, fields: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Compute all layers in order."""
        values = dict(fields)
        for layer in self.graph["layers"]:
            output = self._call(layer, [values[name] for name in layer["inputs"]], values)
            if layer.get("stop_gradient"):
                output = output.detach()
            found = leaves(layer["name"], output)
            values |= found
            values[layer["name"]] = next(iter(found.values()))
        return tuple(values[name] for name in self.graph["outputs"])

    def train(self, mode: bool = True) -> "Rebuilt":
        """Switch between training and evaluation; a layer may be named ``training``."""
        self.__dict__["training"] = mode
        for module in self._modules.values():
            if module is not None:
                module.train(mode)
        return self

    def _call(self, layer: Document, given: list[Tensor], values: Mapping[str, Tensor]) -> Any:
        module: Any = self._modules[layer.get("shared_with", layer["name"])]
        if layer.get("lengths"):
            return call_packed(module, given, values[layer["lengths"]])
        return call(module, given)


def call(module: nn.Module, given: Sequence[Any]) -> Any:
    """Run a layer on its inputs; the two states of an LSTM are passed as a pair."""
    if isinstance(module, (nn.LSTM, nn.LSTMCell)) and len(given) == 3:
        return module(given[0], (given[1], given[2]))
    return module(*given)


def call_packed(module: Any, given: Sequence[Any], lengths: Tensor) -> Any:
    """Run a recurrent layer on a packed sequence, and pad its output with zeros."""
    steps = given[0].shape[1 if module.batch_first else 0]
    packed = nn.utils.rnn.pack_padded_sequence(
        given[0], lengths.cpu(), batch_first=module.batch_first, enforce_sorted=False
    )
    output, state = call(module, [packed, *given[1:]])
    padded, _ = nn.utils.rnn.pad_packed_sequence(
        output, batch_first=module.batch_first, total_length=steps
    )
    return padded, state
