"""Read the arguments of torch classes from their signatures, check them and convert them from JSON.

Handles signatures and JSON, not networks or jobs.
"""

import collections.abc
import contextlib
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

import torch
from torch import Tensor, nn

from engine.core.problems import one
from glasshouse.jsonio import NONFINITE
from glasshouse.suggestions import did_you_mean

# Never offered: the job decides devices and dtypes, and torch deprecates the rest.
WITHHELD = {
    "generator",
    "device",
    "dtype",
    "size_average",
    "reduce",
    "process_group",
    "params",
    "_weight",
    "_freeze",
    "_random_samples",
    "min_value",
    "max_value",
}
_SIMPLE: dict[Any, str] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    type(None): "null",
}
_MISSING = inspect.Parameter.empty


@dataclass(frozen=True)
class Parameter:
    """An argument that a spec may set."""

    name: str
    kinds: frozenset[str]
    """The accepted JSON types. If empty, anything but an object is tried."""
    default: Any
    choices: tuple[Any, ...] = ()
    is_tensor: bool = False
    """Whether a JSON list becomes a float32 tensor."""

    @property
    def required(self) -> bool:
        """Whether the spec must set it."""
        return self.default is _MISSING

    def schema(self) -> dict[str, Any]:
        """Return the argument as JSON Schema."""
        schema: dict[str, Any] = {}
        if self.choices:
            schema["enum"] = list(self.choices)
        elif self.kinds:
            kinds = sorted(self.kinds)
            schema["type"] = kinds[0] if len(kinds) == 1 else kinds
        if not self.required and isinstance(self.default, (int, float, str, bool, type(None))):
            schema["default"] = self.default
        elif isinstance(self.default, tuple):
            schema["default"] = list(self.default)
        return schema


def _kinds(annotation: Any) -> tuple[set[str], bool]:
    """Return the JSON types of an annotation, and whether it accepts a tensor."""
    if annotation in _SIMPLE or annotation is Tensor:
        return {_SIMPLE.get(annotation, "array")}, annotation is Tensor
    origin = get_origin(annotation)
    if origin is Literal:
        return {_SIMPLE[type(value)] for value in get_args(annotation)}, False
    if origin in {Union, types.UnionType}:
        found: set[str] = set()
        tensor = False
        for part in get_args(annotation):
            kinds, is_tensor = _kinds(part)
            found |= kinds
            tensor |= is_tensor
        if tensor and "number" in found:  # lr: float | Tensor
            return found - {"array"}, False
        return found, tensor
    if origin in {tuple, list, collections.abc.Sequence} or annotation in {list, tuple, torch.Size}:
        return {"array"}, False
    return set(), False


def _is_foreign(annotation: Any) -> bool:
    """Whether JSON cannot express this argument: a module, a callable, a dtype."""
    parts = [part for part in get_args(annotation) or (annotation,) if part is not type(None)]
    if get_origin(annotation) in {collections.abc.Callable, Literal, tuple, list}:
        return get_origin(annotation) is collections.abc.Callable
    return all(
        get_origin(part) is collections.abc.Callable
        or part in {torch.dtype, torch.device}
        or (isinstance(part, type) and issubclass(part, nn.Module))
        for part in parts
    )


def _parameter(raw: inspect.Parameter, annotation: Any) -> Parameter | None:
    if raw.name in WITHHELD or _is_foreign(annotation):
        return None
    if annotation is Any or (get_origin(annotation) and Any in get_args(annotation)):
        return None
    kinds, is_tensor = _kinds(annotation)
    if raw.default is None:
        kinds = kinds | {"null"} if kinds else kinds
    elif annotation is _MISSING and raw.default is not _MISSING:
        kinds = {_SIMPLE[type(raw.default)]} if type(raw.default) in _SIMPLE else set()
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    default = raw.default
    if callable(default) and default is not _MISSING:  # activation=F.relu
        default = getattr(default, "__name__", None)
    return Parameter(raw.name, frozenset(kinds), default, choices, is_tensor)


