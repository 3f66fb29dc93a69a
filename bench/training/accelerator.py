"""Compares training on an accelerator with a hand-written torch loop: GPT-2 (small) and ResNet-18.

``python -m bench.training.accelerator`` trains each network in blocks of steps, by hand and with
the engine, in turns; each block starts anew, from the same weights and with the same rows. The
engine runs as in a rank, and is measured unwatched, with a probe of all layers every 10 steps under
the default limit of its cost, and with statistics of everything at every step.

With several CUDA devices it does the same with one process for each, with ``data`` against
DistributedDataParallel and with ``fsdp`` against FSDP2. Then each block has processes of its own.

``--device cpu --small`` runs tiny networks on the CPU: that shows that it works, not how fast.

Prints one JSON line for each network and strategy:

- ``ratio``: the time of the hand-written loop divided by the engine's, in the same round: the
  median, the smallest and the largest.
- ``step_ms``, ``tokens_per_s`` or ``images_per_s`` of all processes together, and ``peak_mib``, the
  most memory that tensors of process 0 took on its device: medians.
- ``loss_difference``: the largest relative difference of a loss of the first steps from that of the
  hand-written loop. It fails if they do not compute the same.
"""

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.data.memory import write
from bench.training import networks_by_hand as by_hand
from engine.core import device as devices
from engine.core.spool import SpoolWriter, read_frames
from engine.metrics.metrics import wanted
from engine.network.network import Network
from engine.optim.parameter_options import fill
from engine.plan.plan import parse_spec, plan
from engine.process import rank
from engine.training.report import Outputs

TARGET = 0.98
SEED = 0
ADAMW = {"lr": 1e-4, "fused": True}
HAND = "by_hand"
ALL = ["output", "output_grad", "param", "param_grad"]
PROBES: dict[str, list[dict[str, Any]]] = {
    "unwatched": [],
    "watched": [{"layers": ["*"], "kinds": ["output", "output_grad", "param_grad"], "every": 10}],
    "everything": [{"layers": ["*"], "kinds": ALL, "every": 1, "max_overhead": None}],
}
"""The engine's sides."""
STRATEGIES = ("data", "fsdp")
COMPARED = 5
"""The number of steps whose losses are compared; later ones differ more and more by rounding."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Task:
    """A network, its rows, and how both are written by hand."""

    spec: dict[str, Any]
    """The parts of a job that are the network's own."""
    batch_size: int
    """Rows of a batch in each process."""
    columns: Callable[[int], dict[str, np.ndarray]]
    """Draws that many rows."""
    unit: str
    per_row: int
    """The number of units, tokens or images, of a row."""
    network: Callable[[], nn.Module]
    criterion: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[Any, Tensor], tuple[Tensor, Tensor]]


def transformer(*, is_small: bool) -> Task:
    """GPT-2 (small), or as many layers of a tiny width."""
    sizes = {"num_tokens": 50257, "block_size": 1024, "num_layers": 12, "num_heads": 12}
    sizes |= {"width": 768}
    if is_small:
        sizes |= {"num_tokens": 64, "block_size": 16, "num_heads": 2, "width": 32}

    def columns(num_rows: int) -> dict[str, np.ndarray]:
        shape = (num_rows, sizes["block_size"] + 1)
        ids = np.random.default_rng(0).integers(0, sizes["num_tokens"], shape, np.int32)
        return {"tokens": ids[:, :-1], "next": ids[:, 1:]}

    field = {"type": "integer_sequence", "dim": sizes["num_tokens"]}
    args = {**sizes, "initializer_range": 0.02}
    spec = {
        "network": {"type": "preset", "preset": "transformer_lm", "args": args},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["scores", "next"]},
        "fields": {"tokens": field, "next": field},
    }
    return Task(
        spec, 4 if is_small else 16, columns, "tokens", sizes["block_size"],
        partial(by_hand.Gpt, **sizes), by_hand.loss_of_tokens, by_hand.batch_of_tokens,
    )  # fmt: skip


def resnet(*, is_small: bool) -> Task:
    """ResNet-18 on images of 224 by 224, or of 32 by 32."""
    side, num_classes = (32, 10) if is_small else (224, 1000)

    def columns(num_rows: int) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(0)
        images = generator.integers(0, 256, (num_rows, 3, side, side), np.uint8)
        return {"image": images, "label": generator.integers(0, num_classes, num_rows)}

    args = {"num_classes": num_classes}
    spec = {
        "network": {"type": "preset", "preset": "resnet18", "args": args},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "fields": {"image": {"type": "dense"}, "label": {"type": "integer", "dim": num_classes}},
    }
    return Task(
        spec, 8 if is_small else 256, columns, "images", 1,
        partial(by_hand.Resnet18, num_classes), by_hand.loss_of_images, by_hand.batch_of_images,
    )  # fmt: skip


