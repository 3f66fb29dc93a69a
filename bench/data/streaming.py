"""Measures data larger than memory: memory used against the plan, and rows per second.

Each job is a process of its own that trains a small network on a file five times as large as its
shuffle pool. Its memory before training is subtracted from its peak; the rest is compared with the
plan. Rows per second are those of one epoch. Prints a JSON line per case.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = (1, 28, 28)
CASES: dict[str, dict[str, Any]] = {
    "in memory": {},
    "pool": {"shuffle": {"buffer_size": 5}},
    "pool, 1 worker": {"shuffle": {"buffer_size": 5}, "workers": 1},
    "pool, 2 workers": {"shuffle": {"buffer_size": 5}, "workers": 2},
    "in memory, 1 worker": {"workers": 1},
}
"""``buffer_size`` here is a divisor: the pool has 1/5 of the rows."""


class Control:
    """A control without requests."""

    wanted = None
    threads = None
    listen = None
    ends_as = "cancelled"
    orders = ()
    cancel_requested = False


def write(directory: Path, num_rows: int, shape: tuple[int, ...]) -> None:
    """Write a dataset of float32 rows, block by block."""
    (directory / "all").mkdir()
    columns = [("x", "float32", shape), ("label", "int64", ())]
    for number, (_, dtype, row) in enumerate(columns):
        path = directory / "all" / f"{number}.npy"
        file = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), (num_rows, *row))
        for start in range(0, num_rows, 4096):
            size = min(4096, num_rows - start)
            block = np.random.default_rng(start).integers(0, 10, (size, *row))
            file[start : start + size] = block
        file.flush()
    described = [
        {"name": name, "dtype": dtype, "shape": [*row], "file": f"{number}.npy"}
        for number, (name, dtype, row) in enumerate(columns)
    ]
    meta = {"columns": described, "splits": {"all": num_rows}}
    (directory / "meta.json").write_text(json.dumps(meta))


def spec(data: dict[str, Any], batch_size: int) -> dict[str, Any]:
    return {
        "kind": "train",
        "network": {
            "layers": [
                {"name": "flat", "type": "Flatten", "inputs": ["x"]},
                {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
            ]
        },
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.01}},
        "data": {
            "train": {"dataset": "d"},
            "fields": {"x": {"type": "dense"}, "label": {"type": "integer", "dim": 10}},
            "batch_size": batch_size,
            **data,
        },
        "stop": {"epochs": 1},
    }


def trained(directory: Path, data: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """Train for an epoch in this process; return time and memory."""
    import torch

    from engine.plan.plan import parse_spec, plan
    from engine.process.rank import Assignment, run
    from engine.training.report import Outputs

    torch.set_num_threads(1)
    meta = json.loads((directory / "meta.json").read_text())
    num_rows = meta["splits"]["all"]

    def once(data: dict[str, Any], steps: int | None = None) -> tuple[float, int]:
        whole = spec(data, batch_size) | ({} if steps is None else {"stop": {"steps": steps}})
        planned = plan(parse_spec(whole), {"d": meta})
        job = Assignment(
            spec=parse_spec(planned["spec"]),
            tables={"d": directory},
            device=torch.device("cpu"),
            num_threads=1,
            checkpoint=None,
            trained_by=None,
        )
        out = Outputs(directory / "job", lambda _record: None)
        started = time.perf_counter()
        run(job, control=Control(), out=out)
        return time.perf_counter() - started, planned["memory"]["total_bytes"]

    (directory / "job").mkdir(exist_ok=True)
    once({"shuffle": {"buffer_size": 2 * batch_size}}, 20)  # warm-up
    before = _resident()
    seconds, planned = once(data)
    grown = _peak() - before
    return {
        "planned_mb": round(planned / 1e6, 1),
        "grown_mb": round(grown / 1e6, 1),
        "grown": round(grown / planned, 3),
        "rows_per_s": round(num_rows / seconds),
    }


def _resident() -> int:
    """Return the resident memory of this process, bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _peak() -> int:
    """Return its peak resident memory, bytes; ``ru_maxrss`` would include its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument(
        "--in", dest="directory", type=Path, help="directory of one case; for internal use"
    )
    given = parser.parse_args()
    if given.directory is not None:
        data = json.loads(sys.stdin.read())
        print(json.dumps(trained(given.directory, data, given.batch)))
        return
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), given.rows, SHAPE)
        for case, data in CASES.items():
            if given.case in (None, case):
                print(json.dumps(measure(Path(name), case, data, given)), flush=True)


def measure(
    directory: Path, case: str, data: dict[str, Any], given: argparse.Namespace
) -> dict[str, Any]:
    asked = dict(data)
    if "shuffle" in asked:
        asked["shuffle"] = {"buffer_size": given.rows // asked["shuffle"]["buffer_size"]}
    command = [sys.executable, "-m", "bench.data.streaming", "--in", str(directory)]
    done = subprocess.run(
        [*command, "--batch", str(given.batch)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    file_mb = sum(path.stat().st_size for path in (directory / "all").iterdir()) / 1e6
    found = json.loads(done.stdout)
    return {"bench": "streaming", "case": case, "file_mb": round(file_mb, 1), **found}


if __name__ == "__main__":
    main()
