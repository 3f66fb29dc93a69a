"""A transformer that classifies sequences."""

from typing import Self

from pydantic import model_validator

from glasshouse.spec.network import Graph, Layer
from glasshouse.spec.presets.blocks import transformer_block
from glasshouse.spec.presets.layers import Depth, Rate, Size, Source, dropout, layer
from glasshouse.spec.strict import Spec, WrongAt


class TransformerClassifier(Spec):
    """A pre-norm transformer encoder (Vaswani et al., 2017), with mean pooling over the steps."""

    text: Source = "text"
    """The field with the ids."""
    max_length: Size = 512
    """Maximum number of steps of a row."""
    num_layers: Depth = 2
    """Number of blocks."""
    num_heads: Size = 4
    """Number of attention heads."""
    width: Size = 128
    """Size of the embedding and of every block; a multiple of ``num_heads``."""
    num_classes: Size = 2
    """Number of classes."""
    dropout: Rate = 0.1
    """Dropout probability."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.width % self.num_heads:
            detail = f"width ({self.width}) must be a multiple of num_heads ({self.num_heads})"
            raise WrongAt("width", detail=detail)
        return self


def transformer_classifier(args: TransformerClassifier) -> Graph:
    """Padding is excluded from attention and from the mean."""
    layers: list[Layer] = [
        layer("embedding", "Embedding", args.text, embedding_dim=args.width),
        layer(
            "positions",
            "PositionEmbedding",
            num_embeddings=args.max_length,
            embedding_dim=args.width,
        ),
        layer("embedded", "add", "embedding", "positions"),
        *dropout("drop", args.dropout),
    ]
    for number in range(args.num_layers):
        layers += transformer_block(
            f"block{number}",
            layers[-1].name,
            width=args.width,
            num_heads=args.num_heads,
            rate=args.dropout,
            is_causal=False,
        )
    layers += [
        layer("norm", "LayerNorm"),
        layer("pool", "SequencePool", mode="average"),
        layer("fc", "Linear", out_features=args.num_classes),
    ]
    return Graph(layers=tuple(layers))
