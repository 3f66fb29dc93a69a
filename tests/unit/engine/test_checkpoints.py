import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from engine.checkpoint import checkpoint
from engine.checkpoint.training_state import Generators, OptimizerState, Weights
from engine.core import safetensors_writer
from engine.core.snapshot import take
from glasshouse.errors import CheckpointDamaged, CheckpointMismatch, SpecFailed, StorageFailed


def _trained():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    network(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return network, optimizer


def _parts(network, optimizer):
    parts = {"model": Weights(network), "optimizer": OptimizerState(optimizer, network)}
    return {**parts, "generators": Generators()}


def _save(directory: Path, network, optimizer=None, **about):
    optimizer = optimizer or torch.optim.SGD(network.parameters())
    return checkpoint.write(directory, take(_parts(network, optimizer), {"step": 0, **about}))


@pytest.fixture
def saved(tmp_path):
    network, optimizer = _trained()
    _save(tmp_path / "step-1", network, optimizer, step=1)
    return tmp_path / "step-1"


def test_a_checkpoint_holds_everything_and_says_what_it_wrote(tmp_path):
    network, optimizer = _trained()
    metrics = {"loss": float("nan")}
    files = _save(tmp_path / "step-1", network, optimizer, step=1, metrics=metrics)
    tensors = {"model.safetensors", "optimizer.safetensors", "generators.safetensors"}
    assert files.keys() == tensors | {"state.json", "manifest.json"}
    assert {*os.listdir(tmp_path / "step-1")} == files.keys()
    for name, said in files.items():
        content = (tmp_path / "step-1" / name).read_bytes()
        assert said["size_bytes"] == len(content)
        assert said["sha256"] == hashlib.sha256(content).hexdigest()
    manifest = json.loads((tmp_path / "step-1" / "manifest.json").read_text())
    assert manifest == {name: said for name, said in files.items() if name != "manifest.json"}
    kept = load_file(tmp_path / "step-1" / "optimizer.safetensors")
    inside = optimizer.state_dict()["state"]
    assert torch.equal(kept["0.weight.exp_avg"], inside[0]["exp_avg"])
    state = json.loads((tmp_path / "step-1" / "state.json").read_text())
    assert (state["format"], state["step"]) == (3, 1)
    assert state["metrics"] == {"loss": "NaN"}
    assert state["parts"]["optimizer"]["param_groups"][0]["lr"] == 0.1
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    checkpoint.load_model(tmp_path / "step-1", other)
    for name, value in network.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


RESUMING = """
import sys, torch
from pathlib import Path
from torch import nn
from engine.checkpoint import checkpoint
from engine.training.start import Start
from engine.checkpoint.training_state import Generators, OptimizerState, Weights

def kilobytes(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))

network = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])
optimizer = torch.optim.Adam(network.parameters())
parts = {"model": Weights(network), "optimizer": OptimizerState(optimizer, network)}
parts["generators"] = Generators()
before = kilobytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
Start(checkpoint.read(Path(sys.argv[1]))).restore(parts)
print(kilobytes("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the peak")
@pytest.mark.long
def test_resuming_holds_the_state_of_the_optimizer_once(tmp_path):
    """64 MiB of weights and 128 MiB of moments: the peak is the moments, and a few pages."""
    network = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])
    optimizer = torch.optim.Adam(network.parameters())
    for item in network.parameters():
        item.grad = torch.zeros_like(item)
    optimizer.step()
    _save(tmp_path / "c", network, optimizer)
    command = [sys.executable, "-c", RESUMING, str(tmp_path / "c")]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert 128 < int(done.stdout) / 1024 < 160


def test_the_library_reads_what_is_saved_with_its_metadata(tmp_path):
    tensors = {
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "half": torch.arange(3, dtype=torch.bfloat16),
        "complex": torch.randn(2, dtype=torch.complex64),
        "none": torch.empty(0, 4),
        "flag": torch.tensor(True),
    }
    names = {"fc/classes": '["é", "b"]'}
    safetensors_writer.save_tensors(tmp_path / "x.safetensors", tensors, names)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, item in tensors.items():
        assert (found[name].dtype, found[name].shape) == (item.dtype, item.shape)
        assert torch.equal(found[name], item)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == names


def test_tensors_are_read_into_memory_of_their_own(tmp_path):
    tensors = {
        "half": torch.arange(3, dtype=torch.bfloat16),
        "whole": torch.arange(6).reshape(2, 3),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "flag": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"of": "the library"})
    found = safetensors_writer.read_tensors(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, item in tensors.items():
        assert (found[name].dtype, found[name].shape) == (item.dtype, item.shape)
        assert torch.equal(found[name], item)
    content = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(content[:-1])
    assert torch.equal(found["half"], tensors["half"]), "the file is no part of it"
    with pytest.raises(ValueError, match="the file ends within"):
        safetensors_writer.read_tensors(tmp_path / "x.safetensors")


def test_files_are_as_the_library_writes_them(tmp_path):
    tensors = {
        "half": torch.arange(3, dtype=torch.bfloat16),
        "whole": torch.arange(6, dtype=torch.int64).reshape(2, 3),
        "one": torch.tensor(True),
        "none": torch.empty(0, 4),
        "double": torch.tensor([float("nan"), 1e300], dtype=torch.float64),
    }
    checkpoint.write_file(tmp_path / "ours.safetensors", checkpoint.pieces_of(tensors))
    save_file(tensors, tmp_path / "theirs.safetensors")
    ours = load_file(tmp_path / "ours.safetensors")
    theirs = load_file(tmp_path / "theirs.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "ASGD", "Rprop", "Adafactor", "RAdam"])
def test_an_optimizer_continues_as_if_it_had_never_stopped(tmp_path, name):
    def make():
        torch.manual_seed(0)
        network = nn.Linear(3, 2)
        return network, getattr(torch.optim, name)(network.parameters(), lr=0.05)

    def step(network, optimizer):
        network(torch.linspace(-1, 1, 12).reshape(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    network, optimizer = make()
    for _ in range(3):
        step(network, optimizer)
    _save(tmp_path / "c", network, optimizer)
    other, resumed = make()
    checkpoint.read(tmp_path / "c").restore(_parts(other, resumed))
    for _ in range(3):
        step(network, optimizer)
        step(other, resumed)
    assert torch.equal(network.weight, other.weight)
    group, mine = optimizer.param_groups[0], resumed.param_groups[0]
    assert {key: group[key] for key in group if key != "params"} == {
        key: mine[key] for key in mine if key != "params"
    }


def test_a_crash_before_the_rename_leaves_no_checkpoint(tmp_path, monkeypatch):
    network, optimizer = _trained()
    _save(tmp_path / "step-1", network, optimizer, step=1)
    before = (tmp_path / "step-1" / "state.json").read_bytes()

    def crash(_path: Path, _target: Path) -> None:
        raise OSError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(OSError, match="power"):
            _save(tmp_path / "step-2", network, optimizer, step=2)
    assert os.listdir(tmp_path) == ["step-1"]
    assert (tmp_path / "step-1" / "state.json").read_bytes() == before
    _save(tmp_path / "step-2", network, optimizer, step=2)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


def test_what_a_killed_writer_left_is_tidied_and_what_was_complete_comes_back(saved):
    parent = saved.parent
    shutil.copytree(saved, parent / ".step-2.partial")
    shutil.copytree(saved, parent / ".step-1.replaced")
    shutil.copytree(saved, parent / ".step-3.replaced")  # killed between the two renames
    checkpoint.clear_leftovers(parent)
    assert sorted(os.listdir(parent)) == ["step-1", "step-3"]
    assert checkpoint.read(parent / "step-3").step == 1


def test_a_checkpoint_that_is_written_again_is_the_new_one(tmp_path):
    _save(tmp_path / "c", nn.Linear(1, 1), step=1)
    _save(tmp_path / "c", nn.Linear(1, 1), step=2)
    assert checkpoint.read(tmp_path / "c").step == 2
    assert os.listdir(tmp_path) == ["c"]


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
    _save(tmp_path / "c", network)
    with pytest.raises(SpecFailed, match=words):
        checkpoint.load_model(tmp_path / "c", other)
    with pytest.raises(CheckpointMismatch, match=words):
        parts = _parts(other, torch.optim.SGD(other.parameters()))
        checkpoint.read(tmp_path / "c").restore(parts)


def test_training_does_not_resume_from_weights_of_another_type(tmp_path):
    _save(tmp_path / "c", nn.Linear(3, 2))
    other = nn.Linear(3, 2, dtype=torch.float64)
    with pytest.raises(CheckpointMismatch, match="float32 in the checkpoint and float64"):
        checkpoint.read(tmp_path / "c").restore(_parts(other, torch.optim.SGD(other.parameters())))


def test_another_optimizer_is_refused_by_name(saved):
    network, _ = _trained()
    for other, words in [
        (torch.optim.AdamW(network.parameters()), "the optimizer Adam, the job's is AdamW"),
        (torch.optim.Adam(network[0].parameters()), "other parameters: .* '1.bias'"),
    ]:
        with pytest.raises(CheckpointMismatch, match=words):
            checkpoint.read(saved).restore(_parts(network, other))


def test_parts_that_one_side_has_not_are_refused(saved):
    network, optimizer = _trained()
    parts = _parts(network, optimizer) | {"average": Weights(network)}
    with pytest.raises(CheckpointMismatch, match=r"the job needs .*average"):
        checkpoint.read(saved).restore(parts)


def test_part_of_a_checkpoint_fills_part_of_a_network(tmp_path):
    network = nn.Linear(3, 2)
    _save(tmp_path / "c", network)
    other = nn.Linear(3, 2, bias=False)
    checkpoint.load_model(tmp_path / "c", other, partial=True)
    assert torch.equal(other.weight, network.weight)


class _Evil:
    def __reduce__(self):
        return (os.abort, ())


@pytest.mark.parametrize("name", ["model.pt", "optimizer.pkl", "pytorch_model.bin", "data.pth"])
@pytest.mark.parametrize("load", ["resume", "infer"])
def test_a_planted_pickle_is_refused_and_never_opened(saved, name, load):
    (saved / name).write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(CheckpointDamaged, match=re.escape(name)):
        if load == "resume":
            checkpoint.read(saved)
        else:
            checkpoint.load_model(saved, _trained()[0])


def test_a_link_is_no_file_of_a_checkpoint(saved, tmp_path):
    (saved / "model.safetensors").rename(tmp_path / "elsewhere")
    (saved / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors"):
        checkpoint.read(saved)


def test_a_file_that_no_manifest_names_is_refused(saved):
    (saved / "more.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match=r"more\.safetensors"):
        checkpoint.read(saved)


FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["gone", "short", "flipped", "empty"])
def test_a_damaged_checkpoint_is_a_storage_failure_of_its_own(saved, name, damage):
    path = saved / name
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "short":
        path.write_bytes(content[:-3])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(StorageFailed) as caught:
        checkpoint.read(saved)
    assert caught.value.code == "checkpoint_damaged"
    assert caught.value.retryable


def test_a_missing_checkpoint_is_damaged(tmp_path):
    with pytest.raises(CheckpointDamaged):
        checkpoint.read(tmp_path / "step-7")
    with pytest.raises(CheckpointDamaged):
        checkpoint.load_model(tmp_path, nn.Linear(1, 1))


def test_a_checkpoint_of_the_first_format_gives_its_weights_and_no_more(tmp_path):
    network = nn.Linear(3, 2)
    save_file(dict(network.state_dict()), tmp_path / "model.safetensors")
    save_file({}, tmp_path / "optimizer.safetensors")
    (tmp_path / "state.json").write_text(json.dumps({"format": 1, "step": 4}))
    other = nn.Linear(3, 2)
    assert checkpoint.load_model(tmp_path, other)["step"] == 4
    assert torch.equal(other.weight, network.weight)
    with pytest.raises(CheckpointMismatch, match="format 1"):
        checkpoint.read(tmp_path)


def test_the_loader_has_nothing_that_unpickles():
    files = [*Path(checkpoint.__file__).parent.glob("*.py"), Path(safetensors_writer.__file__)]
    assert len(files) > 5
    for text in (file.read_text() for file in files):
        assert "torch.load" not in text
        assert "import pickle" not in text
