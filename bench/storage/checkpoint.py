"""Measures the cost of saving a checkpoint, asynchronous against synchronous: one JSON line.

``paused`` is the ratio of the times for which training pauses. ``steps_beside`` is the ratio of
step times while a checkpoint is being written to those while none is. The two kinds alternate.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from engine.checkpoint.saving import Saver
from engine.checkpoint.training_state import Generators, OptimizerState, Weights
from engine.plan.plan import parse_spec
from glasshouse.spec import TrainJob

SPEC = {
    "kind": "train",
    "network": {"layers": [{"name": "fc", "type": "Linear", "args": {"out_features": 2}}]},
    "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "y"]},
    "optimizer": {"type": "AdamW"},
    "data": {
        "train": {"dataset": "d"},
        "fields": {"x": {"type": "dense"}, "y": {"type": "integer", "dim": 2}},
        "batch_size": 1,
    },
    "stop": {"steps": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=2000, help="width of three square layers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(Path(name), given.rounds, given.width)))


def measure(directory: Path, rounds: int, width: int) -> dict[str, float | str | int]:
    job = parse_spec(SPEC)
    assert isinstance(job, TrainJob)
    network = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])
    optimizer = torch.optim.AdamW(network.parameters())
    x = torch.randn(8, width)

    def step() -> None:
        network(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    saver = Saver(job, directory, lambda _record: None, lambda: None)
    saver.parts |= {
        "model": Weights(network),
        "optimizer": OptimizerState(optimizer, network),
        "generators": Generators(),
    }
    paused: dict[bool, list[float]] = {True: [], False: []}
    alone: list[float] = []
    beside: list[float] = []
    for number in range(rounds):
        for wait in (True, False):
            alone += [timed(step) for _ in range(3)]
            at = 2 * number + wait
            position = {"step": at, "epoch": 0, "batch": at}
            paused[wait].append(timed(lambda: saver.save(position, {}, wait=wait)))  # noqa: B023
            while saver.is_busy:
                beside.append(timed(step))
            saver.wait()
    synchronous, asynchronous = (statistics.median(paused[wait]) for wait in (True, False))
    size = sum(item.nbytes for item in network.state_dict().values()) * 3
    return {
        "bench": "checkpoint",
        "megabytes": size // 2**20,
        "synchronous_s": round(synchronous, 4),
        "asynchronous_s": round(asynchronous, 4),
        "paused": round(asynchronous / synchronous, 4),
        "steps_beside": round(statistics.median(beside) / statistics.median(alone), 3),
        "rounds": rounds,
    }


def timed(what: Callable[[], object]) -> float:
    """Return the duration of a call, seconds."""
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
