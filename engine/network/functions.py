"""The torch functions that can be layers: an allow-list, each a small function of its inputs.

Positional parameters are inputs of the layer. Keyword-only parameters are its arguments, with
torch's names and defaults. A function that torch calls in the same way is a row of the table. There
are no shape suffixes, because these take any shape.
"""

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Dims = int | list[int] | None


def _row(
    name: str, summary: str, inputs: str = "input", *, number: str = "", **arguments: Any
) -> Callable[..., Any]:
    """Return torch's function of this name, with ``summary`` as its docstring.

    ``inputs``: torch's names of its tensors; an optional one ends with ``?``, and ``*tensors`` is
    any number. ``number``: the argument that a number may be given by instead of a second input.
    ``arguments``: the type of each, or its type and default.
    """
    function: Callable[..., Any] = getattr(F, name, None) or getattr(torch, name)
    names = [item.strip("*?") for item in inputs.split()]
    typed = {key: one if isinstance(one, tuple) else (one,) for key, one in arguments.items()}
    call = _call(function, names, number, typed)

    def positional(item: str) -> Parameter:
        kind = Parameter.VAR_POSITIONAL if item[0] == "*" else Parameter.POSITIONAL_ONLY
        default = None if item[-1] == "?" else Parameter.empty
        return Parameter(item.strip("*?"), kind, default=default)

    found = [positional(item) for item in inputs.split()]
    if number:
        typed = {number: (float | None, None), **typed}
    for key, (annotation, *given) in typed.items():
        default = given[0] if given else Parameter.empty
        found.append(Parameter(key, Parameter.KEYWORD_ONLY, annotation=annotation, default=default))
    call.__name__, call.__doc__ = name, summary
    vars(call)["__signature__"] = inspect.Signature(found)
    return call


def _call(
    function: Callable[..., Any], names: list[str], number: str, typed: dict[str, tuple[Any, ...]]
) -> Callable[..., Any]:
    """Return a function of tensors and arguments that calls torch's."""
    defaults = {key: one[1] for key, one in typed.items() if len(one) == 2}

    def of_any(*given: Tensor, **args: Any) -> Any:
        return function(given, **defaults | args)

    def with_number(*given: Tensor, **args: Any) -> Any:
        args = defaults | args
        other = args.pop(number, None)
        if (len(given) == 1) == (other is None):
            raise ValueError("give either a second input or the number, not both or neither")
        return function(*given, *([] if other is None else [other]), **args)

    def by_name(*given: Tensor, **args: Any) -> Any:
        return function(**dict(zip(names, given, strict=False)), **defaults | args)

    def with_defaults(*given: Tensor, **args: Any) -> Any:
        return function(*given, **defaults | args)

    def plain(*given: Tensor, **args: Any) -> Any:
        return function(*given, **args)

    if names == ["tensors"]:
        return of_any
    if number:
        return with_number
    if len(names) > 1 and len(defaults) < len(typed):
        return by_name  # torch has such an argument between the tensors
    return with_defaults if defaults else plain


def masked_fill(x: Tensor, mask: Tensor, *, value: float) -> Tensor:
    """Input with ``value`` where the mask is nonzero."""
    return torch.masked_fill(x, mask.bool(), value)


