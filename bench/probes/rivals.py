"""Compares the cost of watching with that of other tools: same network, alternating, one process.

Not part of ``make bench``, because it needs packages that nothing else here needs. In an
environment of its own, from the root of the repository:

    python -m venv /tmp/rivals
    /tmp/rivals/bin/pip install -c constraints.txt -e '.[server]' tensorboard wandb
    /tmp/rivals/bin/python -m bench.probes.rivals

The network is the MNIST network of ``bench.training.step``. Every ratio is relative to a plain
hand-written torch loop that alternates with it every five steps (``bench.training.turns``). All
sides run with the allocator and garbage collector settings of our ranks, which help tools that keep
copies. What each side watches:

- ``glasshouse``: statistics of every output, output gradient, parameter and parameter gradient;
  with ``full``, the same tensors whole.
- ``hooks``: the same tensors, each copied by ``.cpu().numpy()`` and kept until the end of the step.
- ``tensorboard``: a histogram of every parameter and its gradient.
- ``wandb``: ``watch(log="all")`` offline: the same as ``tensorboard``, and the loss at every step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.probes.watching import ALL, NETWORKS, Bench, cnn
from bench.training.step import BATCH, ByHand
from bench.training.turns import TURN, Times, Turn, figures, ratios, take_turns
from engine.process.rank import calm_collector
from worker.processes.fork_server import FIXED

NUM_STEPS = 50


class Watched(ByHand):
    """The hand-written loop, with methods that a subclass overrides to watch."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, every: int) -> None:
        super().__init__(images, labels)
        self.every = every
        self.step = 0

    def begin(self) -> None:
        """Called before the forward pass of a due step."""

    def record(self) -> None:
        """Called after the backward pass of a due step."""

    def on_step(self, loss: float) -> None:
        """Called after every step."""

    def train(self, num_steps: int, turn: Turn) -> None:
        order = torch.randperm(len(self.images))
        for step in range(num_steps):
            due = self.step % self.every == 0
            if due:
                self.begin()
            rows = order[step * BATCH % len(order) :][:BATCH]
            loss = self.loss_fn(self.network(self.images[rows]), self.labels[rows])
            loss.backward()
            if due:
                self.record()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.on_step(loss.item())
            self.step += 1
            assert not turn.cancel_requested


class Hooks(Watched):
    """Watches with hooks that copy every tensor."""

    def begin(self) -> None:
        self.kept: dict[str, Any] = {}
        self.hooks = [
            module.register_forward_hook(partial(self.on_forward, name))
            for name, module in self.network.named_children()
        ]

    def on_forward(self, name: str, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self.keep(f"{name}/output", output)
        output.register_hook(partial(self.keep, f"{name}/output_grad"))

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        self.kept[name] = tensor.detach().cpu().numpy().copy()

    def record(self) -> None:
        for name, parameter in self.network.named_parameters():
            self.keep(f"{name}/param", parameter)
            assert parameter.grad is not None
            self.keep(f"{name}/param_grad", parameter.grad)
        for hook in self.hooks:
            hook.remove()
        assert len(self.kept) == 2 * 8 + 2 * 6
        self.kept.clear()


class TensorBoard(Watched):
    """Writes histograms of parameters and gradients."""

    def __init__(self, *arguments: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(*arguments)
        self.writer: Any = SummaryWriter(tempfile.mkdtemp(dir=tempfile.gettempdir()))

    def record(self) -> None:
        for name, parameter in self.network.named_parameters():
            self.writer.add_histogram(name, parameter, self.step)
            self.writer.add_histogram(f"{name}.grad", parameter.grad, self.step)


class Wandb(Watched):
    """Records what ``wandb.watch`` records by default, and the loss."""

    def __init__(self, *arguments: Any) -> None:
        import wandb

        super().__init__(*arguments)
        settings = wandb.Settings(silent=True)
        self.run_of_theirs: Any = wandb.init(
            project="bench", mode="offline", dir=tempfile.gettempdir(), settings=settings
        )
        self.run_of_theirs.watch(self.network, log="all", log_freq=self.every)

    def on_step(self, loss: float) -> None:
        self.run_of_theirs.log({"loss": loss})


class Ours:
    """The engine, training a job with one probe."""

    def __init__(self, bench: Bench, probe: dict[str, Any] | None) -> None:
        self.bench, self.probe = bench, probe

    def train(self, num_steps: int, turn: Turn) -> None:
        self.bench.run(self.bench.job(self.probe, num_steps), turn)


RIVALS: dict[str, Callable[..., Watched]] = {
    "hooks": Hooks,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}


def sides_of(images: torch.Tensor, labels: torch.Tensor, bench: Bench, every: int) -> dict:
    probe = {"kinds": ALL, "every": every}
    sides: dict[str, Any] = {"glasshouse, nothing watched": Ours(bench, None)}
    sides["glasshouse, statistics of everything"] = Ours(bench, probe)
    sides["glasshouse, whole tensors of everything"] = Ours(bench, probe | {"want": ["full"]})
    return sides | {name: make(images, labels, every) for name, make in RIVALS.items()}


def compare(plain: Watched, side: Any, rounds: int, bench: Bench) -> list[Times]:
    """Return the ratios of a side to the plain loop; a turn ends when its tensors are written."""
    num_steps = (rounds + 1) * NUM_STEPS + 2
    sides = take_turns(
        lambda one, turn: one.train(num_steps, turn), (side, plain), TURN, bench.settled
    )
    return ratios(*sides, NUM_STEPS // TURN)


def main() -> None:
    settings = {name: value for name, value in FIXED.items() if name.startswith("MALLOC_")}
    if any(os.environ.get(name) != value for name, value in settings.items()):
        command = [sys.executable, "-m", "bench.probes.rivals", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **settings})  # noqa: S606
    parser = argparse.ArgumentParser(prog="python -m bench.probes.rivals")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, help="default: 1, then 25, each in its own process")
    given = parser.parse_args()
    if given.every is None:
        sys.exit(max(_again(every) for every in (1, 25)))
    torch.set_num_threads(given.threads)
    calm_collector()
    network = next(name for name, (make, *_) in NETWORKS.items() if make is cnn)
    with tempfile.TemporaryDirectory() as directory:
        tempfile.tempdir = directory  # files of the other tools are removed with it
        bench = Bench(Path(directory) / "data", cnn, NUM_STEPS)
        _, _, (pixels, classes) = cnn()
        images = torch.from_numpy(pixels).to(torch.float32).reshape(-1, 1, 28, 28) / 255
        labels = torch.from_numpy(classes).long()
        plain = Watched(images, labels, every=10**9)
        sides = sides_of(images, labels, bench, given.every)
        for name, side in sides.items():
            line = {"bench": "rivals", "network": network, "side": name, "every": given.every}
            line |= figures(compare(plain, side, given.rounds, bench))
            about = {"threads": given.threads, "rounds": given.rounds}
            print(json.dumps(line | about), flush=True)
        if "wandb" in sides:
            sides["wandb"].run_of_theirs.finish()
        bench.close()


def _again(every: int) -> int:
    """Run the whole comparison in a fresh process."""
    command = [sys.executable, "-m", "bench.probes.rivals", *sys.argv[1:], "--every", str(every)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    main()
