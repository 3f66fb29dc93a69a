"""Compares the memory that training uses with its plan, for each case in a fresh process.

The process first trains something tiny, so that torch's libraries are loaded. Then it trains the
network for some steps. The peak growth of its anonymous memory (pages of files, such as libraries,
do not count) is compared with the plan. ``grown`` uses an allocator that returns freed memory: it
is what training holds. ``kept`` uses the service's allocator settings, which keep it because
training is faster then. ``--heads`` also prints the parts of the plan. Prints a JSON line per case.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.data.streaming import Control
from worker.processes.fork_server import FIXED

Columns = dict[str, np.ndarray]
_DRAW = np.random.default_rng(0)


def _ids(num_rows: int, length: int, dim: int) -> np.ndarray:
    return _DRAW.integers(0, dim, (num_rows, length)).astype(np.int32)


def _classes(num_rows: int, dim: int = 2) -> np.ndarray:
    return _DRAW.integers(0, dim, num_rows)


def _field(type_: str, dim: int | None = None) -> dict[str, Any]:
    return {"type": type_} if dim is None else {"type": type_, "dim": dim}


def _case(  # noqa: PLR0913, PLR0917 (network, data, optimizer)
    preset: str,
    args: dict[str, Any],
    columns: Callable[[], Columns],
    fields: dict[str, Any],
    loss: list[str],
    batch_size: int,
    optimizer: str = "Adam",
    **more: Any,
) -> dict[str, Any]:
    spec = {
        "kind": "train",
        "network": {"type": "preset", "preset": preset, "args": args},
        "loss": {"type": more.pop("loss_type", "CrossEntropyLoss"), "inputs": loss},
        "optimizer": {"type": optimizer, "args": {"lr": 0.001}},
        "data": {"train": {"dataset": "d"}, "fields": fields, "batch_size": batch_size},
        "stop": {"steps": 4},
        "checkpoint": {"every_steps": 2},
        **more,
    }
    return {"columns": columns, "spec": spec}


TEXT = {"text": _field("integer_sequence", 30_000), "label": _field("integer", 2)}
CASES: dict[str, dict[str, Any]] = {
    "mlp": _case(
        "mlp",
        {"hidden": [2048, 2048]},
        lambda: {"x": _DRAW.random((40_000, 1024), np.float32), "label": _classes(40_000, 10)},
        {"x": _field("dense"), "label": _field("integer", 10)},
        ["out", "label"],
        512,
    ),
    "mnist_cnn": _case(
        "mnist_cnn",
        {},
        lambda: {
            "image": _DRAW.integers(0, 255, (60_000, 28, 28)).astype(np.uint8),
            "label": _classes(60_000, 10),
        },
        {"image": {"type": "dense", "shape": [1, 28, 28]}, "label": _field("integer", 10)},
        ["fc", "label"],
        2000,
        "SGD",
    ),
    "resnet18": _case(
        "resnet18",
        {"num_classes": 100},
        lambda: {
            "image": _DRAW.integers(0, 255, (5000, 3, 64, 64)).astype(np.uint8),
            "label": _classes(5000, 100),
        },
        {"image": _field("dense"), "label": _field("integer", 100)},
        ["fc", "label"],
        64,
        "AdamW",
    ),
    "text_cnn": _case(
        "text_cnn",
        {},
        lambda: {"text": _ids(20_000, 100, 30_000), "label": _classes(20_000)},
        TEXT,
        ["fc", "label"],
        400,
    ),
    "lstm_classifier": _case(
        "lstm_classifier",
        {"hidden_size": 256},
        lambda: {"text": _ids(20_000, 100, 30_000), "label": _classes(20_000)},
        TEXT,
        ["fc", "label"],
        200,
    ),
    "cbow, sparse, 1,000,000 words": _case(
        "cbow",
        {"num_words": 1_000_000, "embedding_dim": 32},
        lambda: {"context": _ids(200_000, 4, 1_000_000), "centre": _classes(200_000, 1_000_000)},
        {
            "context": _field("integer_sequence", 1_000_000),
            "centre": _field("integer", 1_000_000),
        },
        ["fc", "centre"],
        32,
        "SGD",
    ),
    "transformer_classifier": _case(
        "transformer_classifier",
        {"max_length": 100, "num_layers": 4},
        lambda: {"text": _ids(20_000, 100, 30_000), "label": _classes(20_000)},
        TEXT,
        ["fc", "label"],
        100,
        "AdamW",
    ),
    "transformer_lm": _case(
        "transformer_lm",
        {"num_tokens": 256, "block_size": 128, "num_layers": 4, "num_heads": 4, "width": 256},
        lambda: {"tokens": _ids(20_000, 128, 256), "next": _ids(20_000, 128, 256)},
        {"tokens": _field("integer_sequence", 256), "next": _field("integer_sequence", 256)},
        ["scores", "next"],
        48,
        "AdamW",
    ),
    "seq2seq": _case(
        "seq2seq",
        {"num_entries": 10_000},
        lambda: {name: _ids(20_000, 30, 10_000) for name in ("source", "target", "next")},
        {name: _field("integer_sequence", 10_000) for name in ("source", "target", "next")},
        ["scores", "next"],
        64,
    ),
    "recommender": _case(
        "recommender",
        {"embedding_dim": 64, "hidden": [256]},
        lambda: {
            "user": np.sort(_ids(50_000, 30, 600_000)),
            "item": np.sort(_ids(50_000, 20, 300_000)),
            "liked": _DRAW.random((50_000, 1)).astype(np.float32),
        },
        {
            "user": _field("sparse_binary", 600_000),
            "item": _field("sparse_binary", 300_000),
            "liked": _field("dense"),
        },
        ["score", "liked"],
        1000,
        "Adagrad",
        loss_type="MSELoss",
    ),
}
CASES["resnet18, bfloat16"] = {
    **CASES["resnet18"],
    "spec": CASES["resnet18"]["spec"] | {"precision": "bfloat16"},
}
CASES["transformer_lm, bfloat16, averaged"] = {
    **CASES["transformer_lm"],
    "spec": CASES["transformer_lm"]["spec"]
    | {"precision": "bfloat16", "average": {"type": "ema", "decay": 0.99}},
}
CASES["mlp, accumulated"] = {
    **CASES["mlp"],
    "spec": CASES["mlp"]["spec"] | {"accumulate": 2},
}
TINY = _case(
    "mlp",
    {"hidden": [8]},
    lambda: {"x": _DRAW.random((64, 4), np.float32), "label": _classes(64, 10)},
    {"x": _field("dense"), "label": _field("integer", 10)},
    ["out", "label"],
    8,
)


def write(directory: Path, columns: Columns) -> None:
    """Write a dataset of arrays."""
    (directory / "all").mkdir(parents=True)
    described: list[dict[str, Any]] = []
    for number, (name, array) in enumerate(columns.items()):
        np.save(directory / "all" / f"{number}.npy", array)
        shape, dtype = [*array.shape[1:]], array.dtype.name
        described.append({"name": name, "dtype": dtype, "shape": shape, "file": f"{number}.npy"})
    num_rows = len(next(iter(columns.values())))
    (directory / "meta.json").write_text(
        json.dumps({"columns": described, "splits": {"all": num_rows}})
    )


def trained(directory: Path, case: str) -> dict[str, Any]:
    """Train in this process; return the memory used and planned."""
    import torch

    from engine.plan.plan import parse_spec, plan
    from engine.process.rank import Assignment, run
    from engine.training.report import Outputs

    torch.set_num_threads(1)

    def once(spec: dict[str, Any], table: Path) -> dict[str, Any]:
        planned = plan(parse_spec(spec), {"d": json.loads((table / "meta.json").read_text())})
        job = Assignment(
            spec=parse_spec(planned["spec"]),
            tables={"d": table},
            device=torch.device("cpu"),
            num_threads=1,
            checkpoint=None,
            trained_by=None,
        )
        (table / "job").mkdir(exist_ok=True)
        run(job, control=Control(), out=Outputs(table / "job", lambda _record: None))
        return planned["memory"]

    once(TINY["spec"], directory / "tiny")
    before = own_bytes()
    with Highest() as highest:
        memory = once(CASES[case]["spec"], directory / "case")
    grown = highest.num_bytes - before
    return {
        "planned_mb": round(memory["total_bytes"] / 1e6, 1),
        "grown_mb": round(grown / 1e6, 1),
        "grown": round(grown / memory["total_bytes"], 3),
        "heads": {name: round(size / 1e6, 1) for name, size in memory.items()},
    }


_STATM = os.open("/proc/self/statm", os.O_RDONLY)


def own_bytes() -> int:
    """Return the anonymous memory of this process, bytes."""
    _, resident, shared = os.pread(_STATM, 200, 0).split()[:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


class Highest:
    """Measures the peak anonymous memory of this process, about every millisecond."""

    num_bytes = 0

    def __enter__(self) -> "Highest":
        """Start measuring."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop measuring."""
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(0.001):
            self.num_bytes = max(self.num_bytes, own_bytes())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, action="append", help="only this one")
    parser.add_argument("--heads", action="store_true")
    parser.add_argument(
        "--in", dest="directory", type=Path, help="directory of one case; for internal use"
    )
    given = parser.parse_args()
    cases = given.case or [*CASES]
    if given.directory is not None:
        print(json.dumps(trained(given.directory, cases[0])))
        return
    for case in cases:
        found = measure(case)
        heads = found.pop("heads")
        print(json.dumps(found | ({"heads": heads} if given.heads else {})), flush=True)


def measure(case: str) -> dict[str, Any]:
    """Measure one network, in a process like a rank."""
    with tempfile.TemporaryDirectory() as name:
        for kind, what in (("tiny", TINY), ("case", CASES[case])):
            write(Path(name) / kind, what["columns"]())
        exact = _run(name, case, {**FIXED, "MALLOC_MMAP_THRESHOLD_": str(1 << 18)})
        kept = _run(name, case, FIXED)
    return {"bench": "memory", "case": case, **exact, "kept": kept["grown"]}


def _run(directory: str, case: str, variables: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.data.memory", "--in", directory, "--case", case]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
