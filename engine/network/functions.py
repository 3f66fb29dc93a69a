"""The torch functions that can be layers: an allow-list, each a small function of its inputs.

Positional parameters are inputs of the layer. Keyword-only parameters are its arguments, with
torch's names and defaults. Functions of one form are rows of a table. There are no shape suffixes,
because these take any shape.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Dims = int | list[int] | None
FunctionTable = dict[str, Callable[..., Any]]
"""Functions by name, each with its summary as its docstring."""


# --- functions of one form: rows of a table -------------------------------------------------


def _of_one(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor) -> Tensor:
        return function(x)

    return call


def _of_two(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(a: Tensor, b: Tensor) -> Tensor:
        return function(a, b)

    return call


def _with_number(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(a: Tensor, b: Tensor | None = None, *, other: float | None = None) -> Tensor:
        return function(a, _second(b, other))

    return call


def _along_axis(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, *, dim: int) -> Tensor:
        return function(x, dim)

    return call


def _second(b: Tensor | None, number: float | None) -> Any:
    if (b is None) == (number is None):
        raise ValueError("give either a second input or the number, not both or neither")
    return b if b is not None else number


def _axes(dim: Dims) -> int | tuple[int, ...] | None:
    return dim if dim is None or isinstance(dim, int) else tuple(dim)


def _rows(form: Callable[..., Callable[..., Tensor]], summaries: dict[str, str]) -> FunctionTable:
    table: FunctionTable = {}
    for name, summary in summaries.items():
        table[name] = form(getattr(torch, name))
        table[name].__name__, table[name].__doc__ = name, summary
    return table


# --- functions with arguments of their own ---------------------------------------------------


def add(
    a: Tensor, b: Tensor | None = None, *, other: float | None = None, alpha: float = 1
) -> Tensor:
    """``a + alpha * b``; ``other`` is a number to use instead of b."""
    return torch.add(a, _second(b, other), alpha=alpha)


def sub(
    a: Tensor, b: Tensor | None = None, *, other: float | None = None, alpha: float = 1
) -> Tensor:
    """``a - alpha * b``; ``other`` is a number to use instead of b."""
    return torch.sub(a, _second(b, other), alpha=alpha)


def div(
    a: Tensor,
    b: Tensor | None = None,
    *,
    other: float | None = None,
    rounding_mode: Literal["trunc", "floor"] | None = None,
) -> Tensor:
    """``a / b``; ``other`` is a number to use instead of b."""
    return torch.div(a, _second(b, other), rounding_mode=rounding_mode)


def pow(a: Tensor, b: Tensor | None = None, *, exponent: float | None = None) -> Tensor:  # noqa: A001 - torch's name
    """``a`` to the power of the second input, or of the number ``exponent``."""
    return torch.pow(a, _second(b, exponent))


def clamp(x: Tensor, *, min: float | None = None, max: float | None = None) -> Tensor:  # noqa: A002 - torch's names
    """Input clamped to [min, max]."""
    return torch.clamp(x, min=min, max=max)


def cat(*tensors: Tensor, dim: int = 0) -> Tensor:
    """Inputs concatenated along an axis (1 is the first axis after the batch)."""
    return torch.cat(tensors, dim=dim)


def stack(*tensors: Tensor, dim: int = 0) -> Tensor:
    """Inputs stacked along a new axis."""
    return torch.stack(tensors, dim=dim)


def gather(x: Tensor, index: Tensor, *, dim: int) -> Tensor:
    """Entries of x selected by an integer tensor along an axis."""
    return torch.gather(x, dim, index)


def index_select(x: Tensor, index: Tensor, *, dim: int) -> Tensor:
    """Slices of x selected by a vector of integers along an axis."""
    return torch.index_select(x, dim, index)


def masked_fill(x: Tensor, mask: Tensor, *, value: float) -> Tensor:
    """Input with ``value`` where the mask is nonzero."""
    return torch.masked_fill(x, mask.bool(), value)


def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Second input where the condition is nonzero, third input elsewhere."""
    return torch.where(condition.bool(), a, b)


def einsum(*operands: Tensor, equation: str) -> Tensor:
    """Sum of products in Einstein notation."""
    return torch.einsum(equation, *operands)


def reshape(x: Tensor, *, shape: list[int]) -> Tensor:
    """Input with another shape, including the batch axis; -1 is inferred."""
    return torch.reshape(x, tuple(shape))


