import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine.core.spool import read_frames
from engine.data.batches.rows import shuffled
from engine.data.sources.joined import source_rows
from engine.process.rank import Assignment
from engine.process.rank import run as run_assignment
from engine.training.report import Outputs
from tests.unit.engine.runs import (
    by_hand,
    errors,
    losses,
    of_type,
    planned,
    run,
    spec,
    write_job,
    write_table,
)

EVERYTHING = [
    {
        "layers": ["*"],
        "kinds": ["output", "output_grad", "param", "param_grad"],
        "every": 1,
        "want": ["stats", "full"],
    }
]


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _final_weights(directory: Path, records: list) -> dict:
    return load_file(directory / of_type(records, "checkpoint")[-1]["dir"] / "model.safetensors")


@pytest.mark.parametrize("probes", [[], EVERYTHING], ids=["unwatched", "watched"])
def test_losses_and_weights_equal_a_hand_written_loop_bit_for_bit(digits, tmp_path, probes):
    records = run(tmp_path, spec(probes=probes), digits)
    expected, weights = by_hand(digits, _sgd)
    assert losses(records) == expected
    found = _final_weights(tmp_path, records)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_evaluating_and_saving_change_no_number(digits, tmp_path):
    data = {"validation": {"dataset": "ds_1", "split": "test"}}
    job = spec(data=data, evaluate={"every_steps": 2}, checkpoint={"every_steps": 3})
    records = run(tmp_path, job, digits)
    assert losses(records) == by_hand(digits, _sgd)[0]


def test_sparse_adam_trains_what_has_sparse_gradients_only(tmp_path):
    columns = {"word": np.arange(40) % 7, "y": np.arange(40) % 3}
    table = write_table(tmp_path / "data", columns, {"all": slice(None)})
    args = {"embedding_dim": 3, "sparse": True}
    fields = {"word": {"type": "integer", "dim": 7}, "y": {"type": "integer", "dim": 3}}
    job = spec(
        network={"layers": [{"name": "emb", "type": "Embedding", "args": args}]},
        loss={"type": "CrossEntropyLoss", "inputs": ["emb", "y"]},
        optimizer={"type": "SparseAdam"},
        data={"train": {"dataset": "ds_1"}, "fields": fields, "batch_size": 10},
        probes=[{"layers": ["emb"], "kinds": ["param_grad"], "every": 1}],
    )
    records = run(tmp_path / "job", job, table)
    assert len(losses(records)) == 8
    meta = json.loads((table / "meta.json").read_text())
    adam = errors({**job, "optimizer": {"type": "Adam"}}, meta)
    assert "sparse" in adam["/optimizer"]


def test_steps_epochs_and_positions_are_counted_from_zero(digits, tmp_path):
    records = run(tmp_path, spec(checkpoint={"every_steps": 4}), digits)
    metrics = [item for item in of_type(records, "metrics") if "loss" in item["values"]]
    assert [item["step"] for item in metrics] == list(range(10))
    assert [item["epoch"] for item in metrics] == [0] * 5 + [1] * 5
    saved = of_type(records, "checkpoint")
    assert [(item["step"], item["final"]) for item in saved] == [(4, False), (8, False), (10, True)]
    assert of_type(records, "progress")[-1]["num_steps"] == 10


