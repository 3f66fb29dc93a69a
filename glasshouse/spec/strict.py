"""The strict base class of all specs, and validated arguments of torch classes."""

import math
from collections.abc import Hashable, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, JsonValue
from pydantic import Field as Constraint


class Spec(BaseModel):
    """An immutable model that rejects unknown fields, loose types and NaN or Inf.

    Use ``model_validate_json`` to read one: only in JSON does pydantic convert a list to a tuple.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class WrongAt(ValueError):
    """An error at a field within the validated model; ``place`` is the path of the field.

    Validators that compare fields raise it instead of ``ValueError``, whose error would point at
    the whole model. ``detail`` names the field, its value and the fix.
    """

    def __init__(self, *place: int | str, detail: str) -> None:
        super().__init__(detail)
        self.place = place


def check_exactly_one(model: BaseModel, *names: str) -> None:
    """Require that exactly one of these fields is set.

    Raises:
        WrongAt: at the first field if none is set, else at the second one that is set.
    """
    if all(getattr(model, name) is None for name in names):
        detail = f"give exactly one of {', '.join(names)}: none is given"
        raise WrongAt(names[0], detail=detail)
    check_at_most_one(model, *names)


def check_at_most_one(model: BaseModel, *names: str) -> None:
    """Require that at most one of these fields is set.

    Raises:
        WrongAt: at the second field that is set.
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
"""Arguments of a torch class, by torch's names. The planner checks them against its signature."""

JsonData = Annotated[JsonValue, AfterValidator(_reject_nonfinite)]
"""Any JSON value with finite numbers; the strings "NaN" and "Infinity" represent other numbers."""

NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"

Name = Annotated[str, Constraint(pattern=NAME_PATTERN)]
"""The name of a layer or field: letters, digits and underscores, not starting with a digit."""

TorchName = Annotated[str, Constraint(pattern=NAME_PATTERN)]
"""The name of a torch class or function, exactly as in torch."""
