"""The spec of a diagnose job."""

from typing import Literal, Self

from pydantic import Field as Constraint
from pydantic import (
    model_validator,
)

from glasshouse.spec.jobs.job import Job, Retry, with_processes
from glasshouse.spec.parallel import Parallel
from glasshouse.spec.strict import (
    WrongAt,
    repeated,
)

MAX_MESSAGE_BYTES = 1 << 30
"""The largest message of a diagnose job."""
VALUE_BYTES = 4
"""The size of the float32 values that a diagnose job sends."""


class DiagnoseJob(Job):
    """Measures and checks the communication of processes, and the memory of their devices.

    It runs all-reduce, all-gather, broadcast and point-to-point messages between the processes,
    and compares every received value. One process measures its memory only.
    """

    kind: Literal["diagnose"]
    """Selects a diagnose job."""
    parallel: Parallel = Parallel(strategy="none")
    """The processes that communicate. All strategies measure the same operations. Default: one
    process, which does not communicate. Example: ``{"strategy": "data", "processes": 2}``."""
    retry: Retry = Retry(max_restarts=0)
    """Automatic restarts. Default: none, because a failure is what the job looks for."""
    sizes_bytes: tuple[int, ...] = Constraint(
        default=(1024, 65_536, 1 << 20, 16 << 20), min_length=1, max_length=16
    )
    """Sizes of the messages in bytes, at most 16. Each is a multiple of 4, the size of a float32
    value, and at most 1 GiB. Example: ``[1024, 1048576]``."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        for number, size in enumerate(self.sizes_bytes):
            self._check_size(number, size)
        if (again := repeated(self.sizes_bytes)) is not None:
            detail = f"{self.sizes_bytes[again]} is listed twice: list each size once"
            raise WrongAt("sizes_bytes", again, detail=detail)
        if self.parallel.strategy == "placed":
            detail = "strategy placed runs one process, which sends no messages: set data, with a"
            raise WrongAt("parallel", "strategy", detail=f"{detail} process for each device")
        for name in ("schedule", "micro_batches", "cpu_offload"):
            if value := getattr(self.parallel, name):
                shown = "true" if value is True else value
                detail = f"{name} ({shown}) is that of a training, and a diagnose job trains"
                raise WrongAt("parallel", name, detail=f"{detail} nothing: remove {name}")
        counted = with_processes(self.parallel, self.devices)
        object.__setattr__(self, "parallel", counted)  # frozen from here on
        return self

    def _check_size(self, number: int, size: int) -> None:
        if not 0 < size <= MAX_MESSAGE_BYTES:
            detail = f"a message has 4 to {MAX_MESSAGE_BYTES} bytes (1 GiB), and this size is"
            raise WrongAt("sizes_bytes", number, detail=f"{detail} {size}: change it")
        if size % VALUE_BYTES:
            near = size - size % VALUE_BYTES or VALUE_BYTES
            detail = f"{size} is no multiple of 4, the size of a float32 value: for one, {near}"
            raise WrongAt("sizes_bytes", number, detail=detail)

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.parallel.processes or 1
