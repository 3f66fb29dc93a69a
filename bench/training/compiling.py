"""Measures what torch.compile gains in a training step, and whether results stay bit-identical.

Prints one JSON line for each network: how many times as fast a compiled step (forward, loss,
backward, SGD) is as the eager step, the two alternating in one process; the seconds of compilation,
the first time and for another number of rows; and whether the parameters after the first step are
bit-identical. It has the speeds of ``channels_last`` and bfloat16 too, which need no compiler.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], Tensor]


class Block(nn.Module):
    """A four-layer transformer with causal attention and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(65, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.scores = nn.Linear(128, 65)
        self.mask = nn.Transformer.generate_square_subsequent_mask(64)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of the next id, with the classes on axis 1 for cross entropy."""
        return self.scores(self.blocks(self.embed(ids), self.mask, is_causal=True)).transpose(1, 2)


def networks() -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Return each network with a batch."""
    cnn = nn.Sequential(
        nn.Conv2d(1, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(980, 10),
    )  # fmt: skip
    mlp = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    labels = torch.randint(10, (100,))
    ids = torch.randint(65, (12, 65))
    return {
        "mnist_cnn": (cnn, torch.rand(100, 1, 28, 28), labels),
        "mlp": (mlp, torch.rand(100, 64), labels),
        "transformer": (Block(), ids[:, :-1], ids[:, 1:]),
    }


def step_of(network: nn.Module, call: Any, x: Tensor, y: Tensor, low: bool = False) -> Step:
    """Return a training step; ``call`` is the network or its compiled version."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            scores = call(x)
        loss = nn.functional.cross_entropy(scores.float(), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def timed(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def block_s(step: Step, num_steps: int) -> float:
    return sum(timed(step) for _ in range(num_steps))


def measured(name: str, network: nn.Module, x: Tensor, y: Tensor, args: Any) -> dict[str, Any]:
    """Return the line of a network."""
    sides: dict[str, Step] = {}
    copies = {side: copy.deepcopy(network) for side in ("eager", "compiled", "last", "low", "both")}
    sides["eager"] = step_of(copies["eager"], copies["eager"], x, y)
    compiled = torch.compile(copies["compiled"])
    sides["compiled"] = step_of(copies["compiled"], compiled, x, y)
    if x.dim() == 4:
        copies["last"].to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        image = x.contiguous(memory_format=torch.channels_last)
        sides["channels_last"] = step_of(copies["last"], copies["last"], image, y)
    sides["bfloat16"] = step_of(copies["low"], copies["low"], x, y, low=True)
    low = torch.compile(copies["both"])
    sides["bfloat16 compiled"] = step_of(copies["both"], low, x, y, low=True)
    first_s = timed(sides["compiled"])
    sides["eager"]()
    pairs = zip(copies["eager"].parameters(), copies["compiled"].parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    again_s = timed(step_of(copies["compiled"], compiled, x[:-7], y[:-7]))
    for step in sides.values():
        block_s(step, 3)
    ratios: dict[str, list[float]] = {side: [] for side in sides if side != "eager"}
    for _ in range(args.rounds):
        usual = block_s(sides["eager"], args.steps)
        for side, found in ratios.items():
            found.append(usual / block_s(sides[side], args.steps))
    faster = {
        side: [round(item, 2) for item in (statistics.median(found), min(found), max(found))]
        for side, found in ratios.items()
    }
    return {
        "bench": "compiling",
        "network": name,
        "threads": args.threads,
        "times_as_fast": faster,
        "compile_s": round(first_s, 1),
        "other_rows_s": round(again_s, 1),
        "same_bits": same,
        "eager_ms": round(1e3 * usual / args.steps, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.backends.mha.set_fastpath_enabled(False)
    torch.manual_seed(0)
    for name, (network, x, y) in networks().items():
        print(json.dumps(measured(name, network, x, y, args)), flush=True)


if __name__ == "__main__":
    main()
