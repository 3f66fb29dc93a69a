"""Statistics that are merged over processes are those of all values."""

import math

import pytest
import torch

from engine.probes.merging import merged
from engine.probes.statistics import plain_torch

PIECES = {
    "plain": [torch.randn(50), torch.randn(7) * 3 + 2, torch.randn(1)],
    "zeros": [torch.zeros(4), torch.tensor([0.0, 1.0]), torch.tensor([-2.0])],
    "a NaN": [torch.tensor([1.0, math.nan]), torch.tensor([3.0]), torch.randn(5)],
    "only NaN and Inf": [torch.tensor([math.nan]), torch.tensor([math.inf, -math.inf])],
    "one without finite values": [torch.tensor([math.nan, math.inf]), torch.randn(9)],
    "far from zero": [torch.randn(100) + 1e4, torch.randn(100) - 1e4],
}


@pytest.mark.parametrize("case", PIECES)
def test_merged_statistics_are_those_of_all_values(case: str):
    pieces = [piece.double() for piece in PIECES[case]]
    rows = torch.tensor([plain_torch.figures(piece) for piece in pieces], dtype=torch.float64)
    counts = torch.tensor([float(len(piece)) for piece in pieces])
    found = merged(rows[:, None], counts[:, None])[0].tolist()
    expected = plain_torch.figures(torch.cat(pieces))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


def test_a_process_without_rows_does_not_count():
    own = torch.tensor(plain_torch.figures(torch.tensor([1.0, 3.0])), dtype=torch.float64)
    other = torch.tensor(plain_torch.figures(torch.tensor([math.nan] * 3)), dtype=torch.float64)
    found = merged(torch.stack([own, other])[:, None], torch.tensor([[2.0], [0.0]]))[0]
    assert torch.equal(found, own)