def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Second input where the condition is nonzero, third input elsewhere."""
    return torch.where(condition.bool(), a, b)


def einsum(*operands: Tensor, equation: str) -> Tensor:
    """Sum of products in Einstein notation."""
    return torch.einsum(equation, *operands)


def norm(x: Tensor, *, p: float = 2, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """p-norm over the given axes, or over all."""
    return torch.linalg.vector_norm(x, ord=p, dim=dim, keepdim=keepdim)


def one_hot(x: Tensor, *, num_classes: int) -> Tensor:
    """Integers below ``num_classes`` as float32 one-hot vectors."""
    return F.one_hot(x, num_classes).to(torch.float32)


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


def expand(x: Tensor, like: Tensor | None = None, *, sizes: list[int]) -> Tensor:
    """Input with axes of size 1 expanded: -1 keeps an axis, 0 uses the size of ``like``."""
    if like is None and 0 in sizes:
        raise ValueError("a size of 0 is that of a second input: give one")
    shape = sizes if like is None else [size or like.shape[a] for a, size in enumerate(sizes)]
    return x.expand(tuple(shape))


def positions(x: Tensor, *, dim: int = 1) -> Tensor:
    """Indices 0, 1, 2 … along an axis of the input, as int64."""
    return torch.arange(x.shape[dim], device=x.device)


def causal_mask(x: Tensor, *, dim: int = 1) -> Tensor:
    """Which step may attend to which along an axis: [steps, steps], itself and earlier ones."""
    steps = positions(x, dim=dim)
    return steps[:, None] >= steps


FUNCTIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (
        _row("neg", "Negation of the input."),
        _row("exp", "Exponential of the input."),
        _row("log", "Natural logarithm of the input."),
        _row("sqrt", "Square root of the input."),
        _row("abs", "Absolute value of the input."),
        _row("square", "Square of the input."),
        _row("reciprocal", "Reciprocal of the input: 1 / x."),
        _row("sigmoid", "Logistic function of the input."),
        _row("tanh", "Hyperbolic tangent of the input."),
        _row("relu", "Input with negative values set to zero."),
        _row("logical_not", "Whether the input is zero."),
        _row("matmul", "Matrix product over the last two axes.", "input other"),
        _row("bmm", "Batched matrix product of [B, n, m] and [B, m, p].", "input mat2"),
        _row("maximum", "Element-wise maximum of two inputs.", "input other"),
        _row("minimum", "Element-wise minimum of two inputs.", "input other"),
        _row("logical_and", "Whether both inputs are nonzero.", "input other"),
        _row("logical_or", "Whether either input is nonzero.", "input other"),
        *(
            _row(name, summary, "a b?", number="other")
            for name, summary in {
                "mul": "Product of two inputs, or of one input and the number ``other``.",
                "eq": "Whether two inputs, or one input and the number ``other``, are equal.",
                "ne": "Whether two inputs, or one input and the number ``other``, differ.",
                "lt": "Whether the first input is less than the second, or than the number "
                "``other``.",
                "le": "Whether the first input is less than or equal to the second, "
                "or to the number ``other``.",
                "gt": "Whether the first input is greater than the second, or than the number "
                "``other``.",
                "ge": "Whether the first input is greater than or equal to the second, "
                "or the number ``other``.",
            }.items()
        ),
        _row("softmax", "Softmax: values that sum to 1 along an axis.", dim=int),
        _row("log_softmax", "Logarithm of the softmax along an axis.", dim=int),
        _row("squeeze", "Input without an axis of size 1.", dim=int),
        _row("unsqueeze", "Input with a new axis of size 1.", dim=int),
        _row("cumsum", "Cumulative sum along an axis.", dim=int),
        _row(
            "add",
            "``a + alpha * b``; ``other`` is a number to use instead of b.",
            "a b?",
            number="other",
            alpha=(float, 1),
        ),
        _row(
            "sub",
            "``a - alpha * b``; ``other`` is a number to use instead of b.",
            "a b?",
            number="other",
            alpha=(float, 1),
        ),
        _row(
            "div",
            "``a / b``; ``other`` is a number to use instead of b.",
            "a b?",
            number="other",
            rounding_mode=(Literal["trunc", "floor"] | None, None),
        ),
        _row(
            "pow",
            "``a`` to the power of the second input, or of the number ``exponent``.",
            "a b?",
            number="exponent",
        ),
        _row(
            "clamp",
            "Input clamped to [min, max].",
            min=(float | None, None),
            max=(float | None, None),
        ),
        _row(
            "cat",
            "Inputs concatenated along an axis (1 is the first axis after the batch).",
            "*tensors",
            dim=(int, 0),
        ),
        _row("stack", "Inputs stacked along a new axis.", "*tensors", dim=(int, 0)),
        _row(
            "gather",
            "Entries of x selected by an integer tensor along an axis.",
            "input index",
            dim=int,
        ),
        _row(
            "index_select",
            "Slices of x selected by a vector of integers along an axis.",
            "input index",
            dim=int,
        ),
        masked_fill,
        where,
        einsum,
        _row(
            "reshape",
            "Input with another shape, including the batch axis; -1 is inferred.",
            shape=list[int],
        ),
        _row(
            "flatten",
            "Input with a range of axes flattened into one (``start_dim=1`` keeps the batch).",
            start_dim=(int, 0),
            end_dim=(int, -1),
        ),
        _row("unflatten", "Input with one axis split into several.", dim=int, sizes=list[int]),
        _row("permute", "Input with its axes permuted.", dims=list[int]),
        _row("transpose", "Input with two axes swapped.", dim0=int, dim1=int),
        _row(
            "gelu",
            "Input times its normal cumulative distribution function.",
            approximate=(Literal["none", "tanh"], "none"),
        ),
        _row(
            "mean",
            "Mean over the given axes, or over all.",
            dim=(Dims, None),
            keepdim=(bool, False),
        ),
        _row(
            "sum", "Sum over the given axes, or over all.", dim=(Dims, None), keepdim=(bool, False)
        ),
        _row("amax", "Maximum over the given axes.", dim=int | list[int], keepdim=(bool, False)),
        _row("amin", "Minimum over the given axes.", dim=int | list[int], keepdim=(bool, False)),
        _row("argmax", "Index of the maximum along an axis.", dim=int, keepdim=(bool, False)),
        norm,
        _row("flip", "Input with the given axes reversed.", dims=list[int]),
        one_hot,
        _row(
            "cosine_similarity",
            "Cosine similarity of vectors along an axis.",
            "x1 x2",
            dim=(int, 1),
            eps=(float, 1e-8),
        ),
        scaled_dot_product_attention,
        _row(
            "linear",
            "``x @ weight.T + bias``; the weights are ``Parameter`` layers.",
            "input weight bias?",
        ),
        _row(
            "embedding",
            "Rows of a weight, which is a ``Parameter`` layer, selected by integers.",
            "input weight",
        ),
        _row(
            "layer_norm",
            "Input normalized over its last axes to mean 0 and variance 1, "
            "times weight, plus bias.",
            "input weight? bias?",
            normalized_shape=list[int],
            eps=(float, 1e-5),
        ),
        expand,
        _row("narrow", "Range of an axis.", dim=int, start=int, length=int),
        _row("select", "One slice of an axis; the axis is removed.", dim=int, index=int),
        _row(
            "chunk",
            "Axis split into at most ``chunks`` equal parts, the last may be smaller: "
            "``name.0``, … .",
            chunks=int,
            dim=(int, 0),
        ),
        _row(
            "split",
            "Axis split into parts of given sizes: the leaves ``name.0``, ``name.1`` ….",
            "tensor",
            split_size_or_sections=int | list[int],
            dim=(int, 0),
        ),
        _row("tril", "Last two axes with zeros above a diagonal.", diagonal=(int, 0)),
        _row("triu", "Last two axes with zeros below a diagonal.", diagonal=(int, 0)),
        positions,
        causal_mask,
    )
}


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