def _signatures(cls: type) -> list[Any]:
    """Return the constructors to read: the class's, and parents' while ``**kwargs`` is there."""
    found: list[Any] = []
    for parent in cls.__mro__:
        init = parent.__dict__.get("__init__")
        if init is None or parent is nn.Module or parent is object:
            continue
        found.append(init)
        kinds = {item.kind for item in inspect.signature(init).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return found


@cache
def parameters(cls: type) -> dict[str, Parameter]:
    """Return the arguments of a torch class that a spec may set, by name, in torch's order."""
    found: dict[str, Parameter] = {}
    for init in _signatures(cls):
        found.update(read_signature(init))
    if issubclass(cls, nn.RNNBase):
        found.pop("mode", None)
    if cls is nn.RNN:
        found["nonlinearity"] = Parameter(
            "nonlinearity", frozenset({"string"}), "tanh", ("tanh", "relu")
        )
    return found


def read_signature(
    function: Callable[..., Any], *, keyword_only: bool = False
) -> dict[str, Parameter]:
    """Return the arguments of a constructor that JSON can express."""
    hints: dict[str, Any] = {}
    with contextlib.suppress(NameError, TypeError):
        hints = typing.get_type_hints(function)
    found: dict[str, Parameter] = {}
    for raw in inspect.signature(function).parameters.values():
        if raw.name == "self" or raw.kind in {raw.VAR_POSITIONAL, raw.VAR_KEYWORD}:
            continue
        if keyword_only and raw.kind is not raw.KEYWORD_ONLY:
            continue
        item = _parameter(raw, hints.get(raw.name, raw.annotation))
        if item is not None:
            found[raw.name] = item
    return found


def schema(known: dict[str, Parameter], optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the JSON Schema of a set of arguments. Those in ``optional`` can be inferred."""
    return {
        "type": "object",
        "properties": {name: item.schema() for name, item in known.items()},
        "required": [n for n, item in known.items() if item.required and n not in optional],
        "additionalProperties": False,
    }


def _json_kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (list, tuple)):
        return "array"
    return _SIMPLE.get(type(value), "object")


def _convert(item: Parameter, value: Any, pointer: str) -> Any:
    kind = _json_kind(value)
    if kind == "string" and value in NONFINITE and "string" not in item.kinds:
        value, kind = NONFINITE[value], "number"
    fits = not item.kinds or kind in item.kinds or (kind == "integer" and "number" in item.kinds)
    if kind == "object" or not fits:
        wanted = " or ".join(sorted(item.kinds)) or "a number, text, boolean, list or null"
        raise one(pointer, f"{item.name} must be {wanted}, not {kind} ({value!r:.80})", "type")
    if item.choices and value not in item.choices:
        listed = ", ".join(map(str, item.choices))
        raise one(pointer, f"{item.name} must be one of {listed}, not {value!r:.80}", "choice")
    if kind == "array" and item.is_tensor:
        try:
            return torch.tensor(value, dtype=torch.float32, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise one(pointer, f"{item.name} must be a list of numbers", "type") from None
    if kind == "array":
        return _tupled(value)
    if kind == "integer" and abs(value) > 2**53:
        raise one(pointer, f"{item.name} is too large: {value}", "too_large")
    return value


def _tupled(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_tupled(part) for part in value)
    return NONFINITE.get(value, value) if isinstance(value, str) else value


def check(
    known: dict[str, Parameter], given: dict[str, Any], pointer: str, owner: str
) -> dict[str, Any]:
    """Convert a spec's arguments to Python values.

    Raises:
        SpecProblems: one is unknown, or of the wrong JSON type.
    """
    converted: dict[str, Any] = {}
    for name, value in given.items():
        item = known.get(name)
        if item is None:
            meant, listed = did_you_mean(name, known), ", ".join(known) or "none"
            detail = f"{owner} has no argument {name!r}{meant or ';'} "
            detail += f"{'It' if meant else 'it'} takes: {listed}"
            raise one(f"{pointer}/{name}", detail, "unknown_argument")
        converted[name] = _convert(item, value, f"{pointer}/{name}")
    return converted


def missing(known: dict[str, Parameter], given: dict[str, Any]) -> list[str]:
    """Return the required arguments that are not in ``given``."""
    return [name for name, item in known.items() if item.required and name not in given]


def blame(build: Callable[..., Any], arguments: dict[str, Any], pointer: str) -> str:
    """Find the argument that makes a build fail: without it, or with 1 for it, the build works."""
    for name in arguments:
        others = {key: value for key, value in arguments.items() if key != name}
        for trial in (others, {**others, name: 1}):
            with contextlib.suppress(Exception):
                build(**trial)
                return f"{pointer}/{name}"
    return f"{pointer}/{next(iter(arguments))}" if len(arguments) == 1 else pointer


def call_inputs(forward: Callable[..., Any]) -> tuple[int, int | None]:
    """Return how many positional inputs ``forward`` takes: min and max (None: any number)."""
    found = [item for item in inspect.signature(forward).parameters.values() if item.name != "self"]
    if any(item.kind is item.VAR_POSITIONAL for item in found):
        return 1, None
    positional = [item for item in found if item.kind is not item.KEYWORD_ONLY]
    return len([item for item in positional if item.default is item.empty]), len(positional)
