"""Measures steps per second of the word model by vocabulary size: sparse, dense, other tools.

The embedding table grows from 3,000 to 3,000,000 words. The output does not: a softmax over
millions of words would dominate the time. It has 3,000 words as in PaddlePaddle's FAQ, or 64, where
the table is nearly all of the work. Ids are uniform, which is the hardest case for caches: each
step reads 400 random rows of the table. SGD, batches of 100, four context words.

Each side is a process of its own. Blocks of steps alternate between two sides at a time, so that
their tables fit in memory. Every ratio is of two blocks of one round, by wall time and by CPU time,
which other load on the machine disturbs less. PaddlePaddle needs a Python that has it:

    python -m venv /tmp/rivals
    /tmp/rivals/bin/pip install -c constraints.txt paddlepaddle numpy torch
    python -m bench.training.words --threads 2 --rivals /tmp/rivals/bin/python
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.training.speed import Side

BATCH, AROUND, WIDTH = 100, 4, 256
NUM_ROWS = 100_000
SIZES = (3_000, 100_000, 3_000_000)
OUTPUTS = (3_000, 64)
OURS = ("sparse", "dense")
SLOW = 3_000_000
Times = tuple[float, float]
Block = Callable[[int], Times]
"""Trains that many steps and returns the seconds they took: wall time and CPU time."""


def data(num_words: int, num_outputs: int) -> tuple[Any, Any]:
    import numpy as np

    generator = np.random.default_rng(0)
    context = generator.integers(0, num_words, (NUM_ROWS, AROUND))
    return context, generator.integers(0, num_outputs, NUM_ROWS)


# --- a side ----------------------------------------------------------------------------------


def spec(num_words: int, num_outputs: int, *, sparse: bool) -> dict[str, Any]:
    args = {"embedding_dim": WIDTH, "mode": "sum", "sparse": sparse}
    layers = [
        {"name": "embedding", "type": "EmbeddingBag", "args": args, "inputs": ["context"]},
        {"name": "fc", "type": "Linear", "args": {"out_features": num_outputs}},
    ]
    fields = {
        "context": {"type": "integer_sequence", "dim": num_words},
        "centre": {"type": "integer", "dim": num_outputs},
    }
    return {
        "kind": "train",
        "network": {"layers": layers},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "centre"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.01}},
        "data": {"train": {"dataset": "d"}, "fields": fields, "batch_size": BATCH},
        "stop": {"steps": 1_000_000},
        "checkpoint": {"every_steps": 1_000_000, "every_s": None},
    }


def clocks() -> Times:
    return time.perf_counter(), time.process_time()


def since(began: Times) -> Times:
    wall, cpu = clocks()
    return wall - began[0], cpu - began[1]


class Turns:
    """A control that pauses training between the requested blocks."""

    wanted = None
    threads = None
    listen = None
    ends_as = "cancelled"
    orders = ()

    def __init__(self) -> None:
        self._left, self._began = 0, (0.0, 0.0)

    @property
    def cancel_requested(self) -> bool:
        self._left -= 1
        if self._left < 0:  # the first step, which touches memory for the first time
            print("ready", flush=True)
        elif self._left == 0:
            print(*since(self._began), flush=True)
        if self._left <= 0:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)  # skip saving
            self._left, self._began = int(line), clocks()
        return False


def ours(num_words: int, num_outputs: int, *, sparse: bool) -> None:
    import numpy as np
    import torch

    from engine.core.spool import SpoolWriter
    from engine.data.columns.table import Table
    from engine.data.sources.loading import load
    from engine.plan.plan import parse_spec, plan
    from engine.process.rank import calm_collector
    from engine.training.loop import train
    from engine.training.report import Outputs
    from glasshouse.spec import Source

    calm_collector()
    with tempfile.TemporaryDirectory(prefix="words-") as name:
        directory = Path(name)
        (directory / "all").mkdir()
        columns: list[dict[str, Any]] = []
        for column, values in zip(("context", "centre"), data(num_words, num_outputs), strict=True):
            np.save(directory / "all" / f"{column}.npy", values)
            about = {"dtype": "int64", "shape": [*values.shape[1:]], "file": f"{column}.npy"}
            columns.append({"name": column, **about})
        meta = {"columns": columns, "splits": {"all": NUM_ROWS}}
        (directory / "meta.json").write_text(json.dumps(meta))
        wanted = spec(num_words, num_outputs, sparse=sparse)
        job = parse_spec(plan(parse_spec(wanted), {"d": meta})["spec"])
        source, table = Source(dataset="d"), Table(directory)
        rows = load(source, job.data.fields, table, seed=0, device=torch.device("cpu"))
        spool = SpoolWriter(directory / "spool")
        out = Outputs(directory, spool.append, spool.settle, spool.flush)
        train(job, rows, {}, control=Turns(), out=out)


def by_hand(num_words: int, num_outputs: int) -> Block:
    import torch
    from torch import nn

    context, centre = (torch.from_numpy(item) for item in data(num_words, num_outputs))
    bag = nn.EmbeddingBag(num_words, WIDTH, mode="sum", sparse=True)
    network = nn.Sequential(bag, nn.Linear(WIDTH, num_outputs))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()

    def block(steps: int) -> float:
        began = clocks()
        for rows in torch.randperm(NUM_ROWS)[: steps * BATCH].split(BATCH):
            loss = loss_fn(network(context[rows]), centre[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
        return since(began)

    return block


def paddle(num_words: int, num_outputs: int) -> Block:
    import paddle as P

    P.device.set_device("cpu")
    context, centre = (P.to_tensor(item) for item in data(num_words, num_outputs))
    embedding = P.nn.Embedding(num_words, WIDTH, sparse=True)
    fc = P.nn.Linear(WIDTH, num_outputs)
    parameters = [*embedding.parameters(), *fc.parameters()]
    optimizer = P.optimizer.SGD(0.01, parameters=parameters)
    loss_fn = P.nn.CrossEntropyLoss()

    def block(steps: int) -> float:
        began = clocks()
        order = P.randperm(NUM_ROWS)
        for step in range(steps):
            rows = order[step * BATCH :][:BATCH]
            summed = embedding(P.index_select(context, rows)).sum(axis=1)
            loss = loss_fn(fc(summed), P.index_select(centre, rows))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            loss.item()
        return since(began)

    return block


def serve(side: str, threads: int) -> None:
    """Answer each number of steps on stdin with the seconds they took, until stdin closes."""
    kind, num_words, num_outputs = side.split("/")
    sizes = int(num_words), int(num_outputs)
    if kind != "paddle":
        import torch

        torch.set_num_threads(threads)
        torch.manual_seed(0)
    if kind in OURS:
        ours(*sizes, sparse=kind == "sparse")
        return
    makers: dict[str, Callable[..., Block]] = {"by hand": by_hand, "paddle": paddle}
    block = makers[kind](*sizes)
    block(1)
    print("ready", flush=True)
    for line in sys.stdin:
        print(*block(int(line)), flush=True)


# --- alternating blocks ----------------------------------------------------------------------


def compare(names: list[str], given: argparse.Namespace) -> None:
    """Run blocks of all sides in turn; print a line for each with its ratio to the first side."""
    pythons = {
        name: given.rivals if name.startswith("paddle") else sys.executable for name in names
    }
    sides = [
        Side(
            name,
            given.threads,
            pythons[name],
            bench="bench.training.words",
            ours=name.split("/")[0] in OURS,
        )
        for name in names
    ]
    speeds: dict[str, list[Times]] = {name: [] for name in names}
    for number in range(given.rounds + 1):
        for side in sides:
            is_slow = side.name.startswith(f"dense/{SLOW}/")
            steps = max(1, given.steps // 50) if is_slow else given.steps
            wall, cpu = map(float, side.ask(steps).split())
            if number:  # the first round is a warm-up
                speeds[side.name].append((steps / wall, steps / cpu))
    for side in sides:
        side.end()
        report(side.name, names[0], speeds, given)


def report(
    name: str, first: str, speeds: dict[str, list[Times]], given: argparse.Namespace
) -> None:
    kind, num_words, num_outputs = name.split("/")
    about: dict[str, Any] = {"bench": "words", "side": kind, "words": int(num_words)}
    about |= {"outputs": int(num_outputs), "to": "/".join(first.split("/")[:2])}
    figures = {"median": statistics.median, "min": min, "max": max}
    for place, key in enumerate(("ratio", "cpu_ratio")):
        pairs = zip(speeds[name], speeds[first], strict=True)
        ratios = [own[place] / other[place] for own, other in pairs]
        about[key] = {part: float(f"{of(ratios):.3g}") for part, of in figures.items()}
    wall, cpu = (statistics.median(each) for each in zip(*speeds[name], strict=True))
    about |= {"steps_per_s": round(wall, 1), "steps_per_cpu_s": round(cpu, 1)}
    about |= {"rounds": given.rounds, "steps": given.steps, "threads": given.threads}
    print(json.dumps(about | {"load": round(os.getloadavg()[0], 1)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.training.words")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help="steps of a block, at most 1000")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rivals", help="a Python interpreter with paddle")
    parser.add_argument(
        "--outputs", type=int, nargs="+", default=OUTPUTS, help="sizes of the predicted vocabulary"
    )
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        serve(given.side, given.threads)
        return
    for outputs in given.outputs:
        compare([f"sparse/{words}/{outputs}" for words in SIZES], given)
        for words in SIZES:
            others = ["dense", "by hand", *(["paddle"] if given.rivals else [])]
            for other in others:
                compare([f"sparse/{words}/{outputs}", f"{other}/{words}/{outputs}"], given)


if __name__ == "__main__":
    main()
