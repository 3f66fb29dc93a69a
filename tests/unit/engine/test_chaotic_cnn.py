"""The MNIST network under several processes: ReLU and max pooling amplify one rounding.

So its losses cannot be those of one process to a fixed bound. They must stay as close to it as
those of a loop that is written by hand for torch's DistributedDataParallel.
"""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.unit.engine.parallel_jobs import pair
from tests.unit.engine.processes import run_processes
from tests.unit.engine.runs import losses, run, write_table
from worker.processes.fork_server import ForkServerClient

pytestmark = pytest.mark.long

STEPS, ROWS, NUM_ROWS = 60, 64, 640
SGD: dict[str, Any] = {"type": "SGD", "args": {"lr": 0.01, "momentum": 0.9}}
ADAM: dict[str, Any] = {"type": "Adam", "args": {"lr": 0.002}}
VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": {"optimizer": ADAM},
    "clipping": {"grad_clip": {"type": "global_norm", "max": 1.0}},
    "accumulation": {"accumulate": 2, "stop": {"steps": 30}},
    "ema": {"average": {"type": "ema", "decay": 0.9}},
    "masked": {
        "loss": {
            "type": "CrossEntropyLoss",
            "inputs": ["fc", "label"],
            "args": {"ignore_index": 3},
        }
    },
    "bfloat16": {"precision": "bfloat16"},
}


AMPLIFIED = 2e-2
"""What 60 steps make of a rounding for some of the initial weights of the loop written by hand."""

BY_HAND = ("sgd", "clipping")
"""The variants of the loop that is written by hand."""


def images_and_labels() -> tuple[np.ndarray, np.ndarray]:
    """A noisy pattern for each class."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, NUM_ROWS)
    patterns = generator.normal(0, 1, (10, 1, 28, 28))
    noise = generator.normal(0, 2, (NUM_ROWS, 1, 28, 28))
    return (patterns[labels] + noise).astype(np.float32), labels


def train_by_hand(rank: int, size: int, directory: Path, kind: str) -> None:
    """Train the network in one of ``size`` processes; process 0 writes the losses."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if size > 1:
        store = f"file://{directory / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    images, labels = map(torch.from_numpy, images_and_labels())
    torch.manual_seed(0)
    network: nn.Module = nn.Sequential(
        *(nn.Conv2d(1, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(980, 10)),
    )
    if size > 1:
        network = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), **SGD["args"])
    found: list[float] = []
    share = ROWS // size
    for step in range(STEPS):
        start = step * ROWS % NUM_ROWS + rank * share
        own = slice(start, start + share)
        loss: Tensor = F.cross_entropy(network(images[own]), labels[own])
        optimizer.zero_grad()
        loss.backward()
        if kind == "clipping":
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach() / size
        if size > 1:
            dist.all_reduce(mean)
        found.append(float(mean))
    if rank == 0:
        (directory / f"losses-{size}.json").write_text(json.dumps(found))
    os._exit(0)  # torch 2.13 aborts now and then when the interpreter ends after gloo was used


def by_hand(directory: Path, size: int, kind: str) -> list[float]:
    """The losses of the loop in ``size`` processes."""
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=train_by_hand, args=(rank, size, directory, kind))
        for rank in range(size)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
        assert one.exitcode == 0
    return json.loads((directory / f"losses-{size}.json").read_text())


def distance(mine: list[float], theirs: list[float]) -> float:
    """The largest relative difference."""
    both = zip(mine, theirs, strict=True)
    return max(abs(first - second) / abs(second) for first, second in both)


@pytest.fixture(scope="module")
def by_hand_at_most(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The largest distance of two processes from one if both are written by hand.

    How far a rounding is amplified depends on the path, and so on the initial weights, which are
    others here: 1e-7 to 2e-2. A wrong weight of one row in 64 makes 1e-2 within a few steps, when
    a rounding is still below 1e-5.
    """
    found: list[float] = []
    for kind in BY_HAND:
        directory = tmp_path_factory.mktemp(kind)
        found.append(distance(by_hand(directory, 2, kind), by_hand(directory, 1, kind)))
    return max(found)


RARELY = ("adam", "accumulation", "ema", "bfloat16")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(x, marks=pytest.mark.slow) if x in RARELY else x for x in VARIANTS],
)
def test_two_processes_are_as_close_to_one_as_by_hand(
    variant: str, server: ForkServerClient, by_hand_at_most: float, tmp_path: Path
):
    images, labels = images_and_labels()
    columns = {"image": images, "label": labels}
    table = write_table(tmp_path / "t", columns, {"train": slice(0, NUM_ROWS)})
    fields = {"image": {"type": "dense"}, "label": {"type": "integer", "dim": 10}}
    base: dict[str, Any] = {
        "network": {"type": "preset", "preset": "mnist_cnn"},
        "optimizer": SGD,
        "stop": {"steps": STEPS},
        "data": {"fields": fields, "shuffle": {"enabled": False}},
    }
    several, alone = pair(2, ROWS, "data", **base | VARIANTS[variant])
    mine = losses(run_processes(server, tmp_path / "a", several, table))
    theirs = losses(run(tmp_path / "b", alone, table))
    assert theirs[-1] < theirs[0] / 2
    if variant == "bfloat16":  # begins with 2^16 times the rounding
        assert distance(mine[:10], theirs[:10]) < 2e-2
    else:
        assert distance(mine[:10], theirs[:10]) < 1e-5
        assert distance(mine, theirs) < max(3 * by_hand_at_most, AMPLIFIED)
