"""A language model that says which entry comes next."""

from typing import Annotated, Any, Self

from pydantic import Field as Constraint
from pydantic import model_validator

from glasshouse.spec.network import Graph, Layer, ParameterInit
from glasshouse.spec.presets.blocks import transformer_block
from glasshouse.spec.presets.drawing import Depth, Rate, Size, Source, dropout, layer
from glasshouse.spec.strict import Spec, WrongAt


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
    bias: bool = True
    """Whether linear layers and normalisations have one."""
    initializer_range: Annotated[float, Constraint(gt=0, le=1)] | None = None
    """Linear layers begin normal with this standard deviation, GPT-2's is 0.02, those in front of
    an addition with it over the root of twice ``num_layers``; their biases with 0. Left out, with
    what torch draws. Embeddings begin with it too, or with 0.02."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.width % self.num_heads:
            detail = f"width ({self.width}) must be a multiple of num_heads ({self.num_heads})"
            raise WrongAt("width", detail=detail)
        return self


def transformer_lm(args: TransformerLm) -> Graph:
    """``wte`` and ``wpe``, the blocks ``h0``, ``h1`` …, ``ln_f`` and ``lm_head``, as in GPT-2."""
    sizes: dict[str, Any] = {"embedding_dim": args.width}
    if args.initializer_range is not None:
        sizes["std"] = args.initializer_range
    layers: list[Layer] = [
        layer("wte", "TiedEmbedding", args.tokens, num_embeddings=args.num_tokens, **sizes),
        layer("wpe", "PositionEmbedding", num_embeddings=args.block_size, **sizes),
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
            bias=args.bias,
        )
    layers += [
        layer("ln_f", "LayerNorm", **({} if args.bias else {"bias": False})),
        Layer(name="lm_head", shared_with="wte"),
        layer("scores", "transpose", dim0=1, dim1=2),
    ]
    return Graph(layers=tuple(_begun(item, args) for item in layers))


def _begun(item: Layer, args: TransformerLm) -> Layer:
    """A layer with the first values of GPT-2, where they are asked for."""
    std = args.initializer_range
    if std is None or item.type != "Linear":
        return item
    if item.name.endswith("_proj"):
        std /= (2 * args.num_layers) ** 0.5
    init = {"weight": ParameterInit(type="normal_", args={"std": std})}
    if args.bias:
        init["bias"] = ParameterInit(type="zeros_")
    return item.model_copy(update={"init": init})
