"""Blocks that several presets use."""

from glasshouse.spec.network import Layer
from glasshouse.spec.presets.layers import dropout, layer


def transformer_block(  # noqa: PLR0913 (a block has this many)
    name: str,
    before: str,
    *,
    width: int,
    num_heads: int,
    rate: float,
    is_causal: bool,
    bias: bool = True,
) -> list[Layer]:
    """Self-attention and a feed-forward network, each with pre-norm and a residual connection.

    As in GPT-2 (Radford et al., 2019). It reads the layer ``before``; its output is the layer
    ``<name>``.
    """
    no_bias: dict[str, bool] = {} if bias else {"bias": False}
    return [
        layer(f"{name}_ln_1", "LayerNorm", before, **no_bias),
        layer(f"{name}_c_attn", "Linear", out_features=3 * width, **no_bias),
        layer(f"{name}_qkv", "chunk", chunks=3, dim=2),
        layer(
            f"{name}_attn",
            "DotProductAttention",
            *(f"{name}_qkv.{part}" for part in range(3)),
            num_heads=num_heads,
            dropout=rate,
            is_causal=is_causal,
        ),
        layer(f"{name}_attn_proj", "Linear", out_features=width, **no_bias),
        *dropout(f"{name}_attn_drop", rate),
        layer(f"{name}_attn_add", "add", before, f"{name}_attn_{'drop' if rate else 'proj'}"),
        layer(f"{name}_ln_2", "LayerNorm", **no_bias),
        layer(f"{name}_c_fc", "Linear", out_features=4 * width, **no_bias),
        layer(f"{name}_gelu", "GELU"),
        layer(f"{name}_c_proj", "Linear", out_features=width, **no_bias),
        *dropout(f"{name}_drop", rate),
        layer(name, "add", f"{name}_attn_add", f"{name}_{'drop' if rate else 'c_proj'}"),
    ]
