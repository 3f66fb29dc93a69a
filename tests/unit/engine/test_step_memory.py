"""What a step holds at once: counted without data, it is what the same step holds with data."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.losses import Losses, loss_of
from engine.network import Network
from engine.step_memory import LiveBytes, step_peak
from glasshouse.spec import TrainJob, parse_job
from tests.unit.engine.making import CNN, planned, spec

FLOAT = 4


def test_bytes_count_from_their_making_until_nobody_holds_them():
    with LiveBytes() as live:
        x = torch.ones(1000)
        y = x * 2  # two at once
        view = y[10:].reshape(-1)  # no memory of its own
        assert live.now == 2 * 1000 * FLOAT
        del y
        assert live.now == 2 * 1000 * FLOAT
        del view
        assert live.now == 1000 * FLOAT
        x += 1
        z = torch.cat([x, x])
        del x
    assert live.now == 2 * 1000 * FLOAT
    assert live.peak == 3 * 1000 * FLOAT
    del z
    assert live.now == 0


def batch_of(job: TrainJob, size: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(size, 1, 8, 8, generator=generator).to(device)
    return {"image": image.clone(), "label": torch.zeros(size, dtype=torch.int64, device=device)}


def resolved(**more: Any) -> TrainJob:
    job = parse_job(json.dumps(planned(spec(**more))["spec"]))
    assert isinstance(job, TrainJob)
    return job


NORMED = [*CNN[:1], {"name": "norm", "type": "BatchNorm2d"}, *CNN[1:]]
ATTENDING = [
    {"name": "rows", "type": "reshape", "args": {"shape": [-1, 8, 8]}, "inputs": ["image"]},
    {
        "name": "block",
        "type": "TransformerEncoderLayer",
        "args": {"nhead": 2, "dim_feedforward": 64, "batch_first": True},
    },
    {"name": "pooled", "type": "mean", "args": {"dim": 1}},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]


@pytest.mark.parametrize("layers", [CNN, NORMED, ATTENDING], ids=["cnn", "norm", "transformer"])
def test_a_step_without_data_needs_what_one_with_data_does(layers):
    job = resolved(network={"layers": layers}, optimizer={"type": "SGD", "args": {"lr": 0.1}})
    counted = step_peak(job, ("fc",), lambda: batch_of(job, 64, "meta"))
    torch.backends.mha.set_fastpath_enabled(False)
    network, loss_fn = Network(job.network, ("fc",)), Losses.of(job)
    live = LiveBytes()
    with live:
        batch = batch_of(job, 64, "cpu")
        loss = loss_of(loss_fn, network(batch), job.loss_inputs)
        del batch
        loss.backward()
        del loss
    assert counted == pytest.approx(live.peak, rel=0.02)
    assert live.now == sum(item.numel() * FLOAT for item in network.parameters())  # the gradients


def test_twice_the_rows_take_twice_the_activations():
    job = resolved()
    few, many = (step_peak(job, ("fc",), lambda n=n: batch_of(job, n, "meta")) for n in (64, 128))
    assert few is not None
    assert many is not None
    assert many == pytest.approx(2 * few, rel=0.05)


def test_an_optimizer_that_holds_much_for_a_moment_counts():
    wide = [
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 2000}},
    ]
    sgd, adam = (
        step_peak(job, ("fc",), lambda job=job: batch_of(job, 2, "meta"))
        for job in (
            resolved(network={"layers": wide}, optimizer={"type": name, "args": {"lr": 0.1}})
            for name in ("SGD", "Adam")
        )
    )
    assert sgd is not None
    assert adam is not None
    weights = 65 * 2000 * FLOAT
    assert adam - sgd >= 0.9 * weights  # the square roots of what it keeps


def test_a_layer_that_cannot_run_without_data_is_none():
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "nothing", "type": "Linear", "args": {"in_features": 64, "out_features": 10}},
    ]
    job = resolved(
        network={"layers": layers},
        loss={"type": "CrossEntropyLoss", "inputs": ["nothing", "label"]},
    )
    assert step_peak(job, ("nothing",), lambda: {"image": torch.zeros(3)}) is None
