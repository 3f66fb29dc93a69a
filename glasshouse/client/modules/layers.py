"""Which submodules are layers, and their constructor arguments, read back from their attributes."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.loss import _Loss  # pyright: ignore[reportPrivateUsage]

from glasshouse.client.modules.source_lines import Stopped

_NEVER = {"device", "dtype", "_weight", "_freeze", "_random_samples", "size_average", "reduce"}
_NOT_LAYERS = (
    *(nn.DataParallel, nn.SyncBatchNorm, nn.RNNBase, nn.modules.rnn.RNNCellBase, nn.Transformer),
    *(nn.TransformerEncoder, nn.TransformerDecoder),
)
_NOT_KEPT = {"PReLU": {"init"}, "Hardtanh": {"min_value", "max_value"}}
"""Arguments that only affect the initial weights, or nothing."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a torch.nn class that a graph can use as a layer."""
    cls = type(module)
    if getattr(nn, cls.__name__, None) is not cls or cls in _NOT_LAYERS or cls is nn.Module:
        return False
    return not (
        issubclass(cls, (_Loss, LazyModuleMixin)) or cls.__module__ == nn.Sequential.__module__
    )


def check_module(module: nn.Module, path: str) -> None:
    """Refuse a module that does more than its ``forward``, which a graph would not.

    Raises:
        Stopped: the module has hooks or parametrizations, is a loss, or is uninitialized (lazy).
    """
    name = f"{path!r} ({type(module).__name__})" if path else type(module).__name__
    if isinstance(module, LazyModuleMixin):
        raise Stopped(f"{name} is uninitialized: call the module once before you train it")
    if isinstance(module, _Loss):
        raise Stopped(f"{name} is a loss: return the scores and pass loss= to train()")
    if isinstance(module, (nn.SyncBatchNorm, nn.DataParallel, nn.Transformer)):
        raise Stopped(f"{name} cannot be a layer of a graph")
    if any(getattr(module, hooks) for hooks in _HOOKS):
        raise Stopped(f"{name} has hooks (weight_norm adds some, too), which would not run")
    if "parametrizations" in module._modules:  # pyright: ignore[reportPrivateUsage]
        raise Stopped(f"{name} has parametrizations, which are not supported: remove them")


def arguments_of(module: nn.Module) -> dict[str, Any]:
    """The constructor arguments that differ from torch's defaults, as JSON values.

    Raises:
        Stopped: the module does not store one of them.
    """
    name = type(module).__name__
    read = _READERS.get(name, _attribute)
    found: dict[str, Any] = {}
    for item in _signature(type(module)).values():
        if item.name in _NEVER | _NOT_KEPT.get(name, set()):
            continue
        value = _as_json(read(module, item.name), f"{item.name} of {name}")
        if item.default is item.empty or value != _as_json(_default(item.default), item.name):
            found[item.name] = value
    return found


def _default(value: Any) -> Any:
    return value.__name__ if callable(value) else value


def _signature(cls: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """The constructor's parameters, including those of the parent class."""
    if issubclass(cls, nn.RNNBase):
        known = dict(inspect.signature(nn.RNNBase.__init__).parameters)
        known.pop("mode")
        if cls is nn.RNN:
            known["nonlinearity"] = inspect.Parameter(
                "nonlinearity", inspect.Parameter.KEYWORD_ONLY, default="tanh"
            )
    else:
        known = dict(inspect.signature(cls.__init__).parameters)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {n: item for n, item in known.items() if n != "self" and item.kind not in kinds}


def _attribute(module: nn.Module, name: str) -> Any:
    if name == "bias" and not isinstance(getattr(module, "bias", None), bool):
        return getattr(module, "bias", None) is not None
    if not hasattr(module, name):
        raise Stopped(f"{type(module).__name__} does not store its argument {name!r}")
    return getattr(module, name)


def _of_norm(module: nn.Module, name: str) -> Any:
    """A layer norm without weights has no bias, whatever the argument was."""
    if name == "bias" and not module.elementwise_affine:
        return True
    return _attribute(module, name)


def _of_attention(module: Any, name: str) -> Any:
    if name == "bias":
        return module.in_proj_bias is not None
    if name == "add_bias_kv":
        return module.bias_k is not None
    if name in ("kdim", "vdim"):
        width = getattr(module, name)
        return None if width == module.embed_dim else width
    return _attribute(module, name)


def _of_transformer_layer(module: Any, name: str) -> Any:
    attention: Any = module.self_attn
    inner: Any = module.linear1
    read: Mapping[str, Callable[[], Any]] = {
        "d_model": lambda: attention.embed_dim,
        "nhead": lambda: attention.num_heads,
        "dim_feedforward": lambda: inner.out_features,
        "dropout": lambda: attention.dropout,
        "activation": lambda: _activation(module.activation),
        "layer_norm_eps": lambda: _attribute(module.norm1, "eps"),
        "batch_first": lambda: attention.batch_first,
        "norm_first": lambda: module.norm_first,
        "bias": lambda: inner.bias is not None,
    }
    return read[name]() if name in read else _attribute(module, name)


def _activation(value: Any) -> str:
    name = getattr(value, "__name__", type(value).__name__.lower())
    if name not in ("relu", "gelu"):
        raise Stopped(f"the activation {name!r} of a transformer layer is neither relu nor gelu")
    if isinstance(value, nn.GELU) and value.approximate != "none":
        raise Stopped("a transformer layer's GELU is approximated, which its argument cannot say")
    return name


_READERS: dict[str, Callable[[nn.Module, str], Any]] = {
    "LayerNorm": _of_norm,
    "MultiheadAttention": _of_attention,
    "TransformerEncoderLayer": _of_transformer_layer,
    "TransformerDecoderLayer": _of_transformer_layer,
}


def _as_json(value: Any, what: str) -> Any:
    if isinstance(value, (tuple, list)):
        return [_as_json(item, what) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor) and value.numel() <= 10_000:
        return _as_json(value.detach().cpu().tolist(), what)
    raise Stopped(f"{what} is a {type(value).__name__}, which no spec can say")
