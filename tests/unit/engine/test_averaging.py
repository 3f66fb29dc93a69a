"""Averaged weights: those of torch's AveragedModel, and of PaddlePaddle's sums by hand."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.unit.engine.runs import cnn, errors, losses, of_type, planned, run, spec

NAMES = {"0": "conv1", "5": "fc"}
JUDGED = {
    "data": {**spec()["data"], "validation": {"dataset": "ds_1", "split": "test"}},
    "evaluate": {"every_steps": 3},
}


def by_hand(table: Any, take: Callable[[int, nn.Module], None], num_steps: int) -> nn.Module:
    """Plain torch; ``take`` sees the network after each update."""
    images = torch.from_numpy(np.load(table / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(table / "train" / "1.npy"))
    torch.manual_seed(3)
    network = cnn()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    step = 0
    for epoch in range(20):
        generator = torch.Generator().manual_seed(3 * 1_000_003 + epoch)
        for rows in torch.randperm(300, generator=generator).split(64):
            if step == num_steps:
                return network
            loss = nn.functional.cross_entropy(network(images[rows].float() / 255), labels[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            take(step, network)
            step += 1
    return network


def named(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{NAMES[key[0]]}{key[1:]}": value for key, value in state.items()}


def weights(directory: Any, step: int, part: str = "model") -> dict[str, torch.Tensor]:
    return load_file(directory / f"checkpoints/step-{step}/{part}.safetensors")


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, item in wanted.items():
        torch.testing.assert_close(found[name], item, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("average", "rule"),
    [
        ({"type": "ema", "decay": 0.8}, get_ema_multi_avg_fn(0.8)),
        ({"type": "swa", "start_step": 4, "every_steps": 3}, None),
    ],
)
def test_the_averages_are_those_of_torch(average, rule, digits, tmp_path):
    run(tmp_path, spec(average=average, stop={"steps": 23}), digits)
    made: list[AveragedModel] = []
    start, every = average.get("start_step", 0), average.get("every_steps", 1)

    def take(step: int, network: nn.Module) -> None:
        if not made:
            made.append(AveragedModel(network, multi_avg_fn=rule))
        if step >= start and (step - start) % every == 0:
            made[0].update_parameters(network)

    network = by_hand(digits, take, 23)
    averaged = {k.removeprefix("module."): v for k, v in made[0].state_dict().items()}
    del averaged["n_averaged"]
    close(weights(tmp_path, 23), named(averaged))
    close(weights(tmp_path, 23, "newest"), named(network.state_dict()))


def test_a_window_is_that_of_the_sums(digits, tmp_path):
    """Windows of four: the mean of the newer sum and of the last full one."""
    window = {
        "type": "window",
        "average_window_rate": 1.0,
        "min_average_window": 4,
        "max_average_window": 4,
    }
    run(tmp_path, spec(average=window, stop={"steps": 10}), digits)
    seen: list[dict[str, torch.Tensor]] = []

    def take(step: int, network: nn.Module) -> None:
        seen.append({k: v.clone() for k, v in network.state_dict().items()})

    by_hand(digits, take, 10)
    last = seen[4:]  # steps 4 to 7 are the last full window; 8 and 9 are new
    mean = {k: torch.stack([item[k] for item in last]).mean(0) for k in last[0]}
    close(weights(tmp_path, 10), named(mean))


def test_evaluations_judge_the_averages_and_training_does_not_know(digits, tmp_path):
    ema = {"type": "ema", "decay": 0.9}
    watched = {"layers": ["fc.weight"], "kinds": ["param"], "every": 1}
    job = spec(**JUDGED, stop={"steps": 9}, probes=[watched])
    averaged = run(tmp_path / "a", job | {"average": ema}, digits)
    plain = run(tmp_path / "b", job, digits)
    assert losses(averaged) == losses(plain)
    params = [
        [row for r in of_type(records, "stats") for row in r["rows"]]
        for records in (averaged, plain)
    ]
    assert params[0] == params[1]
    made: list[AveragedModel] = []
    expected: dict[int, float] = {}
    images = torch.from_numpy(np.load(digits / "test" / "0.npy")).float() / 255
    labels = torch.from_numpy(np.load(digits / "test" / "1.npy"))

    def take(step: int, network: nn.Module) -> None:
        if not made:
            made.append(AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        made[0].update_parameters(network)
        with torch.no_grad():
            scores = made[0].eval()(images)
        expected[step] = nn.functional.cross_entropy(scores, labels).item()

    by_hand(digits, take, 9)
    found = {
        r["step"]: r["values"]["validation/loss"]
        for r in of_type(averaged, "metrics")
        if "validation/loss" in r["values"]
    }
    assert found == pytest.approx({step: expected[step] for step in (2, 5, 8)}, rel=1e-5)


def test_before_the_first_average_the_newest_weights_count(digits, tmp_path):
    late = {"type": "swa", "start_step": 100}
    job = spec(**JUDGED, stop={"steps": 6})
    averaged = run(tmp_path / "a", job | {"average": late}, digits)
    plain = run(tmp_path / "b", job, digits)
    judged = [
        [r["values"] for r in of_type(records, "metrics") if "validation/loss" in r["values"]]
        for records in (averaged, plain)
    ]
    assert judged[0] == judged[1]
    close(weights(tmp_path / "a", 6), weights(tmp_path / "b", 6))


def test_running_statistics_are_averaged_and_counts_are_not(digits, tmp_path):
    norm = {"name": "norm", "type": "BatchNorm2d"}
    layers = [*spec()["network"]["layers"][:1], norm, *spec()["network"]["layers"][1:]]
    ema = {"type": "ema", "decay": 0.5}
    run(tmp_path, spec(network={"layers": layers}, average=ema, stop={"steps": 4}), digits)
    averaged, newest = weights(tmp_path, 4), weights(tmp_path, 4, "newest")
    assert averaged["norm.num_batches_tracked"] == newest["norm.num_batches_tracked"] == 4
    assert not torch.equal(averaged["norm.running_var"], newest["norm.running_var"])


def test_what_continues_takes_the_averages_along_or_leaves_them(digits, tmp_path):
    """``init.load`` all: from a run with averages, to one with, without, and with others."""
    ema = {"type": "ema", "decay": 0.8}
    job = spec(average=ema, checkpoint={"every_steps": 1})
    whole = run(tmp_path / "whole", job, digits)
    there = {"dir": str(tmp_path / "whole/checkpoints/step-4")}
    init = {"checkpoint": "ckpt_x", "load": "all"}
    plain = spec(init=init)
    more = {"checkpoint": there, "trained_by": planned(spec())["spec"]}
    same = run(tmp_path / "same", job | {"init": init}, digits, **more)
    assert losses(same) == losses(whole)[4:]
    close(weights(tmp_path / "same", 10), weights(tmp_path / "whole", 10))
    none = run(tmp_path / "none", plain, digits, **more)
    assert losses(none) == losses(whole)[4:]
    close(weights(tmp_path / "none", 10), weights(tmp_path / "whole", 10, "newest"))
    swa = run(tmp_path / "swa", plain | {"average": {"type": "swa"}}, digits, **more)
    assert losses(swa) == losses(whole)[4:]
    state = json.loads((tmp_path / "swa/checkpoints/step-10/state.json").read_text())
    assert state["parts"]["averages"] == {"type": "swa", "count": 6}


@pytest.mark.parametrize(
    ("average", "words"),
    [
        ({"type": "swa", "decay": 0.9}, "decay (0.9) applies to ema only"),
        ({"type": "ema", "decay": 1.0}, "less than 1"),
        ({"type": "ema", "max_average_window": 5}, "applies to window only"),
        (
            {"type": "window", "max_average_window": 5},
            "(10000) is greater than max_average_window (5)",
        ),
        ({"type": "mean"}, "ema"),
    ],
)
def test_an_invalid_average_is_refused(average, words):
    assert words in " ".join(errors(spec(average=average)).values())
