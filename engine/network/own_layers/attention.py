"""Attention, position embeddings and tied embeddings, which torch's layers do not cover.

Shape suffixes: B = rows, T = steps of the queries, S = steps of the keys, D = width, N = heads,
H = width of a head, V = entries.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.network.lengths import Lengths, TakesLengths, is_padding


class DotProductAttention(TakesLengths, nn.Module):
    """Mean of the values for each query, weighted by the softmax of its products with the keys.

    Vaswani et al., 2017, without the projections: put Linear layers before and after it. Keys past
    the end of their row get no weight. A row without keys outputs zeros.
    """

    counted_input = 1

    def __init__(
        self,
        num_heads: int = 1,
        dropout: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> None:
        """Each head has ``width / num_heads`` values; ``scale`` defaults to 1 / sqrt of that.

        ``is_causal``: step t attends to steps 0 to t. ``dropout`` applies to the weights.
        """
        super().__init__()
        if num_heads < 1 or not 0 <= dropout <= 1:
            raise ValueError("num_heads must be at least 1, and dropout in [0, 1]")
        self.num_heads = num_heads
        self.dropout = dropout
        self.is_causal = is_causal
        self.scale = scale

    def forward(
        self,
        query_BTD: Tensor,
        key_BSD: Tensor,
        value_BSD: Tensor,
        *,
        lengths: Lengths | None = None,
    ) -> Tensor:
        """Attend; return [B, T, width of the values]."""
        if self.is_causal and query_BTD.shape[1] != key_BSD.shape[1]:
            raise ValueError("is_causal needs as many keys as queries")
        if lengths is not None and lengths.are_all(key_BSD.shape[1]):
            lengths = None  # masks nothing; torch has faster kernels without a mask
        query, key, value = (self._heads(item) for item in (query_BTD, key_BSD, value_BSD))
        allowed = self._allowed(key_BSD, lengths)
        output_BNTH = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=allowed,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal and allowed is None,
            scale=self.scale,
        )
        output_BTD = output_BNTH.transpose(1, 2).flatten(2)
        if lengths is None or not lengths.has_empty:
            return output_BTD
        return output_BTD.masked_fill((lengths.of_rows == 0)[:, None, None], 0.0)

    def _heads(self, x_BTD: Tensor) -> Tensor:
        if x_BTD.dim() != 3 or x_BTD.shape[2] % self.num_heads:
            detail = "attention takes [rows, steps, width], the width a multiple of num_heads"
            raise ValueError(f"{detail} ({self.num_heads}); this is {list(x_BTD.shape)}")
        return x_BTD.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def _allowed(self, key_BSD: Tensor, lengths: Lengths | None) -> Tensor | None:
        """Return which keys a query may attend to, as [B, 1, 1 or T, S]; None: torch's own rule."""
        if lengths is None:
            return None
        num_steps = key_BSD.shape[1]
        # A row without keys attends to one, because a softmax over nothing would be NaN.
        known_BS = ~is_padding(lengths.of_rows.clamp(min=1), num_steps)
        allowed = known_BS[:, None, None, :]
        if not self.is_causal:
            return allowed
        return allowed & torch.ones_like(allowed[:1].expand(1, 1, num_steps, -1)).tril()

    def extra_repr(self) -> str:
        """Return the arguments, for error messages."""
        return f"num_heads={self.num_heads}, is_causal={self.is_causal}"


class _NormalEmbedding(nn.Embedding):
    def __init__(self, num_embeddings: int, embedding_dim: int, std: float = 0.02) -> None:
        """Initialize normally with ``std``, as GPT-2 does, to keep the scores close together."""
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Initialize the vectors."""
        nn.init.normal_(self.weight, std=self.std)


class PositionEmbedding(_NormalEmbedding):
    """A learned vector for each step of a row, from 0; expanded to the rows of its input.

    ``num_embeddings``: max steps of a row.
    """

    def forward(self, x_BT: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the vectors of the steps of [B, T, …], as [B, T, embedding_dim]."""
        if x_BT.dim() < 2:
            raise ValueError("PositionEmbedding takes rows of steps: [rows, steps, …]")
        num_rows, num_steps = x_BT.shape[:2]
        if num_steps > self.num_embeddings:
            detail = f"the rows have {num_steps} steps, and there are positions for"
            raise ValueError(f"{detail} {self.num_embeddings}: raise num_embeddings")
        return self.weight[:num_steps].expand(num_rows, -1, -1)


class TiedEmbedding(_NormalEmbedding):
    """Maps entries to vectors; as a second layer (``shared_with``), vectors to scores of entries.

    Press and Wolf, 2017: the output layer's weight is the embedding's.
    """

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return vectors [B, …, D] of integers [B, …], or scores [B, …, V] of vectors [B, …, D]."""
        return F.linear(x, self.weight) if x.is_floating_point() else super().forward(x)


LAYERS: dict[str, type[nn.Module]] = {
    "DotProductAttention": DotProductAttention,
    "PositionEmbedding": PositionEmbedding,
    "TiedEmbedding": TiedEmbedding,
}
