"""Converters for torch functions and methods, each of which adds layers to the graph.

The first argument is where to draw; the others are torch's own, under torch's names. A tensor among
them is a `Ref` or a `Fixed`; a size that differs from batch to batch a `Varying`.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from glasshouse.client.modules.source_lines import Stopped
from glasshouse.client.modules.values import Fixed, Ref

Caller = Any  # Call of converting.py, which imports this
Draw = Callable[..., Any]
KNOWN: dict[str, Draw] = {}
"""By the name of torch's function or method."""
_PLACES = (torch, F, torch.Tensor, operator, torch.linalg, torch.special)


def known(*names: str) -> Callable[[Draw], Draw]:
    """Register a function under torch's names."""

    def register(draw: Draw) -> Draw:
        KNOWN.update(dict.fromkeys(names, draw))
        return draw

    return register


def name_of(target: Any) -> str | None:
    """The registered name of a function of torch or ``operator``; None if it is not supported."""
    return _names().get(id(target))


_BY_ID: dict[int, str] = {}


def _names() -> dict[int, str]:
    if not _BY_ID:
        for place in _PLACES:
            for name in dir(place):
                plain = name.strip("_") if name.startswith("_") else name
                if _plain(plain) in KNOWN and callable(found := getattr(place, name)):
                    _BY_ID.setdefault(id(found), _plain(plain))
    return _BY_ID


def _plain(name: str) -> str:
    """The name without the in-place marker of torch or Python."""
    if name in ("and_", "or_", "not_"):
        return name
    bare = name.rstrip("_")
    if bare.startswith("i") and bare[1:] in _IN_PLACE:
        return bare[1:]
    return bare


_IN_PLACE = ("add", "sub", "mul", "truediv", "matmul", "pow")


def plain_name(method: str) -> str:
    """The registered name of a method."""
    return _plain(method.strip("_") if method.startswith("__") else method)


# --- one after the other ----------------------------------------------------------------------


def _unary(name: str, *others: str) -> None:
    @known(name, *others)
    def draw(to: Caller, input: Any) -> Ref:  # noqa: A002 (torch's name)
        return to.layer(name, input)


for _name in ("exp", "log", "sqrt", "square", "reciprocal", "sigmoid", "tanh", "logical_not"):
    _unary(_name)
_unary("neg", "negative")
_unary("abs", "absolute")


@known("relu")
def _relu(to: Caller, input: Any, inplace: bool = False) -> Ref:  # noqa: A002
    del inplace
    return to.layer("relu", input)


@known("rsqrt")
def _rsqrt(to: Caller, input: Any) -> Ref:  # noqa: A002
    return to.layer("pow", input, exponent=-0.5)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _binary(to: Caller, name: str, a: Any, b: Any, key: str = "other", **args: Any) -> Ref:
    if _number(b) and isinstance(a, Ref):
        return to.layer(name, a, **{key: b}, **args)
    return to.layer(name, a, b, **args)


@known("add")
def _add(to: Caller, input: Any, other: Any, *, alpha: Any = 1) -> Ref:  # noqa: A002
    if _number(input):
        input, other = other, input  # noqa: A001
        if alpha != 1:
            raise Stopped("add of a number and a tensor with alpha")
    return _binary(to, "add", input, other, alpha=None if alpha == 1 else alpha)


@known("sub", "subtract")
def _sub(to: Caller, input: Any, other: Any, *, alpha: Any = 1) -> Ref:  # noqa: A002
    if _number(input) and alpha == 1:  # one less x is x's negative and one more: the same bits
        return to.layer("add", to.layer("neg", other), other=input)
    return _binary(to, "sub", input, other, alpha=None if alpha == 1 else alpha)


@known("rsub")
def _rsub(to: Caller, input: Any, other: Any) -> Ref:  # noqa: A002
    return _sub(to, other, input)


@known("mul", "multiply")
def _mul(to: Caller, input: Any, other: Any) -> Ref:  # noqa: A002
    return _binary(to, "mul", *((other, input) if _number(input) else (input, other)))


@known("div", "divide", "true_divide", "truediv")
def _div(to: Caller, input: Any, other: Any, *, rounding_mode: str | None = None) -> Ref:  # noqa: A002
    if _number(input):  # as torch divides a number by a tensor
        return _mul(to, to.layer("reciprocal", other), input)
    return _binary(to, "div", input, other, rounding_mode=rounding_mode)


@known("pow")
def _pow(to: Caller, input: Any, exponent: Any) -> Ref:  # noqa: A002
    return _binary(to, "pow", input, exponent, "exponent")