def test_drop_last_leaves_out_the_smaller_batch(digits, tmp_path):
    records = run(tmp_path, spec(data={"drop_last": True}), digits)
    assert len(losses(records)) == 2 * (300 // 64)


def test_training_for_seconds_ends_by_itself(digits, tmp_path):
    records = run(tmp_path, spec(stop={"seconds": 0.05}), digits)
    assert of_type(records, "checkpoint")[-1]["step"] == len(losses(records)) > 0


def test_accuracy_counts_rows_over_the_whole_evaluation(digits, tmp_path):
    data = {"validation": {"dataset": "ds_1", "split": "test"}}
    metrics = [
        {"type": "accuracy", "inputs": ["fc", "label"]},
        {"type": "accuracy", "inputs": ["fc", "label"], "top_k": 3},
    ]
    job = spec(data=data, evaluate={"every_epochs": 1}, metrics=metrics)
    records = run(tmp_path, job, digits)
    weights = _final_weights(tmp_path, records)
    network = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    network.append(nn.Linear(54, 10))
    network[0].load_state_dict({k: weights[f"conv1.{k}"] for k in ("weight", "bias")})
    network[4].load_state_dict({k: weights[f"fc.{k}"] for k in ("weight", "bias")})
    images = torch.from_numpy(np.load(digits / "test" / "0.npy")).float() / 255
    labels = torch.from_numpy(np.load(digits / "test" / "1.npy"))
    with torch.no_grad():
        scores = network(images)
    right = (scores.argmax(1) == labels).sum().item()
    right3 = (scores.topk(3).indices == labels[:, None]).any(1).sum().item()
    evaluations = [r for r in of_type(records, "metrics") if "validation/loss" in r["values"]]
    assert [item["step"] for item in evaluations] == [4, 9]
    last = evaluations[-1]["values"]
    assert last["validation/accuracy"] == right / 97
    assert last["validation/accuracy_top3"] == right3 / 97
    loss = nn.functional.cross_entropy(scores, labels).item()
    assert last["validation/loss"] == pytest.approx(loss, rel=1e-5)


def test_a_loss_that_becomes_nan_is_data_and_training_continues(digits, tmp_path):
    job = spec(optimizer={"type": "SGD", "args": {"lr": 1e30}}, stop={"steps": 6})
    records = run(tmp_path, job, digits)
    assert "NaN" in losses(records)
    assert len(losses(records)) == 6


class CancelAfter:
    """A control that asks for the end once a number of steps were reported."""

    wanted = None
    listen = None
    threads = None
    ends_as = "cancelled"
    orders = ()

    def __init__(self, num_steps: int) -> None:
        self.seen: list = []
        self.num_steps = num_steps

    @property
    def cancel_requested(self) -> bool:
        return len(losses(self.seen)) >= self.num_steps


def test_cancelling_ends_at_the_step_boundary_with_a_checkpoint(digits, tmp_path):
    resolved = planned(spec())["spec"]
    job = Assignment.read(write_job(tmp_path, resolved, digits) / "job.json")
    control = CancelAfter(3)
    out = Outputs(tmp_path, control.seen.append)
    assert run_assignment(job, control=control, out=out).state == "cancelled"
    assert len(losses(control.seen)) == 3
    assert of_type(control.seen, "checkpoint")[-1]["step"] == 3


def _failed(directory: Path) -> dict:
    records, _ = read_frames(directory / "spool", 0, 10**6)
    assert records[-1]["state"] == "failed"
    return records[-1]["error"]


def test_a_label_out_of_range_is_named_by_row_split_column_and_value(digits, tmp_path, capfd):
    from engine.process import rank

    images = np.load(digits / "train" / "0.npy")
    labels = np.load(digits / "train" / "1.npy").copy()
    labels[123] = 17
    columns = {"image": images, "label": labels}
    table = write_table(tmp_path / "data", columns, {"train": slice(0, 300), "test": slice(0, 97)})
    job = write_job(tmp_path / "job", planned(spec())["spec"], table)
    assert rank.main(job) == 0
    error = _failed(job)
    assert error["code"] == "data_failed"
    for part in ("row 123", "'train'", "'label'", "17", "[0, 10)"):
        assert part in error["message"]
    log = capfd.readouterr().err
    assert error["message"] in log
    assert "Traceback" not in log  # what failed is named; where in our code is no help


def test_a_layer_that_fails_while_training_is_named_with_its_step(digits, tmp_path, capfd):
    from engine.process import rank

    resolved = planned(spec())["spec"]
    resolved["network"]["layers"][5]["args"]["in_features"] = 55  # as no planner would allow
    job = write_job(tmp_path, resolved, digits)
    assert rank.main(job) == 0
    error = _failed(job)
    assert (error["code"], error["layer"], error["step"]) == ("spec_failed", "fc", 0)
    capfd.readouterr()


def test_too_large_a_layer_fails_as_out_of_memory(digits, tmp_path, capfd):
    from engine.process import rank

    resolved = planned(spec())["spec"]
    resolved["network"]["layers"][5]["args"]["out_features"] = 10**13
    job = write_job(tmp_path, resolved, digits)
    assert rank.main(job) == 0
    assert _failed(job)["code"] == "out_of_memory"
    capfd.readouterr()


def test_fractions_of_a_split_share_no_row_and_miss_none():
    rows = [source_rows(101, part, 5) for part in ((0, 0.3), (0.3, 0.8), (0.8, 1))]
    joined = torch.cat([item for item in rows if item is not None])
    assert sorted(joined.tolist()) == list(range(101))
    assert all(torch.equal(item, item.sort().values) for item in rows if item is not None)


def test_the_order_of_an_epoch_depends_on_seed_and_epoch_alone():
    assert torch.equal(shuffled(50, 1, 2), shuffled(50, 1, 2))
    assert not torch.equal(shuffled(50, 1, 2), shuffled(50, 1, 3))
    assert sorted(shuffled(50, 2**53, 10**6).tolist()) == list(range(50))
