"""Each kind of tensor, on networks of several sorts, against autograd by hand: equal bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.engine.runs import captured, losses, of_type, run, spec

KINDS = ["output", "input", "output_grad", "param", "param_grad", "update", "optim_state"]
NUM_STEPS = 3


def layer(name: str, kind: str, inputs: list[str] | None = None, **args: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, "type": kind, "args": args}
    return made if inputs is None else {**made, "inputs": inputs}


class Hand:
    """A forward pass by hand: what goes into and comes out of each call, and the gradients."""

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}

    def __call__(self, name: str, function: Any, *inputs: Tensor) -> Any:
        names = [name] if len(inputs) == 1 else [f"{name}.{n}" for n in range(len(inputs))]
        self.inputs |= {n: item.detach().clone() for n, item in zip(names, inputs, strict=True)}
        output = function(*inputs)
        if isinstance(output, Tensor):
            self.keep(name, output)
        return output

    def keep(self, name: str, output: Tensor) -> None:
        if output.requires_grad:
            output.retain_grad()
        self.outputs[name] = output


def cnn_layers():
    return [
        layer("conv1", "Conv2d", out_channels=6, kernel_size=3),
        layer("relu1", "ReLU", inplace=True),
        layer("pool1", "MaxPool2d", kernel_size=2),
        layer("flat", "Flatten"),
        layer("relu2", "ReLU", inplace=True),  # overwrites the pool's output through a view
        layer("drop", "Dropout", p=0.25),
        layer("fc", "Linear", out_features=10),
    ]


def cnn_forward(net: dict[str, nn.Module], image: Tensor, at: Hand) -> Tensor:
    x = at("relu1", F.relu, at("conv1", net["conv1"], image))
    x = at("flat", nn.Flatten(), at("pool1", nn.MaxPool2d(2), x))
    return at("fc", net["fc"], at("drop", nn.Dropout(0.25), at("relu2", F.relu, x)))


def lstm_layers():
    return [
        layer("rows", "reshape", ["image"], shape=[-1, 8, 8]),
        layer("lstm", "LSTM", hidden_size=12, batch_first=True),
        layer("last", "select", ["lstm.0"], dim=1, index=-1),
        layer("both", "add", ["last", "half"]),
        layer("fc", "Linear", out_features=10),
    ]


def with_half(layers):
    return [*layers[:3], layer("half", "select", ["lstm.1.1"], dim=0, index=0), *layers[3:]]


def lstm_forward(net: dict[str, nn.Module], image: Tensor, at: Hand) -> Tensor:
    x = at("rows", lambda item: item.reshape(-1, 8, 8), image)
    output, (h, c) = at("lstm", net["lstm"], x)
    for name, item in {"lstm.0": output, "lstm.1.0": h, "lstm.1.1": c}.items():
        at.keep(name, item)
    last = at("last", lambda item: item.select(1, -1), output)
    half = at("half", lambda item: item.select(0, 0), c)
    return at("fc", net["fc"], at("both", torch.add, last, half))


def transformer_layers():
    return [
        layer("rows", "reshape", ["image"], shape=[-1, 8, 8]),
        layer("wide", "Linear", out_features=16),
        layer("act", "ReLU", inplace=True),  # a Linear over sequences gives a view
        layer("block0", "TransformerEncoderLayer", nhead=2, dim_feedforward=24, batch_first=True),
        layer("pooled", "mean", dim=1),
        layer("fc", "Linear", out_features=10),
    ]


def transformer_forward(net: dict[str, nn.Module], image: Tensor, at: Hand) -> Tensor:
    x = at("rows", lambda item: item.reshape(-1, 8, 8), image)
    x = at("act", F.relu, at("wide", net["wide"], x))
    x = at("block0", lambda item: by_hand_block(net["block0"], item, at), x)
    return at("fc", net["fc"], at("pooled", lambda item: item.mean(1), x))


def by_hand_block(block: Any, x: Tensor, at: Hand) -> Tensor:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return block.self_attn(q, k, v, need_weights=False)

    attended, _ = at("block0.self_attn", attend, x, x, x)
    at.keep("block0.self_attn.0", attended)
    x = at("block0.norm1", block.norm1, x + at("block0.dropout1", block.dropout1, attended))
    wide = F.relu(at("block0.linear1", block.linear1, x))
    narrow = at("block0.linear2", block.linear2, at("block0.dropout", block.dropout, wide))
    return at("block0.norm2", block.norm2, x + at("block0.dropout2", block.dropout2, narrow))


def shared_layers():
    return [
        layer("flat", "Flatten"),
        layer("a", "Linear", out_features=64),
        layer("act", "ReLU", inplace=True),
        {"name": "b", "shared_with": "a"},
        {"name": "c", "shared_with": "a", "inputs": ["act"]},
        layer("sum", "add", ["b", "c"]),
        layer("fc", "Linear", out_features=10),
    ]


def shared_forward(net: dict[str, nn.Module], image: Tensor, at: Hand) -> Tensor:
    x = at("flat", nn.Flatten(), image)
    act = at("act", F.relu, at("a", net["a"], x))
    b, c = at("b", net["a"], act), at("c", net["a"], act)
    return at("fc", net["fc"], at("sum", torch.add, b, c))


NETWORKS: dict[str, Any] = {
    "cnn": (
        cnn_layers(),
        lambda: {"conv1": nn.Conv2d(1, 6, 3), "fc": nn.Linear(54, 10)},
        cnn_forward,
    ),
    "lstm": (
        with_half(lstm_layers()),
        lambda: {"lstm": nn.LSTM(8, 12, batch_first=True), "fc": nn.Linear(12, 10)},
        lstm_forward,
    ),
    "transformer": (
        transformer_layers(),
        lambda: {
            "wide": nn.Linear(8, 16),
            "block0": nn.TransformerEncoderLayer(16, 2, 24, batch_first=True),
            "fc": nn.Linear(16, 10),
        },
        transformer_forward,
    ),
    "shared": (
        shared_layers(),
        lambda: {"a": nn.Linear(64, 64), "fc": nn.Linear(64, 10)},
        shared_forward,
    ),
}


def watched_by_hand(table: Path, name: str) -> dict[tuple[int, str, str], Tensor]:
    """All tensors of the first steps, from plain torch."""
    images = torch.from_numpy(np.load(table / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(table / "train" / "1.npy"))
    torch.set_num_threads(1)
    torch.manual_seed(3)
    _, make, forward = NETWORKS[name]
    net = nn.ModuleDict(make())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3 * 1_000_003))
    found: dict[tuple[int, str, str], Tensor] = {}
    for step in range(NUM_STEPS):
        rows, at = order[step * 64 : (step + 1) * 64], Hand()
        scores = forward(dict(net.items()), images[rows].float() / 255, at)
        loss = F.cross_entropy(scores, labels[rows])
        loss.backward()
        before = {key: item.detach().clone() for key, item in net.named_parameters()}
        kept: dict[str, dict[str, Tensor]] = {
            "output": {key: item.detach() for key, item in at.outputs.items()},
            "output_grad": {k: v.grad for k, v in at.outputs.items() if v.grad is not None},
            "input": at.inputs,
            "param": before,
            "param_grad": {key: item.grad for key, item in net.named_parameters()},  # pyright: ignore
        }
        optimizer.step()
        kept["update"] = {k: item.detach() - before[k] for k, item in net.named_parameters()}
        kept["optim_state"] = {
            f"{key}.{state}": value.clone()
            for key, item in net.named_parameters()
            for state, value in optimizer.state[item].items()
        }
        found |= {(step, k, kind): v for kind, items in kept.items() for k, v in items.items()}
        optimizer.zero_grad(set_to_none=True)
        samples = F.cross_entropy(scores.detach(), labels[rows], reduction="none")
        found |= {(step, "loss", "output"): loss.detach(), (step, "loss.rows", "output"): rows}
        found[step, "loss.samples", "output"] = samples
    return found


def job(name: str, **changes: Any) -> dict[str, Any]:
    return spec(
        network={"layers": NETWORKS[name][0]},
        optimizer={"type": "Adam", "args": {"lr": 0.01}},
        **{"stop": {"steps": NUM_STEPS}, **changes},
    )


def everything(**changes: Any) -> dict[str, Any]:
    globs = ["*", "*.*", "loss*"]
    return {"layers": globs, "kinds": KINDS, "every": 1, "want": ["stats", "full"], **changes}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_is_what_autograd_gives(name, digits, tmp_path):
    found = captured(run(tmp_path, job(name, probes=[everything()]), digits), tmp_path)
    expected = watched_by_hand(digits, name)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
        assert found[key].dtype == tensor.dtype, key


@pytest.mark.parametrize("name", NETWORKS)
def test_watching_every_kind_changes_no_bit(name, digits, tmp_path):
    ways = {
        "off": [],
        "on": [everything()],
        "midway": [everything(start=1, stop=2), everything(at=[2], every=None)],
    }
    found = {}
    for way, probes in ways.items():
        records = run(tmp_path / way, job(name, probes=probes), digits)
        directory = tmp_path / way / of_type(records, "checkpoint")[-1]["dir"]
        found[way] = (losses(records), load_file(directory / "model.safetensors"))
    for told, weights in found.values():
        assert told == found["off"][0]
        assert weights.keys() == found["off"][1].keys()
        assert all(torch.equal(item, found["off"][1][key]) for key, item in weights.items())
