import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine import checkpoint
from glasshouse.errors import SpecFailed, StorageFailed


def _trained():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    network(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return network, optimizer


def test_a_checkpoint_holds_everything_and_says_what_it_wrote(tmp_path):
    network, optimizer = _trained()
    state = {"step": 1, "epoch": 0, "seed": 7, "metrics": {"loss": float("nan")}}
    files = checkpoint.save(tmp_path / "step-1", network, optimizer, state)
    assert files.keys() == {"model.safetensors", "optimizer.safetensors", "state.json"}
    for name, said in files.items():
        content = (tmp_path / "step-1" / name).read_bytes()
        assert said["size_bytes"] == len(content)
        assert said["sha256"] == hashlib.sha256(content).hexdigest()
    kept = load_file(tmp_path / "step-1" / "optimizer.safetensors")
    inside = optimizer.state_dict()["state"]
    assert torch.equal(kept["0.exp_avg"], inside[0]["exp_avg"])
    whole = json.loads((tmp_path / "step-1" / "state.json").read_text())
    assert whole["format"] == 1
    assert whole["metrics"] == {"loss": "NaN"}
    assert whole["rng"]["cpu"]
    assert whole["optimizer"]["param_groups"][0]["lr"] == 0.1
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    checkpoint.load_model(tmp_path / "step-1", other)
    for name, value in network.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_a_crash_before_the_rename_leaves_no_checkpoint(tmp_path, monkeypatch):
    network, optimizer = _trained()
    checkpoint.save(tmp_path / "step-1", network, optimizer, {"step": 1})
    before = (tmp_path / "step-1" / "state.json").read_bytes()

    def crash(_path: Path, _target: Path) -> None:
        raise OSError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(OSError, match="power"):
            checkpoint.save(tmp_path / "step-2", network, optimizer, {"step": 2})
    assert not (tmp_path / "step-2").exists()
    assert (tmp_path / "step-1" / "state.json").read_bytes() == before
    checkpoint.save(tmp_path / "step-2", network, optimizer, {"step": 2})
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Linear(3, 4), r"\[2, 3\] in the checkpoint and \[4, 3\]"),
        (nn.Linear(3, 2, bias=False), "which the network has not"),
        (nn.Bilinear(3, 3, 2), "shape"),
        (nn.Sequential(nn.Linear(3, 2)), "which the network needs"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path, other, words):
    network = nn.Linear(3, 2)
    checkpoint.save(tmp_path / "c", network, torch.optim.SGD(network.parameters()), {})
    with pytest.raises(SpecFailed, match=words):
        checkpoint.load_model(tmp_path / "c", other)


def test_part_of_a_checkpoint_fills_part_of_a_network(tmp_path):
    network = nn.Linear(3, 2)
    checkpoint.save(tmp_path / "c", network, torch.optim.SGD(network.parameters()), {})
    other = nn.Linear(3, 2, bias=False)
    checkpoint.load_model(tmp_path / "c", other, partial=True)
    assert torch.equal(other.weight, network.weight)


def test_a_damaged_checkpoint_is_a_storage_failure(tmp_path):
    with pytest.raises(StorageFailed):
        checkpoint.load_model(tmp_path, nn.Linear(1, 1))
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-2])
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(StorageFailed):
        checkpoint.load_model(tmp_path, nn.Linear(1, 1))