TASKS = {"transformer": transformer, "resnet": resnet}


class Block(NamedTuple):
    """What was measured of some steps."""

    seconds: float
    losses: list[float]
    """Of all steps, also those before the measured ones."""
    peak_bytes: int | None


@dataclass(frozen=True)
class Place:
    """Where a block runs, and for how long. JSON, for processes of their own."""

    network: str
    is_small: bool
    device_type: str
    table: str
    """The directory of the dataset."""
    precision: str
    warm_up: int
    """Steps before the measured ones."""
    steps: int
    strategy: str = "none"
    size: int = 1
    """The number of processes."""
    number: int = 0
    """Of this process."""
    store: str = ""
    """The file through which processes find each other."""

    @property
    def device(self) -> torch.device:
        """The first device that this process sees."""
        return devices.named(self.device_type)

    @property
    def task(self) -> "Task":
        """What is trained."""
        return TASKS[self.network](is_small=self.is_small)

    @property
    def memory_format(self) -> str:
        """The layout of images and the weights of convolutions. FSDP2 takes one only."""
        is_fast = self.network == "resnet" and self.strategy != "fsdp"
        return "channels_last" if is_fast else "contiguous_format"

    @property
    def meta(self) -> dict[str, Any]:
        """The description of the dataset."""
        return json.loads((Path(self.table) / "meta.json").read_text())


class Window:
    """Takes the time of the measured steps. It is the control of a job, which asks at each step."""

    wanted = None
    threads = None
    listen = None
    ends_as = "cancelled"
    orders = ()

    def __init__(self, place: Place) -> None:
        self._place = place
        self._num_steps = 0
        self._began = 0.0
        self.seconds = math.nan
        self.peak_bytes: int | None = None
        if devices.is_accelerator(place.device):
            torch.empty(0, device=place.device)  # there are no statistics before the first tensor
            torch.accelerator.reset_peak_memory_stats(place.device)

    @property
    def cancel_requested(self) -> bool:
        """Read once in each step."""
        self.step()
        return False

    def step(self) -> None:
        """Count a step."""
        self._num_steps += 1
        if self._num_steps == self._place.warm_up:
            devices.synchronize(self._place.device)
            self._began = time.perf_counter()
        elif self._num_steps == self._place.warm_up + self._place.steps:
            devices.synchronize(self._place.device)
            self.seconds = time.perf_counter() - self._began
            if devices.is_accelerator(self._place.device):
                self.peak_bytes = torch.accelerator.max_memory_allocated(self._place.device)


@cache
def job_of(place: Place, side: str) -> Any:
    """Return the planned job of a side. It has one step more than are measured."""
    task = place.task
    own = {name: item for name, item in task.spec.items() if name != "fields"}
    own |= {"memory_format": place.memory_format}
    spec: dict[str, Any] = {
        "kind": "train",
        **own,
        "seed": SEED,
        "optimizer": {"type": "AdamW", "args": ADAMW},
        "precision": place.precision,
        "data": {
            "train": {"dataset": "d", "split": "all"},
            "fields": task.spec["fields"],
            "batch_size": task.batch_size,
        },
        "stop": {"steps": place.warm_up + place.steps + 1},
        "checkpoint": {"every_steps": 10**9, "every_s": None},
        "probes": PROBES.get(side, []),
    }
    if place.size > 1:
        spec["parallel"] = {"strategy": place.strategy, "processes": place.size}
    return parse_spec(plan(parse_spec(spec), {"d": place.meta})["spec"])


def ours(place: Place, side: str) -> Block:
    """Train with the engine, as a rank does."""
    job = job_of(place, side)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        spool = SpoolWriter(directory / "spool")
        window = Window(place)
        out = Outputs(directory, spool.append, spool.settle, spool.flush)
        assignment = rank.Assignment(
            spec=job,
            tables={"d": Path(place.table)},
            device=place.device,
            num_threads=None,
            checkpoint=None,
            trained_by=None,
            rank=place.number,
            size=place.size,
            store=Path(place.store),
        )
        rank.run(assignment, control=window, out=out)
        spool.close()
        records, _ = read_frames(directory / "spool", 0, 10**7)
    losses = [r["values"]["loss"] for r in records if "loss" in r.get("values", {})]
    return Block(window.seconds, losses, window.peak_bytes)


