import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.unit.engine.runs import errors, losses, of_type, run, spec

JUDGED = {"validation": {"dataset": "ds_1", "split": "test"}}


def sampling(samples: int, **changes):
    return spec(data=JUDGED, evaluate={"every_epochs": 1, "samples": samples}, **changes)


def kept(records: list) -> list:
    return [r for r in of_type(records, "artifact") if r["name"].startswith("samples-")]


def test_each_evaluation_keeps_what_the_network_says_of_the_same_rows(digits, tmp_path):
    records = run(tmp_path / "a", sampling(8), digits)
    assert [item["name"] for item in kept(records)] == [
        "samples-4.safetensors",
        "samples-9.safetensors",
    ]
    first, last = (load_file(tmp_path / "a" / item["file"]) for item in kept(records))
    rows = torch.arange(8) * 97 // 8
    assert torch.equal(first["row"], rows)
    assert torch.equal(last["row"], rows)
    labels = torch.from_numpy(np.load(digits / "test" / "1.npy"))
    assert torch.equal(first["label"], labels[rows])
    assert not torch.equal(first["fc"], last["fc"])
    checkpoint = of_type(records, "checkpoint")[-1]["dir"]
    weights = load_file(tmp_path / "a" / checkpoint / "model.safetensors")
    conv, fc = nn.Conv2d(1, 6, 3), nn.Linear(54, 10)
    conv.load_state_dict({k: weights[f"conv1.{k}"] for k in ("weight", "bias")})
    fc.load_state_dict({k: weights[f"fc.{k}"] for k in ("weight", "bias")})
    x = torch.from_numpy(np.load(digits / "test" / "0.npy"))[rows].to(torch.float32) / 255
    with torch.no_grad():  # no dropout: the network is in evaluation
        scores = fc(nn.functional.max_pool2d(conv(x).relu(), 2).flatten(1))
    assert torch.equal(last["fc"], scores)
    assert kept(records)[-1]["size_bytes"] > 8 * 10 * 4


def test_sampling_changes_no_number(digits, tmp_path):
    plain = run(tmp_path / "a", spec(data=JUDGED), digits)
    assert losses(run(tmp_path / "b", sampling(5), digits)) == losses(plain)
    assert kept(plain) == []


def test_more_samples_than_rows_are_all_rows(digits, tmp_path):
    records = run(tmp_path, sampling(1000, stop={"steps": 1}), digits)
    found = load_file(tmp_path / kept(records)[-1]["file"])
    assert torch.equal(found["row"], torch.arange(97))


def test_samples_that_cannot_be_written_are_reported_and_training_continues(
    digits, tmp_path, capfd
):
    tmp_path.joinpath("artifacts").write_text("no directory")
    records = run(tmp_path, sampling(3), digits)
    dropped = of_type(records, "dropped")
    assert len(dropped) == 2
    assert "samples" in dropped[0]["what"]
    assert len(losses(records)) == 10
    assert "Traceback" in capfd.readouterr().err


WIDE = [
    {"name": "flat", "type": "Flatten"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    {"name": "wide", "type": "Linear", "args": {"out_features": 40000}, "inputs": ["flat"]},
]
NAMED = [{"name": "row", "type": "Flatten"}, {"name": "fc", "type": "Linear"}]
NAMED[1]["args"] = {"out_features": 10}


@pytest.mark.parametrize(
    ("changes", "pointer", "part"),
    [
        ({"evaluate": {"every_epochs": 1, "samples": -1}}, "/evaluate/samples", "at least 0"),
        ({"evaluate": {"every_epochs": 1, "samples": 1001}}, "/evaluate/samples", "1,000"),
        (
            {
                "evaluate": {"every_epochs": 1, "samples": 1000},
                "network": {"layers": WIDE, "outputs": ["wide"]},
            },
            "/evaluate/samples",
            "at most 419 rows",
        ),
        (
            {
                "evaluate": {"every_epochs": 1, "samples": 1},
                "network": {"layers": NAMED, "outputs": ["row"]},
            },
            "/evaluate/samples",
            "rename",
        ),
    ],
)
def test_samples_that_nothing_could_keep_are_refused(changes, pointer, part):
    found = errors(spec(data=JUDGED, **changes))
    assert pointer in found, found
    assert part in found[pointer]