def _comparison(name: str) -> None:
    @known(name)
    def draw(to: Caller, input: Any, other: Any) -> Ref:  # noqa: A002
        return _binary(to, name, input, other)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _comparison(_name)


def _pair(name: str, *others: str) -> None:
    @known(name, *others)
    def draw(to: Caller, input: Any, other: Any) -> Ref:  # noqa: A002
        return to.layer(name, input, other)


_pair("matmul", "mm")
_pair("logical_and", "and_")
_pair("logical_or", "or_")


@known("invert", "bitwise_not")
def _invert(to: Caller, input: Any) -> Ref:  # noqa: A002
    if to.dtype_before(input) is not torch.bool:
        raise Stopped("~ of a tensor that is not boolean")
    return to.layer("logical_not", input)


@known("bmm")
def _bmm(to: Caller, input: Any, mat2: Any) -> Ref:  # noqa: A002
    return to.layer("bmm", input, mat2)


@known("maximum", "minimum")
def _extreme(to: Caller, input: Any, other: Any) -> Ref:  # noqa: A002
    return to.layer(to.name, input, other)


@known("clamp", "clip")
def _clamp(to: Caller, input: Any, min: Any = None, max: Any = None) -> Ref:  # noqa: A002
    return to.layer("clamp", input, min=min, max=max)


@known("clamp_min")
def _clamp_min(to: Caller, input: Any, min: Any) -> Ref:  # noqa: A002
    return to.layer("clamp", input, min=min)


@known("clamp_max")
def _clamp_max(to: Caller, input: Any, max: Any) -> Ref:  # noqa: A002
    return to.layer("clamp", input, max=max)


# --- shapes -----------------------------------------------------------------------------------


@known("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")
def _reshape(to: Caller, input: Any, *_: Any, **__: Any) -> Ref:  # noqa: A002
    """Uses only the result's shape, because the arguments may be sizes of the batch."""
    return to.reshaped(input)


@known("permute")
def _permute(to: Caller, input: Any, *dims: Any) -> Ref:  # noqa: A002
    return to.layer("permute", input, dims=list(_flat(dims)))


@known("transpose", "swapaxes", "swapdims")
def _transpose(to: Caller, input: Any, dim0: int, dim1: int) -> Ref:  # noqa: A002
    return to.layer("transpose", input, dim0=dim0, dim1=dim1)


@known("t")
def _t(to: Caller, input: Any) -> Ref:  # noqa: A002
    return _transpose(to, input, 0, 1) if to.rank(input) == 2 else input


@known("squeeze")
def _squeeze(to: Caller, input: Any, dim: Any = None) -> Ref:  # noqa: A002
    return to.layer("squeeze", input, dim=dim) if isinstance(dim, int) else to.reshaped(input)


@known("unsqueeze")
def _unsqueeze(to: Caller, input: Any, dim: int) -> Ref:  # noqa: A002
    return to.layer("unsqueeze", input, dim=dim)


@known("contiguous", "clone", "cpu")
def _same(_to: Caller, input: Any, *, memory_format: Any = None) -> Any:  # noqa: A002
    del memory_format
    return input


@known("to", "float", "double", "half", "bfloat16", "int", "long", "type_as", "type")
def _typed(to: Caller, input: Any, *_: Any, **__: Any) -> Any:  # noqa: A002
    before, after = to.dtype_before(input), to.after[0].dtype
    if before is after:
        return input
    if after is torch.float32 and not before.is_floating_point:
        return to.layer("mul", input, other=1.0)
    raise Stopped(f"a conversion from {before} to {after} is not supported in a graph")


@known("bool")
def _bool(to: Caller, input: Any) -> Ref:  # noqa: A002
    return input if to.dtype_before(input) is torch.bool else to.layer("ne", input, other=0)


@known("expand", "expand_as", "broadcast_to", "repeat")
def _expand(to: Caller, input: Any, *_: Any, **__: Any) -> Ref:  # noqa: A002
    return to.expanded(input)


@known("detach")
def _detach(to: Caller, input: Any) -> Ref:  # noqa: A002
    return to.draw("Identity", [input], stop_gradient=True)


@known("cat", "concat", "concatenate")
def _cat(to: Caller, tensors: Sequence[Any], dim: int = 0) -> Ref:
    return to.layer("cat", *tensors, dim=dim)


@known("stack")
def _stack(to: Caller, tensors: Sequence[Any], dim: int = 0) -> Ref:
    return to.layer("stack", *tensors, dim=dim)


@known("chunk")
def _chunk(to: Caller, input: Any, chunks: int, dim: int = 0) -> Any:  # noqa: A002
    return to.several("chunk", input, chunks=chunks, dim=dim)


