"""Convolutions over the words of a text, with max pooling."""

from typing import Annotated

from pydantic import Field as Constraint

from glasshouse.spec.network import Graph, Layer
from glasshouse.spec.presets.layers import Rate, Size, Source, dropout, layer
from glasshouse.spec.strict import Spec


class TextCnn(Spec):
    """Convolutional network for sentences (Kim, 2014), on a sequence of ids."""

    text: Source = "text"
    """The field with the ids."""
    embedding_dim: Size = 128
    """Size of the embedding vectors."""
    kernel_sizes: Annotated[
        tuple[Annotated[int, Constraint(ge=1, le=64)], ...], Constraint(min_length=1, max_length=20)
    ] = (3, 4, 5)
    """Kernel sizes of the parallel convolutions, in words."""
    channels: Size = 100
    """Output channels of each convolution."""
    num_classes: Size = 2
    """Number of classes."""
    dropout: Rate = 0.5
    """Dropout probability before the last layer."""


def text_cnn(args: TextCnn) -> Graph:
    """Padding is zero for each convolution and is not part of the pooling."""
    layers: list[Layer] = [
        layer("embedding", "Embedding", args.text, embedding_dim=args.embedding_dim),
        layer("words", "MaskPadding"),
        layer("turned", "transpose", dim0=1, dim1=2),
    ]
    for size in args.kernel_sizes:
        layers += [
            layer(f"pad{size}", "ZeroPad1d", "turned", padding=[(size - 1) // 2, size // 2]),
            layer(f"conv{size}", "Conv1d", out_channels=args.channels, kernel_size=size),
            layer(f"relu{size}", "ReLU"),
            layer(f"back{size}", "transpose", dim0=1, dim1=2),
            layer(f"pool{size}", "SequencePool", mode="max"),
        ]
    pools = [f"pool{size}" for size in args.kernel_sizes]
    layers.append(layer("pools", "cat", *pools, dim=1))
    layers += dropout("drop", args.dropout)
    return Graph(layers=(*layers, layer("fc", "Linear", out_features=args.num_classes)))
