"""One sequence into another: an encoder, and a decoder that attends to it."""

from glasshouse.spec.network import Graph, Layer
from glasshouse.spec.presets.drawing import Depth, Rate, Size, Source, layer
from glasshouse.spec.strict import Spec


class Seq2seq(Spec):
    """GRU encoder and decoder with dot-product attention (Luong et al., 2015).

    Three fields: ``source``, ``target`` with a mark of the beginning before it, and what comes
    next, which the loss compares with the output ``scores`` of shape [rows, entries, steps].
    """

    source: Source = "source"
    """The field of the ids that are read."""
    target: Source = "target"
    """The field of the ids so far: from the mark of the beginning to the last but one."""
    num_entries: Size = 3000
    """Entries of the target's dictionary."""
    embedding_dim: Size = 256
    hidden_size: Size = 256
    num_layers: Depth = 1
    """Of the encoder and of the decoder each."""
    dropout: Rate = 0.0
    """Between their layers."""


def seq2seq(args: Seq2seq) -> Graph:
    """The decoder begins with the encoder's last state."""
    return Graph(
        layers=(
            layer("source_embedding", "Embedding", args.source, embedding_dim=args.embedding_dim),
            _gru("encoder", args, "source_embedding"),
            layer(
                "target_embedding",
                "Embedding",
                args.target,
                num_embeddings=args.num_entries,
                embedding_dim=args.embedding_dim,
            ),
            _gru("decoder", args, "target_embedding", "encoder.1"),
            layer("attention", "DotProductAttention", "decoder", "encoder", "encoder"),
            layer("both", "cat", "decoder", "attention", dim=2),
            layer("combined", "Linear", out_features=args.hidden_size),
            layer("tanh", "Tanh"),
            layer("out", "Linear", out_features=args.num_entries),
            layer("scores", "transpose", dim0=1, dim1=2),
        )
    )


def _gru(name: str, args: Seq2seq, *inputs: str) -> Layer:
    return layer(
        name,
        "GRU",
        *inputs,
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        batch_first=True,
        dropout=args.dropout if args.num_layers > 1 else 0.0,
    )