def hand(place: Place) -> Block:
    """Train with a loop by hand that waits for the device only where the time is taken."""
    task, device = place.task, place.device
    network, window = started(place), Window(place)
    network.to(device)
    network.to(memory_format=getattr(torch, place.memory_format))
    if place.size > 1:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
        dist.init_process_group(
            init_method=f"file://{place.store}", rank=place.number, world_size=place.size
        )
        network = by_hand.parallelized(network, place.strategy, device)
    optimizer, rows = torch.optim.AdamW(network.parameters(), **ADAMW), rows_of(place)
    low, found = PRECISIONS[place.precision], list[Tensor]()
    for _ in range(place.warm_up + place.steps + 1):
        x, target = next(rows)
        with torch.autocast(device.type, low, enabled=low is not None):
            scores = network(x)
        loss = task.criterion(scores, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.detach())
        window.step()
    losses = torch.stack(found) / place.size
    if place.size > 1:
        dist.all_reduce(losses)
    return Block(window.seconds, losses.tolist(), window.peak_bytes)


def started(place: Place) -> nn.Module:
    """Return the network by hand with the weights that the engine starts with."""
    job = job_of(place, HAND)
    torch.manual_seed(SEED)
    engines = Network(job.network, wanted(job))
    fill(job.network, engines)
    network = place.task.network()
    pairs = zip(network.state_dict(), engines.state_dict().values(), strict=True)
    network.load_state_dict(dict(pairs))
    return network


def rows_of(place: Place) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a process. All rows stay on the device, as they are stored."""
    task, meta, files = place.task, place.meta, Path(place.table) / "all"
    columns = {
        item["name"]: torch.from_numpy(np.load(files / item["file"])).to(place.device)
        for item in meta["columns"]
    }
    num_rows, size = meta["splits"]["all"], task.batch_size
    for order in by_hand.orders(num_rows, SEED, place.device):
        for first in range(place.number * size, num_rows, size * place.size):
            x, target = task.batch(columns, order[first : first + size])
            yield x.contiguous(memory_format=getattr(torch, place.memory_format)), target


# --- processes -------------------------------------------------------------------------------


def block(place: Place, side: str) -> Block:
    """Train some steps in this process, on a device on which nothing is left of earlier blocks."""
    gc.collect()
    return hand(place) if side == HAND else ours(place, side)


def block_of_processes(place: Place, side: str) -> Block:
    """Train some steps in processes of their own; return what process 0 has measured."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = seen.split(",") if seen else [*map(str, range(place.size))]
    with tempfile.TemporaryDirectory() as name:
        started: list[subprocess.Popen[str]] = []
        for number in range(place.size):
            own = replace(place, number=number, store=str(Path(name) / "store"))
            command = [sys.executable, "-m", "bench.training.accelerator", "--process"]
            command += [json.dumps({"side": side, "place": asdict(own)})]
            sees = {"CUDA_VISIBLE_DEVICES": visible[number]} if place.device_type == "cuda" else {}
            output = subprocess.DEVNULL if number else subprocess.PIPE
            started.append(
                subprocess.Popen(command, env=os.environ | sees, stdout=output, text=True)
            )
        said, _ = started[0].communicate()
        codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"{side} of {place.strategy}: the processes ended with {codes}")
    return Block(*json.loads(said.splitlines()[-1]))


def serve(side: str, place: Place) -> None:
    """Be one of several processes; process 0 prints what it has measured."""
    rank.calm_collector()
    found = block(place, side)
    if place.number == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # torch 2.13 aborts now and then when the interpreter ends after gloo was used


# --- what is reported ------------------------------------------------------------------------


def name_of(device: torch.device) -> str:
    """Return the name of a device."""
    read = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if read is None else read(device)


