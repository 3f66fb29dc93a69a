"""What this process waits for in its group, for the report on a job that has stalled.

torch's flight recorder keeps the newest collectives. It does not record what precedes the group and
what one process sends to another, as the stages of a pipeline do: that is noted here.
"""

import contextlib
import json
import os
from collections.abc import Generator
from typing import Any

from torch._C import _distributed_c10d

RECORDED = 256
"""How many of its newest collectives a process keeps."""
_RECORDERS = {"collectives": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""The flight recorders of torch by what they are here; that of NCCL is in builds for CUDA."""


class Waiting:
    """What this process waits for, other than collectives."""

    def __init__(self) -> None:
        self.is_joining = False
        """Whether it waits for the others to join the group."""
        self.has_joined = False
        self.sender: int | None = None
        """The rank for whose message it waits."""
        self.is_between_passes = False
        """Whether it waits for values or gradients of another stage of a pipeline."""

    @contextlib.contextmanager
    def joining(self) -> Generator[None]:
        """Note that the group is being joined; torch records its collectives from then on."""
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))
        self.is_joining = True
        yield
        self.is_joining, self.has_joined = False, True

    @contextlib.contextmanager
    def receiving(self, rank: int) -> Generator[None]:
        """Note that this process waits for what another one sends.

        If several threads wait at once, the note of one of them may be lost.
        """
        self.sender = rank
        yield
        self.sender = None


waiting = Waiting()


def snapshot() -> dict[str, Any]:
    """Return what this process waits for, and its newest collectives, as JSON.

    Any thread may call it while the others wait in a collective.
    """
    found: dict[str, Any] = {
        "joining": waiting.is_joining,
        "joined": waiting.has_joined,
        "receives_from": waiting.sender,
        "between_passes": waiting.is_between_passes,
    }
    for name, recorder in _RECORDERS.items():
        dump = getattr(_distributed_c10d, recorder, None)
        if dump is not None and waiting.has_joined:
            found[name] = json.loads(dump(True, False))
    return found
