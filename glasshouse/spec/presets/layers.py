"""Functions and types for writing presets."""

from typing import Annotated

from pydantic import Field as Constraint
from pydantic import JsonValue

from glasshouse.spec.network import Input, Layer

Size = Annotated[int, Constraint(ge=1, le=1_000_000)]
"""A width, or a number of classes or entries."""
Depth = Annotated[int, Constraint(ge=1, le=200)]
"""A number of layers."""
Rate = Annotated[float, Constraint(ge=0, lt=1)]
"""A dropout probability."""
Source = Input
"""The name of a data field."""


def layer(name: str, type: str, /, *inputs: str, **args: JsonValue) -> Layer:  # noqa: A002 (torch's word)
    """A layer that reads the previous layer, or ``inputs``."""
    return Layer(name=name, type=type, inputs=inputs or None, args=args)


def dropout(name: str, rate: float) -> list[Layer]:
    """A dropout layer; none if the rate is 0."""
    return [layer(name, "Dropout", p=rate)] if rate else []
