"""How one training job is spread over several processes."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field as Constraint
from pydantic import model_validator

from glasshouse.spec.strict import Spec, WrongAt

MAX_PROCESSES = 256


class Parallel(Spec):
    """Trains one network with several processes on one host.

    ``data``: each process has the whole network and trains on its share of every batch. The
    gradients are summed over the processes before each update (torch's
    ``DistributedDataParallel``), so a step is the step of one process with the global batch, up to
    rounding.
    """

    strategy: Literal["none", "data"] = "data"
    """``none``: one process. ``data``: each process computes its share of every batch."""
    processes: int | None = Constraint(default=None, ge=1, le=MAX_PROCESSES)
    """Number of processes. On CPU cores, each gets ``devices.threads`` cores; on CUDA, each gets
    one device. Default: on CUDA the number of devices; on CPU it must be given. Example: ``2``."""

    @model_validator(mode="after")
    def _check_one_process(self) -> Self:
        if self.strategy == "none" and self.processes not in (None, 1):
            detail = f"strategy none runs one process, and processes is {self.processes}: remove"
            raise WrongAt("processes", detail=f"{detail} processes, or set strategy to data")
        return self


def num_processes(resolved: Mapping[str, Any]) -> int:
    """Return the number of processes of a resolved spec."""
    parallel: Mapping[str, Any] = resolved.get("parallel") or {}
    return parallel.get("processes") or 1
