"""Recurrent layers that keep their hidden state across batches, and across checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine.core.spool import read_frames
from tests.unit.engine.ragged import meta_of
from tests.unit.engine.runs import (
    errors,
    losses,
    of_type,
    planned,
    run,
    spec,
    write_table,
)
from tests.unit.engine.test_resuming import _resume

ROWS, STEPS, WIDTH, BATCH = 30, 4, 3, 6
"""Five batches: row i of each continues row i of the previous one."""


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six sequences of 20 steps, cut into pieces of four."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, STEPS, WIDTH)).astype(np.float32)
    y = x.cumsum(axis=0)[:, -1, :1].astype(np.float32)
    splits = {"train": slice(0, ROWS), "test": slice(0, 12)}
    return write_table(tmp_path_factory.mktemp("long"), {"x": x, "y": y}, splits)


def job(kind: str = "LSTM", layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    args = {"hidden_size": 5, "batch_first": True, "num_layers": 2}
    data = changes.pop("data", {})
    return spec(
        network={
            "layers": [
                {
                    "name": "rnn", "type": kind, "args": args, "inputs": ["x"], "stateful": True,
                    **(layer or {}),
                },
                {"name": "last", "type": "select", "args": {"dim": 1, "index": -1}},
                {"name": "fc", "type": "Linear", "args": {"out_features": 1}},
            ]
        },
        loss={"type": "MSELoss", "inputs": ["fc", "y"]},
        optimizer={"type": "SGD", "args": {"lr": 0.1}},
        data={
            "fields": {"x": {"type": "dense"}, "y": {"type": "dense"}},
            "batch_size": BATCH,
            "shuffle": {"enabled": False},
            **data,
        },
        **changes,
    )  # fmt: skip


def pieces(table: Path, split: str = "train", size: int = BATCH) -> list[tuple[torch.Tensor, ...]]:
    x, y = (torch.from_numpy(np.load(table / split / f"{number}.npy")) for number in (0, 1))
    return list(zip(x.split(size), y.split(size), strict=True))


def by_hand(kind: str, table: Path, epochs: int, size: int = BATCH) -> tuple[list[float], Any]:
    """Truncated backpropagation through time in plain torch."""
    torch.manual_seed(3)
    rnn = getattr(nn, kind)(WIDTH, 5, batch_first=True, num_layers=2)
    fc = nn.Linear(5, 1)
    optimizer = torch.optim.SGD([*rnn.parameters(), *fc.parameters()], lr=0.1)
    found: list[float] = []
    for _ in range(epochs):
        state: Any = None
        for x, y in pieces(table, size=size):
            if state is not None:
                state = _of_rows(state, len(x))
            output, state = rnn(x, state)
            loss = nn.functional.mse_loss(fc(output[:, -1]), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found, (rnn, fc)


def _of_rows(state: Any, count: int) -> Any:
    if isinstance(state, tuple):
        return tuple(_of_rows(item, count) for item in state)
    return state[:, :count].detach().contiguous()


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_it_is_trained_as_one_long_sequence_cut_into_pieces(long, tmp_path, kind):
    found = losses(run(tmp_path, job(kind, stop={"epochs": 3}), long))
    assert found == by_hand(kind, long, 3)[0]
    carries_not = job(kind, layer={"stateful": False}, stop={"epochs": 3})
    assert losses(run(tmp_path / "not", carries_not, long))[1:] != found[1:]


def test_a_smaller_last_batch_continues_with_its_rows(long, tmp_path):
    data = {"batch_size": 8}
    found = losses(run(tmp_path, job(stop={"epochs": 2}, data=data), long))
    assert found == by_hand("LSTM", long, 2, size=8)[0]


def test_an_evaluation_begins_with_zeros_and_training_does_not_know(long, tmp_path):
    judged = {
        "evaluate": {"every_steps": 2, "samples": 9},
        "data": {"validation": {"dataset": "ds_1", "split": "test"}},
        "stop": {"epochs": 2},
    }
    records = run(tmp_path, job(**judged), long)
    expected, (rnn, fc) = by_hand("LSTM", long, 2)
    assert losses(records) == expected
    state, total = None, 0.0
    with torch.no_grad():
        for x, y in pieces(long, "test"):
            output, state = rnn(x, state)
            total += float(nn.functional.mse_loss(fc(output[:, -1]), y)) * len(x)
    values = [item["values"] for item in of_type(records, "metrics")]
    last = [item["validation/loss"] for item in values if "validation/loss" in item][-1]
    assert last == pytest.approx(total / 12, rel=1e-6)
    kept = [item for item in of_type(records, "artifact") if item["name"].startswith("samples")]
    samples = load_file(tmp_path / kept[-1]["file"])
    with torch.no_grad():  # a sampled row starts without hidden state
        x = torch.from_numpy(np.load(long / "test" / "0.npy"))[samples["row"]]
        assert torch.allclose(samples["fc"], fc(rnn(x)[0][:, -1]), atol=1e-6)


@pytest.mark.parametrize("step", [3, 5, 7])
def test_it_continues_from_a_checkpoint_bit_for_bit(long, tmp_path, step):
    saving = job(stop={"epochs": 2}, checkpoint={"every_steps": 1, "keep_last": 100})
    records = run(tmp_path / "whole", saving, long)
    resumed = _resume(tmp_path / "again", saving, long, step, tmp_path / "whole")
    assert losses(resumed) == losses(records)[step:]


def test_what_it_is_carried_with_is_a_part_of_the_checkpoint(long, tmp_path, monkeypatch):
    """The control: were it not restored, the test above would see it."""
    saving = job(stop={"epochs": 2}, checkpoint={"every_steps": 1, "keep_last": 100})
    records = run(tmp_path / "whole", saving, long)
    monkeypatch.setattr(
        "engine.network.hidden_state.HiddenState.restore", lambda self, state: self.reset()
    )
    resumed = _resume(tmp_path / "again", saving, long, 3, tmp_path / "whole")
    assert losses(resumed) != losses(records)[3:]


def test_a_finding_is_of_the_state_that_the_step_began_with(tmp_path):
    """Begun with zeros the second step is finite; where the first has ended it is not."""
    x = np.ones((8, 2, 1), np.float32)
    table = write_table(tmp_path / "t", {"x": x, "y": np.zeros((8, 1), np.float32)}, _ALL)
    args = {"hidden_size": 1, "batch_first": True, "nonlinearity": "relu", "bias": False}
    filled = {"weight_hh_l0": 1e12, "weight_ih_l0": 1.0}
    init = {name: {"type": "constant_", "args": {"val": val}} for name, val in filled.items()}
    growing = job(
        "RNN",
        layer={"args": args, "init": init},
        data={"train": {"dataset": "ds_1"}, "batch_size": 2},
        guards={"nonfinite": {"check": ["loss"]}},
        stop={"steps": 3},
    )
    growing["optimizer"]["args"]["lr"] = 0.0
    found = of_type(run(tmp_path / "job", growing, table), "finding")
    assert [(item["step"], item["layer"]) for item in found] == [(1, "loss")]


_ALL = {"all": slice(None)}


def test_inference_takes_each_row_alone(long, tmp_path):
    records = run(tmp_path / "train", job(stop={"epochs": 1}), long)
    checkpoint = tmp_path / "train" / of_type(records, "checkpoint")[-1]["dir"]
    asked = {
        "kind": "infer", "checkpoint": "ckpt_1", "outputs": ["fc"],
        "data": {"dataset": "ds_1", "split": "train", "batch_size": 4},
    }  # fmt: skip
    trained_by = planned(job(stop={"epochs": 1}), meta_of(long))["spec"]
    run(tmp_path / "infer", asked, long, trained_by=trained_by, checkpoint={"dir": str(checkpoint)})
    assert read_frames(tmp_path / "infer" / "spool", 0, 10**6)[0]
    found = load_file(tmp_path / "infer" / "artifacts" / "outputs.safetensors")["fc/value"]
    _, (rnn, fc) = by_hand("LSTM", long, 1)
    with torch.no_grad():
        x = torch.from_numpy(np.load(long / "train" / "0.npy"))
        assert torch.allclose(found, fc(rnn(x)[0][:, -1]), atol=1e-5)


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "shuffled": ({"data": {"shuffle": {}}}, "/data/shuffle/enabled", "set data.shuffle.enabled"),
    "a fraction": (
        {"data": {"train": {"dataset": "ds_1", "split": "train", "fraction": [0, 0.5]}}},
        "/data/train/fraction",
        "an order of its own",
    ),
    "skipped steps": (
        {"guards": {"nonfinite": {"action": "skip_step"}}},
        "/guards/nonfinite/action",
        "warn or fail",
    ),
    "both directions": (
        {"layer": {"args": {"hidden_size": 5, "batch_first": True, "bidirectional": True}}},
        "/network/layers/0/stateful",
        "from behind",
    ),
    "no recurrent layer": (
        {"layer": {"type": "Linear", "args": {"out_features": 5}}},
        "/network/layers/0/stateful",
        "no state",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_continue_is_refused_in_its_place(long, case):
    changes, pointer, part = WRONG[case]
    found = errors(job(**changes), meta_of(long))
    assert pointer in found, found
    assert part in found[pointer]


def test_a_layer_with_a_state_of_its_own_or_called_twice_is_refused(long):
    twice = job()
    again = {"name": "again", "shared_with": "rnn", "inputs": ["x"]}
    twice["network"]["layers"].append(again)
    assert "called more than once" in errors(twice, meta_of(long))["/network/layers/0/stateful"]
    given = job()
    first = {"name": "first", "type": "LSTM", "inputs": ["x"]}
    first["args"] = given["network"]["layers"][0]["args"]
    given["network"]["layers"].insert(0, first)
    given["network"]["layers"][1]["inputs"] = ["x", "first.1.0", "first.1.1"]
    assert "begins with" in errors(given, meta_of(long))["/network/layers/1/stateful"]


def test_a_layer_that_is_not_stateful_is_written_without_it(long):
    written = planned(job(), meta_of(long))["spec"]["network"]["layers"]
    assert [layer.get("stateful") for layer in written] == [True, None, None]
