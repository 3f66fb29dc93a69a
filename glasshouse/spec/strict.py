"""The strict base of every spec, and the checked free-form arguments of torch classes."""

import math
from collections.abc import Hashable, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, JsonValue
from pydantic import Field as Constraint


class Spec(BaseModel):
    """A closed, frozen value: unknown fields, loose types and non-finite numbers are errors.

    Read one with ``model_validate_json``: only from JSON does a list become a tuple.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class WrongAt(ValueError):
    """A field within what a validator checks is wrong; ``place`` is its path from there.

    Every rule across fields raises it, never a plain ``ValueError``: that would point at the object
    that has the fields. ``detail`` names the field, its value and the fix.
    """

    def __init__(self, *place: int | str, detail: str) -> None:
        super().__init__(detail)
        self.place = place


def check_exactly_one(model: BaseModel, *names: str) -> None:
    """Require that one of these fields, and no other of them, has a value.

    Raises:
        WrongAt: at the first field if none has a value, else at the second that has one.
    """
    if all(getattr(model, name) is None for name in names):
        detail = f"give exactly one of {', '.join(names)}: none is given"
        raise WrongAt(names[0], detail=detail)
    check_at_most_one(model, *names)


def check_at_most_one(model: BaseModel, *names: str) -> None:
    """Require that at most one of these fields has a value.

    Raises:
        WrongAt: at the second field that has a value.
    """
    given = [name for name in names if getattr(model, name) is not None]
    if len(given) > 1:
        values = [getattr(model, name) for name in given]
        shown = (
            f" ({value!r})" if isinstance(value, str | float | int) else "" for value in values
        )
        got = " and ".join(f"{name}{value}" for name, value in zip(given, shown, strict=True))
        raise WrongAt(given[1], detail=f"give only one of {', '.join(names)} (got {got})")


def repeated(items: Sequence[Hashable]) -> int | None:
    """The index of the first item that equals an earlier one; None if there is none."""
    seen: set[Hashable] = set()
    for number, item in enumerate(items):
        if item in seen:
            return number
        seen.add(item)
    return None


def _reject_nonfinite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(
            'numbers must be finite; where an argument takes an infinity write "Infinity"'
        )
    if isinstance(value, dict):
        for item in value.values():  # pyright: ignore[reportUnknownVariableType]
            _reject_nonfinite(item)
    if isinstance(value, list):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            _reject_nonfinite(item)
    return value  # pyright: ignore[reportUnknownVariableType]


Args = Annotated[dict[str, JsonValue], AfterValidator(_reject_nonfinite), Constraint(max_length=64)]
"""Arguments of a torch class, by torch's names. Checked against its signature by the planner."""

JsonData = Annotated[JsonValue, AfterValidator(_reject_nonfinite)]
"""Any JSON value with finite numbers; the strings "NaN" and "Infinity" stand for the others."""

NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"

Name = Annotated[str, Constraint(pattern=NAME_PATTERN)]
"""A layer's or a field's name: letters, digits and underscores, not starting with a digit."""

TorchName = Annotated[str, Constraint(pattern=NAME_PATTERN)]
"""The name of a torch class or function, exactly as torch spells it."""