def loss_difference(mine: Block, theirs: Block) -> float:
    """Return the largest relative difference of the first losses."""
    pairs = [*zip(mine.losses, theirs.losses, strict=True)][:COMPARED]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def figures(place: Place, found: dict[str, list[Block]]) -> dict[str, Any]:
    """Return medians over the rounds, by side."""
    task, middle = place.task, statistics.median
    ratio: dict[str, dict[str, float]] = {}
    difference: dict[str, float] = {}
    for side in [*found][1:]:
        pairs = [*zip(found[side], found[HAND], strict=True)]
        ratios = [theirs.seconds / mine.seconds for mine, theirs in pairs]
        read = {"median": middle, "min": min, "max": max}
        ratio[side] = {name: round(of(ratios), 4) for name, of in read.items()}
        difference[side] = float(f"{max(loss_difference(*pair) for pair in pairs):.2g}")
    step_s = {side: middle(one.seconds for one in found[side]) / place.steps for side in found}
    peaks = {side: [one.peak_bytes for one in found[side]] for side in found}
    units = task.batch_size * task.per_row * place.size
    return {
        "ratio": ratio,
        "step_ms": {side: round(1e3 * value, 3) for side, value in step_s.items()},
        f"{task.unit}_per_s": {side: round(units / value) for side, value in step_s.items()},
        "peak_mib": {
            side: None if None in values else round(middle(values) / 2**20)
            for side, values in peaks.items()
        },
        "loss_difference": difference,
    }


def compare(place: Place, rounds: int, sides: list[str]) -> dict[str, Any]:
    """Let the sides take turns, and return what was measured."""
    found: dict[str, list[Block]] = {side: [] for side in (HAND, *sides)}
    if place.size > 1:
        for _ in range(rounds):
            for side, blocks in found.items():
                blocks.append(block_of_processes(place, side))
        return figures(place, found)
    for number in range(rounds + 1):
        for side, blocks in found.items():
            one = block(place, side)
            if number:  # the first round is a warm-up
                blocks.append(one)
    return figures(place, found)


def positive(text: str) -> int:
    """Read a number of steps, rounds or processes."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", help="its type, such as cuda; default: the accelerator")
    parser.add_argument("--network", choices=[*TASKS], nargs="+", default=[*TASKS])
    parser.add_argument("--side", choices=[*PROBES], nargs="+", default=[*PROBES])
    parser.add_argument("--strategy", choices=STRATEGIES, nargs="+", default=[*STRATEGIES])
    parser.add_argument("--processes", type=positive, help="default: the number of CUDA devices")
    parser.add_argument("--precision", choices=[*PRECISIONS], default="bfloat16")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--warm-up", type=positive, default=20, help="steps before those measured")
    parser.add_argument("--steps", type=positive, default=50, help="steps of a block")
    parser.add_argument("--small", action="store_true", help="tiny networks")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.process:
        return given
    seen = devices.visible()
    if given.device is None and not seen:
        parser.error("torch finds no accelerator; --device cpu --small runs on the CPU")
    given.device = given.device or seen[0].type
    kinds = {"cpu", *(one.type for one in seen)}
    if given.device not in kinds:
        parser.error(f"--device {given.device}: torch finds {', '.join(sorted(kinds))}")
    count = len(seen) if given.device == "cuda" else 1
    given.processes = given.processes or count
    if given.device != "cpu" and given.processes > count:
        parser.error(f"--processes {given.processes}: each takes a CUDA device; there are {count}")
    return given


def main() -> int:
    """Measure, and print a line for each network and strategy."""
    given = parsed()
    if given.process:
        asked = json.loads(given.process)
        serve(asked["side"], Place(**asked["place"]))
    rank.calm_collector()
    worst = 0.0
    for network in given.network:
        with tempfile.TemporaryDirectory() as name:
            place = Place(
                network, given.small, given.device, f"{name}/table", given.precision,
                given.warm_up, given.steps,
            )  # fmt: skip
            rows = place.task.batch_size * given.processes * max(1, 8 // given.processes)
            write(Path(place.table), place.task.columns(rows))
            several = given.strategy if given.processes > 1 else []
            for strategy, size in [("none", 1), *((one, given.processes) for one in several)]:
                where = replace(place, strategy=strategy, size=size)
                line = compare(where, given.rounds, given.side)
                worst = max([worst, *line["loss_difference"].values()])
                print(json.dumps(about(where) | line | {"rounds": given.rounds}), flush=True)
    if not worst <= TOLERANCE[given.precision]:
        print("the sides do not compute the same: see loss_difference", file=sys.stderr)
        return 1
    return 0


def about(place: Place) -> dict[str, Any]:
    """Return what a line was measured of."""
    return {
        "bench": "accelerator",
        "network": f"{place.network}, small" if place.is_small else place.network,
        "strategy": place.strategy,
        "processes": place.size,
        "device": name_of(place.device),
        "torch": torch.__version__,
        "precision": place.precision,
        "steps": place.steps,
        "target": TARGET,
    }


if __name__ == "__main__":
    sys.exit(main())
