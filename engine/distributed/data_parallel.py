"""Data parallelism: each process has the whole network and its share of every batch.

torch's ``DistributedDataParallel`` sums the gradients over the processes while the backward pass
runs. The loss of a process is already its part of the loss of the global batch, so gradients are
summed and not averaged.
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engine.distributed.group import Group


def data_parallel(network: nn.Module, unused: Collection[str]) -> DistributedDataParallel:
    """Wrap a network, whose parameters become those of process 0.

    Its buffers stay those of each process during training. ``unused``: the parameters that no
    gradient reaches.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # pyright: ignore[reportPrivateUsage]
        network, [*unused]
    )
    known = inspect.signature(DistributedDataParallel).parameters
    # renamed in torch 2.13
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True}
    wrapped = DistributedDataParallel(network, **options)
    wrapped.register_comm_hook(None, _sum)
    return wrapped


def _sum(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore[reportPrivateImportUsage]
    """Sum a bucket of gradients over the processes."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None  # noqa: S101 (asynchronous)
    return work.get_future().then(_first)


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


def seed_step(seed: int, step: int, group: Group) -> None:
    """Seed torch's generators for a step of this process.

    Each process draws its own dropout. What it draws depends on the seed, the step and its number
    only, so a job that resumes with as many processes draws the same.
    """
    torch.manual_seed(_mixed(seed, step, group.rank))


def _mixed(*numbers: int) -> int:
    """Mix numbers to 63 bits (SplitMix64, Steele et al., 2014)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) % 2**64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
        mixed ^= mixed >> 31
    return mixed >> 1
