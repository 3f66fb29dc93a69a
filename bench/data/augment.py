"""Measures the cost of augmentation: images per second on the MNIST network with and without.

Each kind alternates with the plain job in one process, on one thread (``bench.training.turns``).
Results are medians of the ratios of rounds, of wall time and of CPU time. With workers one thread
makes the batches ahead; it should have a core of its own. Prints a JSON line per kind.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.training.step import BATCH, META, spec
from bench.training.turns import TURN, Turn, figures, ratios, take_turns
from engine.core.spool import SpoolWriter
from engine.data.augmentation.augmenting import Augmenting
from engine.data.batches.rows import Prefetcher
from engine.data.columns.table import Table
from engine.data.sources.loading import load
from engine.plan.plan import parse_spec, plan
from engine.training.loop import train
from engine.training.report import Outputs
from glasshouse.spec import Source

FLIP = {"type": "RandomHorizontalFlip"}
CROP = {"type": "RandomCrop", "args": {"padding": 4}}
KINDS: dict[str, list[dict[str, Any]]] = {
    "flip, crop": [FLIP, CROP],
    "rotation, nearest": [{"type": "RandomRotation", "args": {"degrees": 15}}],
    "affine, bilinear": [
        {
            "type": "RandomAffine",
            "args": {
                "degrees": 15,
                "translate": [0.1, 0.1],
                "scale": [0.9, 1.1],
                "interpolation": "bilinear",
            },
        }
    ],
    "colours": [{"type": "ColorJitter", "args": {"brightness": 0.4, "contrast": 0.4}}],
    "erasing": [{"type": "RandomErasing"}],
    "noise": [{"type": "GaussianNoise"}],
}


def job_of(augment: list[dict[str, Any]], num_steps: int) -> Any:
    whole = spec(num_steps)
    whole["data"]["fields"]["image"]["augment"] = augment
    return parse_spec(plan(parse_spec(whole), {"d": META})["spec"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1])
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "train").mkdir()
        images = generator.integers(0, 256, (6000, 28, 28), dtype=np.uint8)
        np.save(directory / "train" / "0.npy", images)
        np.save(directory / "train" / "1.npy", generator.integers(0, 10, 6000).astype(np.uint8))
        (directory / "meta.json").write_text(json.dumps(META))
        spool = SpoolWriter(directory / "spool")
        for kind, augment in KINDS.items():
            for workers in given.workers:
                print(json.dumps(compare(kind, augment, workers, directory, spool, given)))
        spool.close()


def compare(
    kind: str,
    augment: list[dict[str, Any]],
    workers: int,
    directory: Path,
    spool: SpoolWriter,
    given: argparse.Namespace,
) -> dict[str, Any]:
    def run(job: Any, turn: Turn) -> None:
        source = Source(dataset="d", split="train")
        rows = load(source, job.data.fields, Table(directory), seed=0, device=torch.device("cpu"))
        rows.augmenting = Augmenting.of(0, job.data.fields)
        rows.ahead = Prefetcher(workers)
        out = Outputs(directory, spool.append, spool.settle, spool.flush)
        train(job, rows, {}, control=turn, out=out)
        rows.close()

    # Batches are also made ahead in the other job's turn. In a long turn these are few.
    length = given.steps if workers else TURN
    num_steps = (given.rounds + 1) * given.steps + 1
    jobs = (job_of(augment, num_steps), job_of([], num_steps))
    mine, plain = take_turns(run, jobs, length)
    cpu = statistics.median(cpu for _, cpu in mine)
    return {
        "bench": "augment",
        "kind": kind,
        "workers": workers,
        **figures(ratios(plain, mine, given.steps // length)),
        "images_per_cpu_s": round(BATCH * length / cpu),
        "rounds": given.rounds,
        "steps": given.steps,
    }


if __name__ == "__main__":
    main()
