"""How presets write their layers down, and the sizes that they may ask for."""

from typing import Annotated

from pydantic import Field as Constraint
from pydantic import JsonValue

from glasshouse.spec.network import Input, Layer

Size = Annotated[int, Constraint(ge=1, le=1_000_000)]
"""A width, a number of classes or of entries."""
Depth = Annotated[int, Constraint(ge=1, le=200)]
"""A number of layers."""
Rate = Annotated[float, Constraint(ge=0, lt=1)]
"""Of dropout: the share of values that become zero in training."""
Source = Input
"""A data field."""


def layer(name: str, type: str, /, *inputs: str, **args: JsonValue) -> Layer:  # noqa: A002 (torch's word)
    """A layer that reads the one before, or ``inputs``."""
    return Layer(name=name, type=type, inputs=inputs or None, args=args)


def dropout(name: str, rate: float) -> list[Layer]:
    """A dropout layer where there is some."""
    return [layer(name, "Dropout", p=rate)] if rate else []
