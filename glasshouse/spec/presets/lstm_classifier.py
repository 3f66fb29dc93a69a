"""A recurrent network that classifies sequences."""

from typing import Literal

from glasshouse.spec.network import Graph, Layer
from glasshouse.spec.presets.layers import Depth, Rate, Size, Source, dropout, layer
from glasshouse.spec.strict import Spec


class LstmClassifier(Spec):
    """Embedding, LSTM, pooling over the steps, and a linear layer."""

    text: Source = "text"
    """The field with the steps: ids, or vectors if ``embedding_dim`` is null."""
    embedding_dim: Size | None = 128
    """Size of the embedding vectors; null: no embedding."""
    hidden_size: Size = 128
    """Size of the LSTM's hidden state."""
    num_layers: Depth = 1
    """Number of LSTM layers."""
    bidirectional: bool = False
    """Whether to also read the sequence backward."""
    pool: Literal["last", "average", "max", "sum", "sqrt_n", "first"] = "average"
    """How the outputs of all steps are reduced to one vector."""
    num_classes: Size = 2
    """Number of classes."""
    dropout: Rate = 0.0
    """Dropout probability, between the LSTM layers and before the last layer."""


def lstm_classifier(args: LstmClassifier) -> Graph:
    """Padding after the end of a row is ignored."""
    layers: list[Layer] = []
    if args.embedding_dim is not None:
        layers.append(layer("embedding", "Embedding", args.text, embedding_dim=args.embedding_dim))
    layers += [
        layer(
            "lstm",
            "LSTM",
            *(() if layers else (args.text,)),
            hidden_size=args.hidden_size,
            num_layers=args.num_layers,
            batch_first=True,
            dropout=args.dropout if args.num_layers > 1 else 0.0,
            bidirectional=args.bidirectional,
        ),
        layer("pool", "SequencePool", mode=args.pool),
        *dropout("drop", args.dropout),
        layer("fc", "Linear", out_features=args.num_classes),
    ]
    return Graph(layers=tuple(layers))
