"""A language model that says which entry comes next."""

from typing import Self

from pydantic import model_validator

from glasshouse.spec.network import Graph, Layer
from glasshouse.spec.presets.blocks import transformer_block
from glasshouse.spec.presets.drawing import Depth, Rate, Size, Source, dropout, layer
from glasshouse.spec.strict import Spec


class TransformerLm(Spec):
    """The architecture of GPT-2 (Radford et al., 2019): each step sees itself and those before.

    Input and output share their embedding. The output ``scores`` has the shape [rows, entries,
    steps], as torch's cross entropy takes it.
    """

    tokens: Source = "tokens"
    """The field of the ids; what comes next is the loss's other input."""
    num_tokens: Size = 65
    """Entries of the vocabulary."""
    block_size: Size = 256
    """The most steps of a row."""
    num_layers: Depth = 6
    num_heads: Size = 6
    width: Size = 384
    """Of the embedding and of every block; a multiple of ``num_heads``."""
    dropout: Rate = 0.0

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError("width must be a multiple of num_heads")
        return self


def transformer_lm(args: TransformerLm) -> Graph:
    """``wte`` and ``wpe``, the blocks ``h0``, ``h1`` …, ``ln_f`` and ``lm_head``, as in GPT-2."""
    layers: list[Layer] = [
        layer(
            "wte",
            "TiedEmbedding",
            args.tokens,
            num_embeddings=args.num_tokens,
            embedding_dim=args.width,
        ),
        layer("wpe", "PositionEmbedding", num_embeddings=args.block_size, embedding_dim=args.width),
        layer("embedded", "add", "wte", "wpe"),
        *dropout("drop", args.dropout),
    ]
    for number in range(args.num_layers):
        layers += transformer_block(
            f"h{number}",
            layers[-1].name,
            width=args.width,
            num_heads=args.num_heads,
            rate=args.dropout,
            is_causal=True,
        )
    layers += [
        layer("ln_f", "LayerNorm"),
        Layer(name="lm_head", shared_with="wte"),
        layer("scores", "transpose", dim0=1, dim1=2),
    ]
    return Graph(layers=tuple(layers))
