"""Sequence to sequence: an encoder, and a decoder with attention to it."""

from glasshouse.spec.network import Graph, Layer
from glasshouse.spec.presets.layers import Depth, Rate, Size, Source, layer
from glasshouse.spec.strict import Spec


class Seq2seq(Spec):
    """GRU encoder and decoder with dot-product attention (Luong et al., 2015).

    It needs three fields: ``source``; ``target``, which begins with a start token; and the next
    tokens, which the loss compares with the output ``scores`` of shape [rows, entries, steps].
    """

    source: Source = "source"
    """The field with the source ids."""
    target: Source = "target"
    """The field with the target ids so far: from the start token to the last but one."""
    num_entries: Size = 3000
    """Size of the target vocabulary."""
    embedding_dim: Size = 256
    """Size of the embedding vectors."""
    hidden_size: Size = 256
    """Size of the hidden states."""
    num_layers: Depth = 1
    """Number of layers of the encoder, and of the decoder."""
    dropout: Rate = 0.0
    """Dropout probability between these layers."""


def seq2seq(args: Seq2seq) -> Graph:
    """The decoder starts from the final hidden state of the encoder."""
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
