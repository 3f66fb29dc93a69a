"""A network for inference: equal to the network in evaluation, with less work around the layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.network.network import Network
from glasshouse.spec import Graph, Layer


def network(*layers: dict[str, Any], wanted: tuple[str, ...]) -> Network:
    torch.manual_seed(3)
    return Network(Graph(layers=tuple(Layer(**layer) for layer in layers)), wanted).eval()


def names(network: Network) -> list[str]:
    return [step.name for step in network.plans[0]]


DROPPING = (
    {
        "name": "a",
        "type": "Linear",
        "args": {"in_features": 4, "out_features": 4},
        "inputs": ("x",),
    },
    {"name": "drop", "type": "Dropout", "args": {"p": 0.5}, "inputs": ("a",)},
    {"name": "again", "type": "Dropout", "args": {"p": 0.5}, "inputs": ("drop",)},
    {"name": "relu", "type": "ReLU", "inputs": ("again",)},
    {"name": "sum", "type": "add", "inputs": ("drop", "relu")},
)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (("sum",), ["a", "relu", "sum"]),
        (("drop", "sum"), ["a", "drop", "relu", "sum"]),
        (("again",), ["a", "again"]),
        (("a", "relu"), ["a", "relu"]),
    ],
)
def test_dropout_runs_only_if_its_output_is_wanted(wanted: tuple[str, ...], expected: list[str]):
    whole = network(*DROPPING, wanted=("a", "drop", "again", "relu", "sum"))
    view, batch = whole.with_outputs(wanted), {"x": torch.randn(3, 4)}
    assert names(view) == expected
    found, every = view(batch), whole(batch)
    assert {*found} == {"x", *wanted}
    assert all(torch.equal(found[name], every[name]) for name in wanted)


STEPS = (
    {"name": "embedding", "type": "Embedding", "inputs": ("text",)}
    | {"args": {"num_embeddings": 9, "embedding_dim": 4}},
    {"name": "drop", "type": "Dropout", "inputs": ("embedding",)},
    {"name": "attention", "type": "DotProductAttention", "inputs": ("drop",) * 3}
    | {"args": {"num_heads": 2}, "lengths": "text.lengths"},
    {"name": "average", "type": "SequencePool", "args": {"mode": "average"}}
    | {"inputs": ("attention",), "lengths": "text.lengths"},
    {"name": "last", "type": "SequencePool", "args": {"mode": "last"}}
    | {"inputs": ("attention",), "lengths": "text.lengths"},
)


@pytest.mark.parametrize("lengths", [[5, 5], [5, 2], [5, 0]])
def test_padded_rows_are_equal_bit_for_bit(lengths: list[int]):
    whole = network(*STEPS, wanted=("attention", "average", "last"))
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 1, 2]])
    batch = {"text": ids, "text.lengths": torch.tensor(lengths)}
    every = whole(batch)
    found = whole.with_outputs(("attention", "average", "last"))(batch)
    assert all(torch.equal(found[name], every[name]) for name in ("attention", "average", "last"))
    alone = {"text": ids[1:, : lengths[1]], "text.lengths": torch.tensor(lengths[1:])}
    if lengths[1]:
        one = whole.with_outputs(("average",))(alone)["average"]
        torch.testing.assert_close(one, every["average"][1:])


@pytest.mark.parametrize("mode", ["sum", "average", "max", "sqrt_n", "first", "last"])
def test_rows_without_padding_are_pooled_as_those_beside_a_longer_one(mode: str):
    pool = network(
        {"name": "pool", "type": "SequencePool", "args": {"mode": mode}, "inputs": ("x",)}
        | {"lengths": "n"},
        wanted=("pool",),
    )
    x = torch.randn(2, 7, 3)
    equal = pool({"x": x, "n": torch.tensor([7, 7])})["pool"]
    beside = torch.cat([x, torch.zeros(2, 2, 3)], 1)
    mixed = pool({"x": torch.cat([beside, torch.randn(1, 9, 3)]), "n": torch.tensor([7, 7, 9])})
    torch.testing.assert_close(equal, mixed["pool"][:2])
    rows = [getattr(row, "amax" if mode == "max" else "sum")(0) for row in x]
    by_hand = {
        "sum": rows,
        "max": rows,
        "average": [row / 7 for row in rows],
        "sqrt_n": [row / 7**0.5 for row in rows],
        "first": [row[0] for row in x],
        "last": [row[6] for row in x],
    }[mode]
    torch.testing.assert_close(equal, torch.stack(by_hand))


def test_layers_with_several_inputs_and_outputs():
    layers = (
        {"name": "lstm", "type": "LSTM", "inputs": ("x", "h", "c")}
        | {"args": {"input_size": 3, "hidden_size": 2, "batch_first": True}},
        {"name": "both", "type": "Bilinear", "inputs": ("h", "c")}
        | {"args": {"in1_features": 2, "in2_features": 2, "out_features": 3}},
    )
    whole = network(*layers, wanted=("lstm", "lstm.1.0", "both"))
    batch = {
        "x": torch.randn(1, 4, 3),
        "h": torch.randn(1, 1, 2),
        "c": torch.randn(1, 1, 2),
    }
    expected, _ = whole.layers["lstm"](batch["x"], (batch["h"], batch["c"]))
    found = whole.with_outputs(("lstm", "both"))(batch)
    assert torch.equal(found["lstm"], expected)
    assert torch.equal(found["both"], whole.layers["both"](batch["h"], batch["c"]))


def test_hooks_of_a_module_run_if_they_were_there_before():
    whole = network(*DROPPING, wanted=("sum",))
    seen: list[Tensor] = []

    def keep(_module: nn.Module, _given: Any, output: Tensor) -> None:
        seen.append(output)

    whole.layers["relu"].register_forward_hook(keep)
    found = whole.with_outputs(("relu",))({"x": torch.randn(2, 4)})
    assert len(seen) == 1
    assert torch.equal(seen[0], found["relu"])