def flatten(x: Tensor, *, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Input with a range of axes flattened into one (``start_dim=1`` keeps the batch)."""
    return torch.flatten(x, start_dim, end_dim)


def unflatten(x: Tensor, *, dim: int, sizes: list[int]) -> Tensor:
    """Input with one axis split into several."""
    return torch.unflatten(x, dim, tuple(sizes))


def permute(x: Tensor, *, dims: list[int]) -> Tensor:
    """Input with its axes permuted."""
    return torch.permute(x, tuple(dims))


def transpose(x: Tensor, *, dim0: int, dim1: int) -> Tensor:
    """Input with two axes swapped."""
    return torch.transpose(x, dim0, dim1)


def gelu(x: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Input times its normal cumulative distribution function."""
    return F.gelu(x, approximate=approximate)


def mean(x: Tensor, *, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Mean over the given axes, or over all."""
    return torch.mean(x, dim=_axes(dim), keepdim=keepdim)  # pyright: ignore[reportArgumentType, reportCallIssue]


def sum(x: Tensor, *, dim: Dims = None, keepdim: bool = False) -> Tensor:  # noqa: A001 - torch's name
    """Sum over the given axes, or over all."""
    return torch.sum(x, dim=_axes(dim), keepdim=keepdim)  # pyright: ignore[reportArgumentType, reportCallIssue]


def amax(x: Tensor, *, dim: int | list[int], keepdim: bool = False) -> Tensor:
    """Maximum over the given axes."""
    return torch.amax(x, dim=_axes(dim), keepdim=keepdim)  # pyright: ignore[reportArgumentType]


def amin(x: Tensor, *, dim: int | list[int], keepdim: bool = False) -> Tensor:
    """Minimum over the given axes."""
    return torch.amin(x, dim=_axes(dim), keepdim=keepdim)  # pyright: ignore[reportArgumentType]


def argmax(x: Tensor, *, dim: int, keepdim: bool = False) -> Tensor:
    """Index of the maximum along an axis."""
    return torch.argmax(x, dim=dim, keepdim=keepdim)


def norm(x: Tensor, *, p: float = 2, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """p-norm over the given axes, or over all."""
    return torch.linalg.vector_norm(x, ord=p, dim=_axes(dim), keepdim=keepdim)


def flip(x: Tensor, *, dims: list[int]) -> Tensor:
    """Input with the given axes reversed."""
    return torch.flip(x, dims=tuple(dims))


def one_hot(x: Tensor, *, num_classes: int) -> Tensor:
    """Integers below ``num_classes`` as float32 one-hot vectors."""
    return F.one_hot(x, num_classes).to(torch.float32)


def cosine_similarity(a: Tensor, b: Tensor, *, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Cosine similarity of vectors along an axis."""
    return F.cosine_similarity(a, b, dim=dim, eps=eps)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention over [..., steps, width]; the mask is nonzero where a step may be attended to."""
    allowed = None if attn_mask is None else attn_mask.bool()
    return F.scaled_dot_product_attention(query, key, value, allowed, 0.0, is_causal, scale=scale)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``; the weights are ``Parameter`` layers."""
    return F.linear(x, weight, bias)


def embedding(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of a weight, which is a ``Parameter`` layer, selected by integers."""
    return F.embedding(x, weight)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    normalized_shape: list[int],
    eps: float = 1e-5,
) -> Tensor:
    """Input normalized over its last axes to mean 0 and variance 1, times weight, plus bias."""
    return F.layer_norm(x, list(normalized_shape), weight, bias, eps)


def expand(x: Tensor, like: Tensor | None = None, *, sizes: list[int]) -> Tensor:
    """Input with axes of size 1 expanded: -1 keeps an axis, 0 uses the size of ``like``."""
    if like is None and 0 in sizes:
        raise ValueError("a size of 0 is that of a second input: give one")
    shape = sizes if like is None else [size or like.shape[a] for a, size in enumerate(sizes)]
    return x.expand(tuple(shape))


def narrow(x: Tensor, *, dim: int, start: int, length: int) -> Tensor:
    """Range of an axis."""
    return torch.narrow(x, dim, start, length)


def select(x: Tensor, *, dim: int, index: int) -> Tensor:
    """One slice of an axis; the axis is removed."""
    return torch.select(x, dim, index)


def chunk(x: Tensor, *, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Axis split into at most ``chunks`` equal parts, the last may be smaller: ``name.0``, … ."""
    return torch.chunk(x, chunks, dim)


def split(
    x: Tensor, *, split_size_or_sections: int | list[int], dim: int = 0
) -> tuple[Tensor, ...]:
    """Axis split into parts of given sizes: the leaves ``name.0``, ``name.1`` …."""
    sizes = split_size_or_sections
    return torch.split(x, sizes if isinstance(sizes, int) else list(sizes), dim)


def tril(x: Tensor, *, diagonal: int = 0) -> Tensor:
    """Last two axes with zeros above a diagonal."""
    return torch.tril(x, diagonal)


def triu(x: Tensor, *, diagonal: int = 0) -> Tensor:
    """Last two axes with zeros below a diagonal."""
    return torch.triu(x, diagonal)


def positions(x: Tensor, *, dim: int = 1) -> Tensor:
    """Indices 0, 1, 2 … along an axis of the input, as int64."""
    return torch.arange(x.shape[dim], device=x.device)


def causal_mask(x: Tensor, *, dim: int = 1) -> Tensor:
    """Which step may attend to which along an axis: [steps, steps], itself and earlier ones."""
    steps = positions(x, dim=dim)
    return steps[:, None] >= steps


FUNCTIONS: FunctionTable = {
    **_rows(_of_one, {
        "neg": "Negation of the input.",
        "exp": "Exponential of the input.",
        "log": "Natural logarithm of the input.",
        "sqrt": "Square root of the input.",
        "abs": "Absolute value of the input.",
        "square": "Square of the input.",
        "reciprocal": "Reciprocal of the input: 1 / x.",
        "sigmoid": "Logistic function of the input.",
        "tanh": "Hyperbolic tangent of the input.",
        "relu": "Input with negative values set to zero.",
        "logical_not": "Whether the input is zero.",
    }),
    **_rows(_of_two, {
        "matmul": "Matrix product over the last two axes.",
        "bmm": "Batched matrix product of [B, n, m] and [B, m, p].",
        "maximum": "Element-wise maximum of two inputs.",
        "minimum": "Element-wise minimum of two inputs.",
        "logical_and": "Whether both inputs are nonzero.",
        "logical_or": "Whether either input is nonzero.",
    }),
    **_rows(_with_number, {
        "mul": "Product of two inputs, or of one input and the number ``other``.",
        "eq": "Whether two inputs, or one input and the number ``other``, are equal.",
        "ne": "Whether two inputs, or one input and the number ``other``, differ.",
        "lt": "Whether the first input is less than the second, or than the number ``other``.",
        "le": "Whether the first input is less than or equal to the second, "
        "or to the number ``other``.",
        "gt": "Whether the first input is greater than the second, or than the number ``other``.",
        "ge": "Whether the first input is greater than or equal to the second, "
        "or the number ``other``.",
    }),
    **_rows(_along_axis, {
        "softmax": "Softmax: values that sum to 1 along an axis.",
        "log_softmax": "Logarithm of the softmax along an axis.",
        "squeeze": "Input without an axis of size 1.",
        "unsqueeze": "Input with a new axis of size 1.",
        "cumsum": "Cumulative sum along an axis.",
    }),
    **{one.__name__: one for one in (
        add, sub, div, pow, clamp, cat, stack, gather, index_select, masked_fill, where,
        einsum, reshape, flatten, unflatten, permute, transpose, gelu, mean, sum, amax, amin,
        argmax, norm, flip, one_hot, cosine_similarity, scaled_dot_product_attention, linear,
        embedding, layer_norm, expand, narrow, select, chunk, split, tril, triu, positions,
        causal_mask,
    )},
}  # fmt: skip


class Function(nn.Module):
    """A listed function as a layer, so that it has a name and can be watched."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.function = FUNCTIONS[name]
        self.arguments = arguments

    def forward(self, *inputs: Tensor) -> Any:
        """Call the function with the layer's arguments."""
        return self.function(*inputs, **self.arguments)

    def extra_repr(self) -> str:
        """Return the name, for error messages."""
        return self.function.__name__


def num_inputs(name: str) -> tuple[int, int | None]:
    """Return how many inputs a function takes: min and max (None: any number)."""
    positional = [
        item
        for item in inspect.signature(FUNCTIONS[name]).parameters.values()
        if item.kind is not item.KEYWORD_ONLY
    ]
    if any(item.kind is item.VAR_POSITIONAL for item in positional):
        return 1, None
    return len([p for p in positional if p.default is p.empty]), len(positional)
