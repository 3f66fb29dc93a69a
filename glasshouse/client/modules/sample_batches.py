"""Sample batches for tracing a module, and the data field of each ``forward`` argument."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from glasshouse.client.modules.tracing import Traced, trace
from glasshouse.client.modules.weight_names import is_lengths
from glasshouse.errors import CannotTrace

Fields = Mapping[str, Mapping[str, Any]]
_ROWS = (3, 2)
_STEPS = ((7, 5), (48, 37))
"""Sequence lengths of the two batches. Short ones are tried first, because a network may have few
positions. A window over many steps needs the long ones."""
_SEED = 11


def trace_for(
    module: nn.Module, fields: Fields, most_steps: int | None, asked: Mapping[str, str] | None
) -> tuple[Traced, dict[str, str]]:
    """Trace a module for the fields of a job; return the trace and the field of each argument.

    Args:
        module: the user's module.
        fields: the fields as in a spec; dense ones with their shape.
        most_steps: the maximum sequence length, if the job has a limit.
        asked: the field of each argument whose name is not a field.

    Raises:
        CannotTrace: the module cannot be expressed as a graph.
        TypeError: the arguments do not match the fields.
    """
    inputs = match(module, fields, asked)
    failed: CannotTrace | None = None
    for steps in _STEPS if _has_sequences(fields, inputs) else _STEPS[:1]:
        try:
            return trace(
                module, list(_samples(module, fields, inputs, steps, most_steps)), inputs
            ), inputs
        except CannotTrace as error:
            failed = failed or error
    assert failed is not None  # noqa: S101 (there is at least one try)
    raise failed


def match(
    module: nn.Module, fields: Fields, asked: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Match each argument of ``forward`` to the data field of the same name.

    A single argument with another name reads the first field. ``<field>_lengths``, or ``lengths``
    if there is only one sequence field, receives the lengths of the rows.

    Raises:
        TypeError: an argument matches no field.
    """
    known = inspect.signature(module.forward).parameters
    arguments = {name: item for name, item in known.items() if item.kind is not item.VAR_KEYWORD}
    if any(item.kind is item.VAR_POSITIONAL for item in arguments.values()):
        raise TypeError("forward() takes *args: name its arguments")
    found: dict[str, str] = {}
    open_: list[str] = []
    for name, item in arguments.items():
        field = (asked or {}).get(name) or _field_of(name, fields)
        if field is not None:
            found[name] = field
        elif item.default is item.empty:
            open_.append(name)
    if len(open_) == 1 and fields and all(name.endswith(".lengths") for name in found.values()):
        return {open_[0]: next(iter(fields)), **found}
    unknown = sorted({name.partition(".")[0] for name in found.values()} - set(fields))
    if open_ or unknown or not found:
        raise TypeError(
            f"forward() takes {', '.join(arguments)}, but the data has the fields "
            f"{', '.join(fields)}: use the same names, or set inputs={{argument: field}}"
        )
    return found


def _field_of(argument: str, fields: Fields) -> str | None:
    if argument in fields:
        return argument
    sequences = [name for name, field in fields.items() if _is_ragged(field)]
    for name in sequences:
        if argument == f"{name}_lengths":
            return f"{name}.lengths"
    return f"{sequences[0]}.lengths" if is_lengths(argument) and len(sequences) == 1 else None


def _is_ragged(field: Mapping[str, Any]) -> bool:
    return field["type"] not in ("dense", "integer")


def _has_sequences(fields: Fields, inputs: Mapping[str, str]) -> bool:
    read = {name.partition(".")[0] for name in inputs.values()}
    return any(_is_ragged(fields[name]) for name in read)


def _samples(
    module: nn.Module,
    fields: Fields,
    inputs: Mapping[str, str],
    steps: Sequence[int],
    most_steps: int | None,
) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(_SEED)
    device = next((item.device for item in module.parameters()), torch.device("cpu"))
    read = dict.fromkeys(name.partition(".")[0] for name in inputs.values())
    for number, rows in enumerate(_ROWS):
        longest = min(steps[number], (most_steps or steps[number]) - (1 if number else 0)) or 1
        made: dict[str, Tensor] = {}
        for name in read:
            made |= _field(name, fields[name], (rows, longest), generator)
        yield {name: item.to(device) for name, item in made.items()}


def _field(
    name: str, field: Mapping[str, Any], size: tuple[int, int], generator: torch.Generator
) -> dict[str, Tensor]:
    """A batch of one field, with its lengths for a sequence."""
    rows, steps = size
    kind = field["type"]
    if kind == "dense":
        return {name: torch.randn((rows, *field["shape"]), generator=generator)}
    dim = field.get("dim") or len(field.get("classes") or ()) or 2
    if kind == "integer":
        return {name: torch.randint(0, dim, (rows,), generator=generator)}
    lengths = torch.tensor([max(1, steps - row) for row in range(rows)])
    if kind == "dense_sequence":
        values = torch.randn((rows, steps, dim), generator=generator)
    else:
        values = torch.randint(0, dim, (rows, steps), generator=generator)
    behind = torch.arange(steps) >= lengths[:, None]
    values[behind] = field.get("padding_value", 0)
    made = {name: values, f"{name}.lengths": lengths}
    if kind == "sparse_float":
        made[f"{name}.values"] = torch.randn((rows, steps), generator=generator)
    return made