@known("split")
def _split(to: Caller, input: Any, split_size: Any, dim: int = 0) -> Any:  # noqa: A002
    sizes = list(split_size) if isinstance(split_size, (tuple, list)) else split_size
    return to.several("split", input, split_size_or_sections=sizes, dim=dim)


@known("unbind")
def _unbind(to: Caller, input: Any, dim: int = 0) -> Any:  # noqa: A002
    length = to.length(input, dim)
    return tuple(to.layer("select", input, dim=dim, index=place) for place in range(length))


@known("select")
def _select(to: Caller, input: Any, dim: int, index: int) -> Ref:  # noqa: A002
    return to.layer("select", input, dim=dim, index=index)


@known("narrow")
def _narrow(to: Caller, input: Any, dim: int, start: int, length: int) -> Ref:  # noqa: A002
    return to.layer("narrow", input, dim=dim, start=start, length=length)


@known("flip")
def _flip(to: Caller, input: Any, *dims: Any) -> Ref:  # noqa: A002
    return to.layer("flip", input, dims=list(_flat(dims)))


@known("getitem")
def _getitem(to: Caller, input: Any, index: Any) -> Any:  # noqa: A002
    if isinstance(input, (tuple, list, dict)):
        return input[index]
    place, indices = 0, list(index) if isinstance(index, tuple) else [index]
    missing = to.rank(input) - sum(item is not None and item is not Ellipsis for item in indices)
    if Ellipsis in [item for item in indices if not isinstance(item, (Ref, Fixed))]:
        at = next(number for number, item in enumerate(indices) if item is Ellipsis)
        indices[at : at + 1] = [slice(None)] * missing
    for item in indices:
        input, place = _one_index(to, input, item, place)  # noqa: A001
    return input


def _one_index(to: Caller, input: Any, item: Any, dim: int) -> tuple[Any, int]:  # noqa: A002
    if item is None:
        return to.layer("unsqueeze", input, dim=dim), dim + 1
    if isinstance(item, int):
        return to.layer("select", input, dim=dim, index=item), dim
    if isinstance(item, slice):
        return to.sliced(input, item, dim), dim + 1
    if isinstance(item, (Ref, Fixed)):
        return to.layer("index_select", input, item, dim=dim), dim + 1
    raise Stopped(f"an index of the kind {type(item).__name__}")


@known("index_select")
def _index_select(to: Caller, input: Any, dim: int, index: Any) -> Ref:  # noqa: A002
    return to.layer("index_select", input, index, dim=dim)


