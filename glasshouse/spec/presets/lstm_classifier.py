"""A recurrent network that reads a sequence and says what it is."""

from typing import Literal

from glasshouse.spec.network import Graph, Layer
from glasshouse.spec.presets.drawing import Depth, Rate, Size, Source, dropout, layer
from glasshouse.spec.strict import Spec


class LstmClassifier(Spec):
    """Embedding, LSTM, one vector of all steps, scores."""

    text: Source = "text"
    """The field of the steps: ids, or vectors where ``embedding_dim`` is null."""
    embedding_dim: Size | None = 128
    hidden_size: Size = 128
    num_layers: Depth = 1
    bidirectional: bool = False
    """Read the sequence from behind too."""
    pool: Literal["last", "average", "max", "sum", "sqrt_n", "first"] = "average"
    """How the steps become one vector."""
    num_classes: Size = 2
    dropout: Rate = 0.0
    """Between the LSTM's layers, and before the last layer."""


def lstm_classifier(args: LstmClassifier) -> Graph:
    """Steps behind the end of a row are not read."""
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
