"""The strict base of every spec, and the checked free-form arguments of torch classes."""

import math
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
    """A field within what a validator checks is wrong; ``place`` is where, seen from there."""

    def __init__(self, *place: int | str, detail: str) -> None:
        super().__init__(detail)
        self.place = place


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
