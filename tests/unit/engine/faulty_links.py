"""A fork server in whose ranks a message is damaged, as ``FAULT`` of a rank's environment says.

``flip:OP:RANK``: one bit of what the rank receives in each run of the operation is flipped.
``fail:OP:RANK``: the operation fails there. ``die:OP:RANK``: the process is killed there.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from engine.process import fork_server

BULK = 64
"""Only test messages have so many values; the others are barriers and JSON documents."""


def damaged(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, which damages what arrives where the environment says."""

    def call(*arguments: Any, **options: Any) -> Any:
        how, op, rank = (os.environ.get("FAULT") or "::").split(":")
        tensor = arguments[0]
        hits = op == name and str(dist.get_rank()) == rank
        hits = hits and tensor.dtype == torch.float32 and tensor.numel() >= BULK
        if hits and how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if hits and how == "fail":
            raise RuntimeError("NCCL error: unhandled system error. More on the next line\nsecond")
        found = real(*arguments, **options)
        if hits and how == "flip":
            tensor.view(torch.int32)[BULK - 1] ^= 1
        return found

    return call


if __name__ == "__main__":
    for name in ("all_reduce", "broadcast", "recv", "all_gather_single", "all_gather_into_tensor"):
        if hasattr(dist, name):
            short = "all_gather" if name.startswith("all_gather") else name
            setattr(dist, name, damaged(short, getattr(dist, name)))
    fork_server.main()
