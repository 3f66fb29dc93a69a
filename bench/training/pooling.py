"""Measures what the native max pooling with ReLU gains in a training step.

Prints one JSON line for each network and precision: the CPU time of a step (forward, loss,
backward, SGD) in ``channels_last`` with torch's pooling over that with ``engine.native.pooling``.
The two take turns of a few steps in one process. CPU time is that of the process, so other work of
the machine counts little; measure with one thread on a machine that is not idle.
"""

import argparse
import json
import statistics
import time

import torch
from torch import Tensor, nn

from engine.native import pooling


class Pooled(nn.Module):
    """Max pooling and its ReLU: native, or torch's."""

    native = True

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return what ``engine.network.layers`` computes with the kernel, or without it."""
        if Pooled.native:
            assert pooling.takes(self.pool, x)
            return pooling.relu_of_max_pool2d(self.pool, x)
        return torch.relu(self.pool(x))


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return each network with a batch."""
    mnist = nn.Sequential(
        nn.Conv2d(1, 20, 5, padding=2), Pooled(), nn.Conv2d(20, 20, 5, padding=2), Pooled(),
        nn.Flatten(), nn.Linear(980, 10),
    )  # fmt: skip
    layers: list[nn.Module] = []
    for before, width in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), Pooled()]
    vgg = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10))
    return {
        "mnist_cnn, batch 100": (mnist, torch.rand(100, 1, 28, 28)),
        "six convolutions of VGG, 32 x 32, batch 64": (vgg, torch.rand(64, 3, 32, 32)),
    }


def ratios(network: nn.Module, x: Tensor, *, low: bool, rounds: int, steps: int) -> list[float]:
    """Return torch's CPU time over the kernel's, for each round."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    labels = torch.randint(10, (len(x),))

    def cpu_s(native: bool) -> float:
        Pooled.native = native
        began = time.process_time()
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                scores = network(x)
            nn.functional.cross_entropy(scores.float(), labels).backward()
            optimizer.step()
        return time.process_time() - began

    found = [(cpu_s(False), cpu_s(True)) for _ in range(rounds + 2)]
    return [torchs / native for torchs, native in found[2:]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for name, (network, images) in networks().items():
        network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        x = images.contiguous(memory_format=torch.channels_last)
        for low in (False, True):
            found = ratios(network, x, low=low, rounds=args.rounds, steps=args.steps)
            line = {
                "bench": "pooling",
                "network": name,
                "precision": "bfloat16" if low else "float32",
                "threads": args.threads,
                "cpu_ratio": round(statistics.median(found), 3),
                "quartiles": [round(item, 3) for item in statistics.quantiles(found)[::2]],
                "rounds": args.rounds,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