@known("gather")
def _gather(to: Caller, input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Ref:  # noqa: A002
    if sparse_grad:
        raise Stopped("gather with sparse_grad")
    return to.layer("gather", input, index, dim=dim)


def _flat(items: Sequence[Any]) -> Sequence[Any]:
    return items[0] if len(items) == 1 and isinstance(items[0], (tuple, list)) else items


# --- over axes --------------------------------------------------------------------------------


@known("mean", "sum")
def _total(  # noqa: ANN202
    to: Caller,
    input: Any,  # noqa: A002
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
):
    if dtype is not None:
        raise Stopped(f"{to.name} with dtype")
    return to.layer(to.name, input, dim=_axes(dim), keepdim=keepdim or None)


@known("amax", "amin")
def _amax(to: Caller, input: Any, dim: Any = (), keepdim: bool = False) -> Ref:  # noqa: A002
    return to.layer(to.name, input, dim=_axes(dim), keepdim=keepdim or None)


@known("max", "min")
def _most(to: Caller, input: Any, dim: Any = None, keepdim: bool = False) -> Any:  # noqa: A002
    """For equal values, torch sends the gradient to the one at the returned index."""
    if isinstance(dim, (Ref, Fixed)):
        return to.layer("maximum" if to.name == "max" else "minimum", input, dim)
    if not isinstance(dim, int):
        raise Stopped(f"{to.name} over all values: set dim")
    towards = input if to.name == "max" else to.layer("neg", input)
    index = to.layer("argmax", towards, dim=dim, keepdim=True)
    value = to.layer("gather", input, index, dim=dim)
    if keepdim:
        return value, index
    return to.layer("squeeze", value, dim=dim), to.layer("squeeze", index, dim=dim)


@known("argmax")
def _argmax(to: Caller, input: Any, dim: Any = None, keepdim: bool = False) -> Ref:  # noqa: A002
    return to.layer("argmax", input, dim=dim, keepdim=keepdim or None)


@known("norm", "vector_norm")
def _norm(to: Caller, input: Any, *given: Any, **named: Any) -> Ref:  # noqa: A002
    order = named.pop("p", named.pop("ord", 2))
    rest = list(given)
    order = rest.pop(0) if rest else order
    dim = rest.pop(0) if rest else named.pop("dim", None)
    keepdim = rest.pop(0) if rest else named.pop("keepdim", False)
    if named.get("dtype") is not None or order in ("fro", "nuc"):
        raise Stopped("a norm of this kind")
    return to.layer("norm", input, p=order, dim=_axes(dim), keepdim=keepdim or None)


@known("normalize")
def _normalize(  # noqa: ANN202
    to: Caller,
    input: Any,  # noqa: A002
    p: float = 2.0,
    dim: int = 1,
    eps: float = 1e-12,
    out: Any = None,
):
    del out
    length = to.layer("norm", input, p=p, dim=dim, keepdim=True)
    return to.layer("div", input, to.layer("clamp", length, min=eps))


@known("cumsum")
def _cumsum(to: Caller, input: Any, dim: int) -> Ref:  # noqa: A002
    return to.layer("cumsum", input, dim=dim)


@known("softmax", "log_softmax")
def _softmax(  # noqa: ANN202
    to: Caller,
    input: Any,  # noqa: A002
    dim: Any = None,
    _stacklevel: int = 3,
    dtype: Any = None,
):
    del _stacklevel
    if dtype is not None or dim is None:
        raise Stopped(f"{to.name} needs dim, and takes no dtype")
    return to.layer(to.name, input, dim=dim)


@known("tril", "triu")
def _triangle(to: Caller, input: Any, diagonal: int = 0) -> Ref:  # noqa: A002
    return to.layer(to.name, input, diagonal=diagonal or None)


def _axes(dim: Any) -> Any:
    return list(dim) if isinstance(dim, tuple) else dim


# --- what decides, and attention --------------------------------------------------------------


@known("masked_fill")
def _masked_fill(to: Caller, input: Any, mask: Any, value: Any) -> Ref:  # noqa: A002
    if not _number(value):
        raise Stopped("masked_fill with a value that is a tensor")
    return to.layer("masked_fill", input, mask, value=_finite(value))


@known("where")
def _where(to: Caller, condition: Any, input: Any, other: Any) -> Ref:  # noqa: A002
    return to.layer("where", condition, input, other)


@known("einsum")
def _einsum(to: Caller, equation: str, *operands: Any) -> Ref:
    return to.layer("einsum", *_flat(operands), equation=equation)


@known("one_hot")
def _one_hot(to: Caller, tensor: Any, num_classes: int = -1) -> Ref:
    raise Stopped("one_hot gives integers; use an Embedding, or one_hot in a graph of your own")


@known("cosine_similarity")
def _cosine(to: Caller, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Ref:
    return to.layer("cosine_similarity", x1, x2, dim=dim, eps=eps)


@known("scaled_dot_product_attention")
def _attention(  # noqa: ANN202, PLR0913, PLR0917 (torch's)
    to: Caller,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
):
    if dropout_p or enable_gqa:
        raise Stopped("scaled_dot_product_attention with dropout_p or enable_gqa")
    if attn_mask is not None and to.dtype_before(attn_mask) is not torch.bool:
        raise Stopped("scaled_dot_product_attention takes a mask of booleans here, not of numbers")
    masks = [] if attn_mask is None else [attn_mask]
    args = {"is_causal": is_causal or None, "scale": scale}
    return to.layer("scaled_dot_product_attention", query, key, value, *masks, **args)


def _finite(value: float) -> Any:
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return value


# --- functions of weights ---------------------------------------------------------------------


@known("linear")
def _linear(to: Caller, input: Any, weight: Any, bias: Any = None) -> Ref:  # noqa: A002
    if bias is None and (tied := to.tied(weight)) is not None:
        return to.draw("", [input], shared_with=tied)
    return to.layer("linear", input, weight, *([] if bias is None else [bias]))


@known("embedding")
def _embedding(  # noqa: ANN202, PLR0913, PLR0917 (torch's)
    to: Caller,
    input: Any,  # noqa: A002
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
):
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        raise Stopped("F.embedding with options: use nn.Embedding")
    del norm_type
    return to.layer("embedding", input, weight)


@known("layer_norm")
def _layer_norm(  # noqa: ANN202
    to: Caller,
    input: Any,  # noqa: A002
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
):
    if weight is None and bias is not None:
        raise Stopped("F.layer_norm with a bias and no weight")
    given = [item for item in (weight, bias) if item is not None]
    shape = list(normalized_shape)
    return to.layer("layer_norm", input, *given, normalized_shape=shape, eps=eps)
