"""Layers of transformers, compared with torch's own and with each row alone."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from engine.network.lengths import Lengths
from engine.network.own_layers.attention import (
    DotProductAttention,
    PositionEmbedding,
    TiedEmbedding,
)
from engine.network.own_layers.sequences import MaskPadding, SequenceSoftmax


def by_torch(attention: nn.MultiheadAttention, x, **more):
    return attention(x, x, x, need_weights=False, **more)[0]


def projected(attention: nn.MultiheadAttention, own: Callable[..., Tensor], x):
    """torch's layer by hand, with ours inside it."""
    qkv = nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    return attention.out_proj(own(*qkv.chunk(3, dim=2)))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_heads", [1, 4])
def test_attention_is_the_inside_of_torchs(num_heads, is_causal):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, num_heads, batch_first=True)
    x = torch.randn(3, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5) if is_causal else None
    expected = by_torch(attention, x, attn_mask=mask)
    own = DotProductAttention(num_heads, is_causal=is_causal)
    assert torch.allclose(projected(attention, own, x), expected, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_step_attends_to_what_stands_behind_the_end_of_a_row(is_causal):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    own = DotProductAttention(2, is_causal=is_causal)
    x = torch.randn(3, 5, 8)
    counts = [5, 2, 3]
    lengths = Lengths(torch.tensor(counts))
    together = projected(attention, partial(own, lengths=lengths), x)
    for row, count in enumerate(counts):
        alone = projected(attention, own, x[row : row + 1, :count])
        assert torch.allclose(together[row, :count], alone[0], atol=1e-6)


def test_a_row_without_a_key_gives_zeros_and_no_nan():
    own = DotProductAttention()
    x = torch.randn(2, 3, 4, requires_grad=True)
    found = own(x, x, x, lengths=Lengths(torch.tensor([0, 2])))
    assert torch.equal(found[0], torch.zeros(3, 4))
    found.sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_queries_may_be_more_or_fewer_than_keys_unless_it_is_causal():
    query, key = torch.randn(2, 3, 4), torch.randn(2, 6, 4)
    weights = (query @ key.transpose(1, 2) * 0.25).softmax(dim=2)
    found = DotProductAttention(scale=0.25)(query, key, key)
    assert torch.allclose(found, weights @ key, atol=1e-6)
    with pytest.raises(ValueError, match="as many keys"):
        DotProductAttention(is_causal=True)(query, key, key)
    with pytest.raises(ValueError, match="multiple of num_heads"):
        DotProductAttention(3)(query, key, key)


def test_weights_are_dropped_in_training_only():
    own = DotProductAttention(dropout=0.5)
    x = torch.randn(2, 3, 4)
    torch.manual_seed(0)
    assert not torch.equal(own(x, x, x), own(x, x, x))
    own.eval()
    assert torch.equal(own(x, x, x), own(x, x, x))


def test_positions_are_counted_from_the_beginning_of_each_row():
    positions = PositionEmbedding(6, 3)
    found = positions(torch.zeros(2, 4, 9))
    assert torch.equal(found[0], positions.weight[:4])
    assert torch.equal(found[1], positions.weight[:4])
    with pytest.raises(ValueError, match="raise num_embeddings"):
        positions(torch.zeros(2, 7))


def test_a_tied_embedding_scores_vectors_by_its_own_entries():
    tied = TiedEmbedding(7, 3)
    ids = torch.tensor([[1, 6], [0, 2]])
    assert torch.equal(tied(ids), tied.weight[ids])
    vectors = torch.randn(2, 2, 3)
    expected = torch.stack([(vectors * entry).sum(-1) for entry in tied.weight], dim=-1)
    assert torch.allclose(tied(vectors), expected, atol=1e-6)
    assert 0.01 < float(TiedEmbedding(1000, 10).weight.detach().std()) < 0.03


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 2)])
def test_a_softmax_over_steps_is_that_of_each_row_alone(shape):
    x = torch.randn(shape)
    softmax, counts = SequenceSoftmax(), [5, 2, 0]
    found = softmax(x, lengths=Lengths(torch.tensor(counts)))
    for row, count in enumerate(counts):
        assert torch.allclose(found[row, :count], x[row, :count].softmax(dim=0))
        assert not found[row, count:].any()


def test_steps_behind_the_end_become_zeros():
    mask, x = MaskPadding(), torch.randn(3, 4, 2)
    assert mask(x) is x
    found = mask(x, lengths=Lengths(torch.tensor([4, 1, 0])))
    assert torch.equal(found[0], x[0])
    assert torch.equal(found[1, :1], x[1, :1])
    assert not found[1, 1:].any()
    assert not found[2].any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_full_length_are_attended_to_without_a_mask(is_causal):
    """torch's fastest kernels take none; no key is masked, so the result is the same."""
    torch.manual_seed(0)
    own = DotProductAttention(2, is_causal=is_causal)
    x = torch.randn(3, 5, 8, requires_grad=True)
    found, expected = own(x, x, x, lengths=Lengths(torch.full((3,), 5))), own(x, x, x)
    assert torch.equal(found, expected)
    assert type(found.grad_fn) is type(expected.grad_fn), "nothing is filled in"
    shorter = own(x, x, x, lengths=Lengths(torch.tensor([5, 5, 4])))
    assert type(shorter.grad_fn) is type(expected.grad_fn), "no row is empty"
    assert not torch.equal(shorter[2], expected[2])
    empty = own(x, x, x, lengths=Lengths(torch.tensor([5, 5, 0])))
    assert type(empty.grad_fn) is not type(expected.grad_fn)
    assert not empty[2].any()
