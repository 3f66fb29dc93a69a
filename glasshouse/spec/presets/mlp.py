"""Fully connected layers with activations between them."""

from typing import Annotated, Literal

from pydantic import Field as Constraint

from glasshouse.spec.network import Graph, Layer
from glasshouse.spec.presets.layers import Rate, Size, dropout, layer
from glasshouse.spec.strict import Spec


class Mlp(Spec):
    """Fully connected layers with activations between them, over all values of a row."""

    hidden: Annotated[tuple[Size, ...], Constraint(max_length=200)] = (128,)
    """Widths of the hidden layers, from input to output. An empty list is a linear model."""
    num_outputs: Size = 10
    """Number of classes or predicted values."""
    activation: Literal["ReLU", "GELU", "SiLU", "Tanh", "Sigmoid"] = "ReLU"
    """The activation after each hidden layer."""
    dropout: Rate = 0.0
    """Dropout probability after each activation."""


def mlp(args: Mlp) -> Graph:
    """``flat``, then ``fc1``, ``act1`` …, and the output ``out``."""
    layers: list[Layer] = [layer("flat", "Flatten")]
    for number, width in enumerate(args.hidden, start=1):
        layers += [
            layer(f"fc{number}", "Linear", out_features=width),
            layer(f"act{number}", args.activation),
            *dropout(f"drop{number}", args.dropout),
        ]
    return Graph(layers=(*layers, layer("out", "Linear", out_features=args.num_outputs)))
