"""A language model that predicts the next token."""

from typing import Annotated, Any, Self

from pydantic import Field as Constraint
from pydantic import model_validator

from glasshouse.spec.network import Graph, Layer, ParameterInit
from glasshouse.spec.presets.blocks import transformer_block
from glasshouse.spec.presets.layers import Depth, Rate, Size, Source, dropout, layer
from glasshouse.spec.strict import Spec, WrongAt


class TransformerLm(Spec):
    """The architecture of GPT-2 (Radford et al., 2019): a causal transformer.

    Input and output share their embedding. The output ``scores`` has the shape [rows, entries,
    steps], as torch's cross entropy expects it.
    """

    tokens: Source = "tokens"
    """The field with the ids. The other input of the loss is the next ids."""
    num_tokens: Size = 65
    """Size of the vocabulary."""
    block_size: Size = 256
    """Maximum number of steps of a row."""
    num_layers: Depth = 6
    """Number of blocks."""
    num_heads: Size = 6
    """Number of attention heads."""
    width: Size = 384
    """Size of the embedding and of every block; a multiple of ``num_heads``."""
    dropout: Rate = 0.0
    """Dropout probability."""
    bias: bool = True
    """Whether linear layers and LayerNorms have a bias."""
    initializer_range: Annotated[float, Constraint(gt=0, le=1)] | None = None
    """Standard deviation of the initial weights of linear layers and embeddings; 0.02 in GPT-2.
    Layers before a residual addition use it divided by the square root of 2 * ``num_layers``, and
    biases start at 0. Default: torch's initialization for linear layers, 0.02 for embeddings.
    Example: ``0.02``."""

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
    return Graph(layers=tuple(_initialized(item, args) for item in layers))


def _initialized(item: Layer, args: TransformerLm) -> Layer:
    """The layer with GPT-2's initial values, if ``initializer_range`` is set."""
    std = args.initializer_range
    if std is None or item.type != "Linear":
        return item
    if item.name.endswith("_proj"):
        std /= (2 * args.num_layers) ** 0.5
    init = {"weight": ParameterInit(type="normal_", args={"std": std})}
    if args.bias:
        init["bias"] = ParameterInit(type="zeros_")
    return item.model_copy(update={"init": init})
