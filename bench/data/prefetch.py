"""Compares prefetching with threads, as ``data.workers`` does, and with DataLoader's processes.

The same rows in the same order come through a shuffle pool of 1/5 of the file, and a small network
is trained on them with one thread. Sides alternate. Results are medians of the time of an epoch
relative to that without workers. Prints a JSON line per kind of row.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bench.data.streaming import write
from engine.data.batches.rows import tensors_of
from engine.data.batches.shuffle_pool import Draw, Pool, PoolDraws
from engine.data.columns.table import StoredTable
from engine.data.sources.reading import SourceReader
from engine.data.sources.streamed import RowStore, StreamedRows
from glasshouse.spec import DenseField, Field, IntegerField, Sequences, Shuffle, Source

ROWS = {
    "3 KB, files in the page cache": ((1, 28, 28), 60_000, False),
    "3 KB, files on disk": ((1, 28, 28), 60_000, True),
    "600 KB, files in the page cache": ((3, 224, 224), 600, False),
    "600 KB, files on disk": ((3, 224, 224), 600, True),
}
"""Shape of a row, the number of rows, and whether each epoch starts with a cold page cache."""
FIELDS: dict[str, Field] = {
    "x": DenseField(type="dense"),
    "label": IntegerField(type="integer", dim=10),
}
CPU = torch.device("cpu")


class Runs(Dataset[Any]):
    """The rows that each draw adds to the pool, read in a worker process."""

    def __init__(self, reader: SourceReader, draws: list[Draw]) -> None:
        self._reader, self._draws = reader, draws

    def __len__(self) -> int:
        return len(self._draws)

    def __getitem__(self, number: int) -> Any:
        runs = self._draws[number].runs
        return self._reader.read_runs(runs) if runs else {}


def by_processes(reader: SourceReader, pool: Pool, workers: int) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of the pool, read by worker processes."""
    draws = PoolDraws(pool, 0, 0)
    made = [draws.draw() for _ in range(-(-pool.num_rows // pool.batch_size))]
    store = RowStore(pool.capacity)
    loader = DataLoader(Runs(reader, made), batch_size=None, num_workers=workers)
    for draw, read in zip(made, loader, strict=True):
        if read:
            store.put(draw.entered, read)
        rows = store.get(draw.drawn)
        store.free(draw.drawn)
        yield tensors_of(rows, slice(None), slice(None), CPU)[0]


def by_threads(reader: SourceReader, pool: Pool, workers: int) -> Iterator[dict[str, Tensor]]:
    """Yield the batches as a job reads them."""
    shuffle = Shuffle(buffer_size=pool.buffer_size)
    rows = StreamedRows(reader, CPU, shuffle=shuffle, workers=workers)
    yield from rows.epoch(pool.batch_size, drop_last=False, order=(0, 0))
    rows.close()


def train(batches: Iterator[dict[str, Tensor]], network: nn.Module) -> float:
    """Train for an epoch; return the seconds."""
    started = time.perf_counter()
    for batch in batches:
        nn.functional.cross_entropy(network(batch["x"]), batch["label"]).backward()
        network.zero_grad()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", type=float, default=1.0, help="fraction of the rows")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for kind, (shape, num_rows, _) in ROWS.items():
        with tempfile.TemporaryDirectory() as name:
            write(Path(name), int(num_rows * given.part), shape)
            print(json.dumps(measure(Path(name), kind, given.rounds)), flush=True)


def forget(directory: Path) -> None:
    """Drop the files from the page cache."""
    for path in (directory / "all").iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(directory: Path, kind: str, rounds: int) -> dict[str, Any]:
    shape, _, is_cold = ROWS[kind]
    table = StoredTable(directory)
    reader = SourceReader(Source(dataset="d"), FIELDS, table, seed=0, limit=Sequences())
    batch_size = 100 if shape[0] == 1 else 16
    pool = Pool(reader.num_rows, batch_size, max(batch_size, reader.num_rows // 5))
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 64), nn.Linear(64, 10)
    )
    sides: dict[str, Callable[[], Iterator[dict[str, Tensor]]]] = {
        "none": lambda: by_threads(reader, pool, 0)
    }
    for num in (1, 2):
        sides[f"threads_{num}"] = lambda num=num: by_threads(reader, pool, num)
        sides[f"processes_{num}"] = lambda num=num: by_processes(reader, pool, num)
    spent: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, batches in sides.items():
            if is_cold:
                forget(directory)
            spent[side].append(train(batches(), network))
    found = {"rows_per_s": round(reader.num_rows / statistics.median(spent["none"]))}
    for side in [*sides][1:]:
        ratios = [a / b for a, b in zip(spent[side], spent["none"], strict=True)]
        found[side] = round(statistics.median(ratios), 3)
    return {"bench": "prefetch", "kind": kind, "rounds": rounds, **found}


if __name__ == "__main__":
    main()
