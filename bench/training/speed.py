"""Measures images per second on the MNIST network: the engine with several options, other tools.

Each side is a process of its own, because allocator settings are read when a process starts. The
engine runs with those of our ranks, the others as a user starts them. Blocks of steps alternate.
Every ratio is relative to the hand-written loop's block of the same round, and prints as one JSON
line. Data is random, in memory, and has the right shape. Lightning and PaddlePaddle need packages
that nothing else here needs:

    python -m venv /tmp/rivals
    /tmp/rivals/bin/pip install -c constraints.txt lightning paddlepaddle numpy torch
    python -m bench.training.speed --threads 2 --rivals /tmp/rivals/bin/python
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_ROWS, BATCH = 6000, 100
MALLOC = "MALLOC_"
OURS: dict[str, dict[str, Any]] = {
    "default": {},
    "tune": {"tune": True},
    "bfloat16": {"precision": "bfloat16"},
    "bfloat16 and tune": {"precision": "bfloat16", "tune": True},
}
RIVALS = ("lightning", "paddle")
Block = Callable[[int], float]
"""Trains that many steps and returns the seconds they took."""


# --- a side: answers each number of steps with seconds ---------------------------------------


def data() -> tuple[Any, Any]:
    import numpy as np

    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (NUM_ROWS, 28, 28), dtype=np.uint8)
    return images, generator.integers(0, 10, NUM_ROWS).astype(np.uint8)


def by_hand() -> Block:
    import torch

    from bench.training.step import ByHand

    images, labels = data()
    x = torch.from_numpy(images).to(torch.float32).reshape(-1, 1, 28, 28) / 255
    hand = ByHand(x, torch.from_numpy(labels).long())
    return lambda steps: hand.run(steps)[0]


def ours(options: dict[str, Any]) -> Block:
    import numpy as np
    import torch

    from bench.training.step import META, Clock, spec
    from engine.core.spool import SpoolWriter
    from engine.data.columns.table import Table
    from engine.data.sources.loading import load
    from engine.plan.plan import parse_spec, plan
    from engine.process.rank import calm_collector
    from engine.training.loop import train
    from engine.training.report import Outputs
    from glasshouse.spec import Source

    calm_collector()
    torch.backends.mha.set_fastpath_enabled(False)
    directory = Path(tempfile.mkdtemp(prefix="speed-"))
    (directory / "train").mkdir()
    for number, values in enumerate(data()):
        np.save(directory / "train" / f"{number}.npy", values)
    (directory / "meta.json").write_text(json.dumps(META))
    table, source = Table(directory), Source(dataset="d", split="train")
    spool = SpoolWriter(directory / "spool")

    def block(steps: int) -> float:
        job = parse_spec(plan(parse_spec({**spec(steps), **options}), {"d": META})["spec"])
        rows = load(source, job.data.fields, table, seed=0, device=torch.device("cpu"))
        clock = Clock()
        out = Outputs(directory, spool.append, spool.settle, spool.flush)
        train(job, rows, {}, control=clock, out=out)
        first, last = clock.times[0][0], clock.times[steps - 1][0]
        return (last - first) * steps / (steps - 1)

    return block


def lightning() -> Block:
    import logging
    import time

    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    images, labels = data()
    x = torch.from_numpy(images).to(torch.float32).reshape(-1, 1, 28, 28) / 255
    y = torch.from_numpy(labels).long()

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(
                nn.Conv2d(1, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(20, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(980, 10),
            )  # fmt: skip

        def training_step(self, batch: Any, _number: int) -> Any:
            if self.trainer.global_step == 1:
                self.began = time.perf_counter()
            images, labels = batch
            return nn.functional.cross_entropy(self.network(images), labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Batches:
        """Yields batches from memory without a DataLoader, to measure Lightning itself."""

        def __iter__(self) -> Any:
            while True:
                for rows in torch.randperm(NUM_ROWS).split(BATCH):
                    yield x[rows], y[rows]

    def block(steps: int) -> float:
        model = Model()
        trainer = Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, Batches())
        return (time.perf_counter() - model.began) * steps / (steps - 1)

    return block


def paddle() -> Block:
    import time

    import paddle as P

    images, labels = data()
    x = P.to_tensor(images.astype("float32").reshape(-1, 1, 28, 28) / 255)
    y = P.to_tensor(labels.astype("int64"))
    network = P.nn.Sequential(
        P.nn.Conv2D(1, 20, 5, padding=2), P.nn.ReLU(), P.nn.MaxPool2D(2),
        P.nn.Conv2D(20, 20, 5, padding=2), P.nn.ReLU(), P.nn.MaxPool2D(2),
        P.nn.Flatten(), P.nn.Linear(980, 10),
    )  # fmt: skip
    optimizer = P.optimizer.SGD(0.01, parameters=network.parameters())
    loss_fn = P.nn.CrossEntropyLoss()

    def block(steps: int) -> float:
        began = time.perf_counter()
        order = P.randperm(NUM_ROWS)
        for step in range(steps):
            rows = order[step * BATCH % NUM_ROWS :][:BATCH]
            loss = loss_fn(network(P.index_select(x, rows)), P.index_select(y, rows))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            loss.item()
        return time.perf_counter() - began

    return block


def serve(side: str, threads: int) -> None:
    """Answer each number of steps on stdin with the seconds they took, until stdin closes."""
    if side == "paddle":
        import paddle as P

        P.device.set_device("cpu")
    else:
        import torch

        torch.set_num_threads(threads)
    makers = {"by hand": by_hand, "lightning": lightning, "paddle": paddle}
    block = makers[side]() if side in makers else ours(OURS[side])
    print("ready", flush=True)
    for line in sys.stdin:
        print(block(int(line)), flush=True)


# --- alternating blocks ----------------------------------------------------------------------


class Side:
    """A process that trains a block of steps on request."""

    def __init__(self, name: str, threads: int, python: str, *, bench: str, ours: bool) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(MALLOC)}
        kept |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        if ours:
            from worker.processes.fork_server import FIXED

            kept |= {k: v for k, v in FIXED.items() if k.startswith(MALLOC)}
        command = [python, "-m", bench, "--side", name, "--threads", str(threads)]
        self._process = subprocess.Popen(
            command, env=kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.name, self._bench = name, bench
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.name} exited: run python -m {self._bench} --side {self.name!r}"
            )
        return line

    def train(self, steps: int) -> float:
        return float(self.ask(steps))

    def ask(self, steps: int) -> str:
        assert self._process.stdin
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rivals", help="a Python interpreter with lightning and paddle")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        serve(given.side, given.threads)
        return
    names = dict.fromkeys(("by hand", *OURS), sys.executable)
    names |= dict.fromkeys(RIVALS, given.rivals) if given.rivals else {}
    sides = [
        Side(name, given.threads, python, bench="bench.training.speed", ours=name in OURS)
        for name, python in names.items()
    ]
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(given.rounds + 1):
        for side in sides:
            seconds = side.train(given.steps)
            if number:  # the first round is a warm-up
                times[side.name].append(seconds)
    for side in sides:
        side.end()
        ratios = [t / own for t, own in zip(times["by hand"], times[side.name], strict=True)]
        figures = {"median": statistics.median, "min": min, "max": max}
        print(
            json.dumps(
                {
                    "bench": "speed",
                    "side": side.name,
                    "ratio": {name: round(of(ratios), 3) for name, of in figures.items()},
                    "images_per_s": round(
                        given.steps * BATCH / statistics.median(times[side.name])
                    ),
                    "rounds": given.rounds,
                    "steps": given.steps,
                    "threads": given.threads,
                }
            )
        )


if __name__ == "__main__":
    main()
