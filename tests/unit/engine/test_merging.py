"""Statistics that are merged over processes are those of all values."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.distributed.group import Group, connect
from engine.probes.merging import NotAlike, Row, SharedStep, merged
from engine.probes.statistics import plain_torch
from engine.probes.step_records import TensorHistogram

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


SEEN = [
    ({"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 4.0}),
    ({"a": 1.0}, {"a": 3.0, "b": 4.0}),  # process 0 has not seen "b"
    ({"a": 5.0, "b": 6.0}, {"a": 7.0, "b": 8.0}),
]
"""By step and process: the value of each tensor."""


def test_a_process_that_has_seen_other_tensors_spoils_only_its_step(tmp_path: Path):
    found = _in_two_processes("same", tmp_path)
    assert found[0] == [[2.0, 3.0], "not alike", [6.0, 7.0]]


def test_processes_that_never_agree_on_tensors_all_say_so(tmp_path: Path):
    found = _in_two_processes("other", tmp_path)
    assert found == [["not alike"], ["not alike"]]


def _in_two_processes(case: str, directory: Path) -> list[list[object]]:
    """Run this file as both processes; the results of each."""
    command = [sys.executable, "-m", __name__, case, str(directory / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    found = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(text) for text in found]


def _means_of_all_steps(case: str, store: str, rank: str) -> list[object]:
    group = connect(int(rank), 2, Path(store))
    shared, found = SharedStep(group), list[object]()
    for seen in SEEN if case == "same" else SEEN[1:2]:
        shared.begin(has_rows=True)
        rows: list[Row] = []
        for name, value in seen[group.rank].items():
            tensor = torch.tensor([value])
            shared.count(name, "output", tensor)
            rows.append((name, "output", plain_torch.figures(tensor)))
        try:
            merged_rows = shared.start_rows(rows).merged()
            found.append([figures[0] for _, _, figures in merged_rows])
        except NotAlike:
            found.append("not alike")
    return found


if __name__ == "__main__":
    print(json.dumps(_means_of_all_steps(*sys.argv[1:])), flush=True)  # noqa: T201


def test_histograms_of_a_device_are_read_before_they_are_sent():
    """There, the counts of all bins and the statistics are tensors; what is sent is JSON."""
    x = torch.randn(200)
    figures = torch.tensor(plain_torch.figures(x), dtype=torch.float64)
    on_device = TensorHistogram(
        "fc", "output", figures, plain_torch.counts_on_device(x), frozenset({"histogram"})
    )
    shared = SharedStep(Group())
    shared.count("fc", "output", x)
    (found,), of_ranks = shared.merge_histograms([on_device], lambda _kind, _name: {})
    assert found.counts == plain_torch.counts(x)
    assert [*found.figures] == pytest.approx(plain_torch.figures(x))
    assert of_ranks == {}
