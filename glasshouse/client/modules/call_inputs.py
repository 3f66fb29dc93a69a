"""The inputs of a module call: tensors, and options that a layer supports."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from glasshouse.client.modules.source_lines import Stopped
from glasshouse.client.modules.values import Fixed, Packed, Ref, Varying, Weight, parts_of


def inputs_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that a layer reads, in the order of its inputs.

    Raises:
        Stopped: a layer does not support this call.
    """
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    known = inspect.signature(module.forward).parameters
    inputs: list[Any] = []
    is_open = True
    for name, item in known.items():
        value = bound.arguments.get(name, item.default)
        if item.kind is item.VAR_POSITIONAL:
            inputs.extend(bound.arguments.get(name, ()))
            continue
        if name == "hx" and _is_zero(value):
            continue
        tensors = [part for part in parts_of(value) if part is not None and _is_tensor(part)]
        if not tensors:
            is_open = False
            _check_option(module, name, value, item.default)
        elif is_open:
            inputs.extend(tensors)
        else:
            raise Stopped(f"{name} of {type(module).__name__} is not supported in a graph")
    return inputs


def _check_option(module: nn.Module, name: str, value: Any, default: Any) -> None:
    if value is default or value == default or value is None:
        return
    if isinstance(module, nn.MultiheadAttention) and name in (
        "need_weights",
        "average_attn_weights",
    ):
        return
    raise Stopped(f"{type(module).__name__} called with {name}={value!r:.40}")


def _is_tensor(item: Any) -> bool:
    is_made = isinstance(item, Varying) and isinstance(item.values[0], Tensor)
    return is_made or isinstance(item, (Ref, Fixed, Packed, Weight))


def _is_zero(value: Any) -> bool:
    """Whether these are zero states, the default of recurrent layers."""
    parts = parts_of(value)
    tensors = [
        tensor
        for part in parts
        for tensor in (
            part.values if isinstance(part, Varying) else (getattr(part, "value", None),)
        )
    ]
    return bool(tensors) and all(
        isinstance(item, Tensor) and not bool(item.any()) for item in tensors
    )


def pack(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:  # noqa: A002
    """Convert a call of ``pack_padded_sequence``."""
    del enforce_sorted
    if not isinstance(input, Ref) or not isinstance(lengths, Ref):
        raise Stopped("pack_padded_sequence takes a tensor and the lengths of a sequence field")
    return Packed(input, lengths, batch_first)


def unpack(sequence: Any, batch_first: bool = False, *_: Any, **__: Any) -> Any:
    """Convert a call of ``pad_packed_sequence``."""
    if not isinstance(sequence, Packed) or sequence.batch_first != batch_first:
        raise Stopped(
            "pad_packed_sequence needs the output of a recurrent layer with the same batch_first"
        )
    return sequence.tensor, sequence.lengths
