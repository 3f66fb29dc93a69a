"""What a step holds at once: counted without data, it is what the same step holds with data."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.precision import chosen
from engine.losses.losses import Losses, loss_of
from engine.network.network import Network
from engine.plan import step_memory
from engine.plan.step_memory import LiveBytes, step_peak
from glasshouse.spec import TrainJob, parse_job
from tests.unit.engine.runs import CNN, planned, spec

FLOAT = 4


def test_bytes_count_from_allocation_until_the_last_reference_is_gone():
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


RECURRENT = [
    {"name": "rows", "type": "reshape", "args": {"shape": [-1, 8, 8]}, "inputs": ["image"]},
    {"name": "lstm", "type": "LSTM", "args": {"hidden_size": 200, "batch_first": True}},
    {"name": "pooled", "type": "mean", "args": {"dim": 1}},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
NETWORKS = {"cnn": CNN, "norm": NORMED, "transformer": ATTENDING, "lstm": RECURRENT}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_step_without_data_needs_what_one_with_data_does(kind, precision):
    job = resolved(
        network={"layers": NETWORKS[kind]},
        optimizer={"type": "SGD", "args": {"lr": 0.1}},
        precision=precision,
    )
    counted = step_peak(job, ("fc",), lambda: batch_of(job, 64, "meta"))
    torch.backends.mha.set_fastpath_enabled(False)
    network, loss_fn = Network(job.network, ("fc",)), Losses.of(job)
    network.low_precision = chosen(job.precision, torch.device("cpu"))
    live = LiveBytes()
    with live:
        batch = batch_of(job, 64, "cpu")
        loss = loss_of(loss_fn, network(batch)).total
        del batch
        loss.backward()
        del loss
    assert counted == pytest.approx(live.peak, rel=0.07 if kind == "lstm" else 0.02)
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


def test_the_same_step_is_counted_once(monkeypatch):
    counted: list[str] = []
    plain = step_memory._counted

    def counting(job: TrainJob, *rest: Any) -> int:
        counted.append(f"{job.precision} {rest[-1]}")
        return plain(job, *rest)

    job = resolved(optimizer={"type": "SGD", "args": {"lr": 0.123}})
    monkeypatch.setattr(step_memory, "_counted", counting)
    named = job.model_copy(update={"name": "another", "seed": 8})
    first = step_peak(job, ("fc",), lambda: batch_of(job, 31, "meta"))
    assert step_peak(named, ("fc",), lambda: batch_of(job, 31, "meta")) == first
    assert counted == ["float32 cpu"]
    low = job.model_copy(update={"precision": "bfloat16"})
    for other, size in ((job, 32), (low, 31)):
        step_peak(other, ("fc",), lambda size=size: batch_of(job, size, "meta"))
    assert counted == ["float32 cpu", "float32 cpu", "bfloat16 cpu"]


def test_gradients_of_sparse_layers_are_of_the_rows_that_are_read():
    fields = {
        "ids": {"type": "integer_sequence", "column": "image", "dim": 100_000},
        "label": {"type": "integer", "dim": 10},
    }
    meta = {
        "columns": [
            {"name": "image", "dtype": "int32", "shape": [4], "file": "0.npy"},
            {"name": "label", "dtype": "int64", "shape": [], "file": "1.npy"},
        ],
        "splits": {"train": 300},
    }

    def heads(*, sparse: bool) -> dict[str, int]:
        bag = {"embedding_dim": 8, "mode": "sum", "sparse": sparse}
        layers = [
            {"name": "bag", "type": "EmbeddingBag", "args": bag, "inputs": ["ids"]},
            {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
        ]
        made = spec(
            network={"layers": layers},
            optimizer={"type": "SGD", "args": {"lr": 0.1}},
            data={"fields": fields},
        )
        return planned(made, meta)["memory"]

    dense, sparse = heads(sparse=False), heads(sparse=True)
    assert dense["gradients_bytes"] - sparse["gradients_bytes"] == 100_000 * 8 * FLOAT
    assert sparse["gradients_bytes"] == (8 * 10 + 10) * FLOAT
    assert sparse["checkpoint_bytes"] == sparse["parameters_bytes"]


def test_a_layer_that_cannot_run_without_data_is_not_measured():
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "nothing", "type": "Linear", "args": {"in_features": 64, "out_features": 10}},
    ]
    job = resolved(
        network={"layers": layers},
        loss={"type": "CrossEntropyLoss", "inputs": ["nothing", "label"]},
    )
    assert step_peak(job, ("nothing",), lambda: {"image": torch.zeros(3)}) is None


DEEP = [
    {"name": "flat", "type": "Flatten", "inputs": ["image"]},
    *(
        {"name": f"fc{place}", "type": "Linear", "args": {"out_features": 8 + 7 * (place % 5)}}
        for place in range(30)
    ),
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ["Adam", "SGD", "RMSprop"])
@pytest.mark.long
def test_the_update_of_the_largest_parameters_needs_what_that_of_all_does(
    monkeypatch: pytest.MonkeyPatch, kind: str, foreach: bool
):
    """One is updated after the other; with ``foreach`` all at once, and then all are counted.

    What was made for the one before is held until the next has its own. Of the largest the one
    before is as large, so that they may need more than all do in their order: one parameter more.
    """
    args = {"lr": 0.1, "foreach": foreach} | ({"momentum": 0.9} if kind == "SGD" else {})
    job = resolved(network={"layers": DEEP}, optimizer={"type": kind, "args": args})

    def peak() -> int | None:
        step_memory._known_peak.cache_clear()
        return step_peak(job, ["fc"], lambda: batch_of(job, 4, "meta"))

    counted = peak()
    monkeypatch.setattr(step_memory, "_UPDATED", 10**6)
    of_all = peak()
    assert counted is not None
    assert of_all is not None
    assert 0 <= counted - of_all <= (0 if foreach else 36 * 29 * FLOAT)
