"""Data parallelism: each process has the whole network and its share of every batch.

torch's ``DistributedDataParallel`` sums the gradients over the processes while the backward pass
runs. The loss of a process is already its part of the loss of the global batch, so gradients are
summed and not averaged.
"""

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engine.core.device import seed_all
from engine.distributed.group import Group


class Exchange:
    """The exchange of gradients in the backward pass."""

    def __init__(self) -> None:
        self.on_bucket: Callable[[], object] = lambda: None
        """Called when a bucket of gradients is ready, before it is sent."""

    def sum(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """Sum a bucket of gradients over the processes."""
        self.on_bucket()
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None  # noqa: S101 (asynchronous)
        return work.get_future().then(_first)


class Replicated:
    """A network of which each process has a copy. The parameters become those of process 0.

    Its buffers stay those of each process during training.
    """

    is_sharded = False

    def __init__(self, network: nn.Module, unused: Collection[str]) -> None:
        """``unused``: the parameters that no gradient reaches."""
        self.exchange = Exchange()
        self._wrapped = _wrapped(network, unused, self.exchange)

    def forward(self, batch: Mapping[str, Tensor], *, is_last: bool) -> dict[str, Tensor]:
        """Run the forward pass of a batch; ``is_last``: the last of its step."""
        with contextlib.nullcontext() if is_last else self._wrapped.no_sync():
            found: dict[str, Tensor] = self._wrapped(batch)
        return found


def _wrapped(
    network: nn.Module, unused: Collection[str], exchange: Exchange
) -> DistributedDataParallel:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # pyright: ignore[reportPrivateUsage]
        network, [*unused]
    )
    known = inspect.signature(DistributedDataParallel).parameters
    # renamed in torch 2.13
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True}
    wrapped = DistributedDataParallel(network, **options)
    wrapped.register_comm_hook(exchange, Exchange.sum)
    return wrapped


def _first(future: Any) -> Tensor:
    found: Tensor = future.value()[0]
    return found


def unreached(network: nn.Module, run_once: Callable[[], object]) -> set[str]:
    """Return the trainable parameters that have no gradient after a backward pass.

    ``run_once`` runs the pass, with no gradients before it.
    """
    run_once()
    return {
        name
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    }


def seed_step(seed: int, step: int, group: Group, *parts: int) -> None:
    """Seed torch's generators for a step of this process.

    Each share of the rows draws its own dropout. What it draws depends on the seed, the step and
    the number of the share only, so a job that resumes with as many shares draws the same. In a
    pipeline, ``parts`` are the micro-batch and the stage, so it does not depend on the schedule.
    ``torch.manual_seed`` would take half a millisecond: it records the call stack for backends that
    are not in use.
    """
    number = _mixed(seed, step, group.share, *parts)
    torch.default_generator.manual_seed(number)
    seed_all(number)


def _mixed(*numbers: int) -> int:
    """Mix numbers to 63 bits (SplitMix64, Steele et al., 2014)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) % 2**64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
        mixed ^= mixed >> 31
    return mixed >> 1
