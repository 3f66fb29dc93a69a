"""The fields that all kinds of job share: name, labels, devices, retries, limits of time."""

from typing import Annotated, Literal, Self

from pydantic import Field as Constraint
from pydantic import (
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)

from glasshouse.spec.parallel import MAX_PROCESSES, Parallel
from glasshouse.spec.strict import (
    Spec,
    WrongAt,
    check_at_most_one,
    repeated,
)

Label = Annotated[str, Constraint(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f:=,]+$")]
LabelValue = Annotated[str, Constraint(max_length=512, pattern=r"^[^\x00-\x1f]*$")]
JobName = Annotated[str, Constraint(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$")]


class Devices(Spec):
    """The hardware that the job runs on. A device that does not exist is rejected.

    ``device="cuda:1"`` of the client and ``--device cuda:1`` of the command line are short for
    ``{"type": "cuda", "ids": [1]}``.
    """

    type: Literal["auto", "cpu", "cuda"] = "auto"
    """``cpu``: CPU cores. ``cuda``: a CUDA device. ``auto``: a CUDA device if a worker has a
    healthy one, else CPU cores; ``infer`` and ``evaluate`` jobs also use CPU cores if all CUDA
    devices are busy."""
    count: int | None = Constraint(default=None, ge=1, le=MAX_PROCESSES)
    """Number of CUDA devices. Several need ``parallel``. Requires ``type`` ``cuda``; not together
    with ``ids``. Default: one, or ``parallel.processes``; ``parallel.strategy`` ``placed`` needs
    ``count`` or ``ids``. Example: ``2``."""
    ids: tuple[NonNegativeInt, ...] | None = Constraint(
        default=None, min_length=1, max_length=MAX_PROCESSES
    )
    """The numbers of the CUDA devices on their worker, as listed by ``GET /devices``. Several need
    ``parallel``: process 0 gets the first one, which with ``placed`` is device 0 of the layers.
    Requires ``type`` ``cuda``. Example: ``[2, 3]``."""
    threads: int | None = Constraint(default=None, ge=1, le=1024)
    """Number of CPU cores of each process, each with one torch thread, from the start to the end;
    on CUDA they launch kernels and prepare batches. Requires ``type`` ``cpu`` or ``cuda``. Default
    on CPU cores: at least one, and those that no other job needs, so the number changes as jobs
    come and leave; for ``infer`` and ``evaluate`` jobs, half of the worker's cores if they are
    free, at least one; for ``serve`` jobs, one core with one torch thread. Default on CUDA: one
    torch thread, and cores for it and for each of ``data.workers``, but no more than the worker
    has; for ``infer`` and ``evaluate`` jobs, one core if it is free. Example: ``4``."""
    worker: str | None = Constraint(default=None, min_length=1, max_length=200)
    """The name of the worker to run on. Default: any worker. Example: ``"host-a"``."""
    min_memory_gib: PositiveFloat | None = Constraint(default=None, le=1_000_000)
    """Minimum total memory of each device in GiB, as the driver reports it; of CPU cores, the
    memory of their worker. Default: any. Example: ``40``."""

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        wanted = {"count": ("cuda",), "ids": ("cuda",), "threads": ("cpu", "cuda")}
        for name, kinds in wanted.items():
            if self.type not in kinds and getattr(self, name) is not None:
                only = " or ".join(kinds)
                detail = f"{name} applies to type {only} only, and type is {self.type!r}"
                raise WrongAt(name, detail=f"{detail}: remove {name}, or set type to {only}")
        check_at_most_one(self, "count", "ids")
        if self.ids is not None and (again := repeated(self.ids)) is not None:
            detail = f"device {self.ids[again]} is listed twice: list each device once"
            raise WrongAt("ids", again, detail=detail)
        return self

    def check_one(self, why: str) -> None:
        """Require that at most one CUDA device is asked for.

        Raises:
            WrongAt: several are, with ``why`` that is wrong.
        """
        if self.num_devices not in (None, 1):
            place = "count" if self.ids is None else "ids"
            raise WrongAt(
                "devices", place, detail=f"{self.num_devices} devices are asked for; {why}"
            )

    @property
    def num_devices(self) -> int | None:
        """The number of CUDA devices that are asked for; None: it is left to ``parallel``."""
        return self.count if self.ids is None else len(self.ids)


class Retry(Spec):
    """Automatic restarts after failures of a worker, a process or a device."""

    max_restarts: int = Constraint(default=3, ge=0, le=1000)
    """Maximum number of restarts without progress; a newer checkpoint resets the count. Regardless
    of this value, three consecutive crashes of the process without progress end the job."""


class Job(Spec):
    """The fields that all kinds of job share."""

    name: JobName | None = None
    """A display name; it does not have to be unique. Default: a unique name such as ``mlp-7``.
    Example: ``"mnist-cnn"``."""
    labels: dict[Label, LabelValue] = Constraint(default={}, max_length=50)
    """Key-value pairs to find the job by: ``GET /jobs?label=key:value``. A key has 1 to 64
    characters, without ``:``, ``=`` and ``,``. Example: ``{"team": "vision"}``."""
    priority: int = Constraint(default=0, ge=-1000, le=1000)
    """Jobs with a higher priority start first; jobs of equal priority start in the order of
    submission."""
    devices: Devices = Devices()
    """The hardware that the job runs on. Example: ``{"type": "cpu", "threads": 4}``."""
    retry: Retry = Retry()
    """Automatic restarts after failures that the job did not cause."""
    timeout_s: PositiveFloat | None = None
    """Maximum running time of all attempts together, in seconds. Then the job stops at the next
    step boundary, saves a checkpoint and fails. Default: no limit. Example: ``86400``."""
    stall_timeout_s: PositiveFloat | None = None
    """Seconds without progress after which the job counts as stalled, and the event ``stalled`` is
    sent. Of several processes it is also the limit of a collective: if one process does not enter
    it, the others wait for so long. Default: the service's setting. Example: ``1800``."""
    on_stall: Literal["warn", "restart", "fail"] = "warn"
    """What to do with a stalled job. ``warn``: only send the event. ``restart``: stop or kill the
    process, and retry as after a lost worker. ``fail``: fail the job."""


def with_processes(parallel: Parallel, devices: Devices) -> Parallel:
    """Return ``parallel`` with its number of processes, which follows from ``devices`` if unset.

    Raises:
        WrongAt: it does not fit the devices.
    """
    asked, num_devices = parallel.processes, devices.num_devices
    if parallel.strategy == "none":
        fix = "set parallel.strategy to data, or ask for one device"
        devices.check_one(f"they need a parallel strategy: {fix}")
        return parallel
    if parallel.strategy == "placed":
        return parallel
    if asked is None and num_devices is None:
        detail = "the number of processes is missing: set parallel.processes"
        raise WrongAt("parallel", "processes", detail=detail)
    if None not in (asked, num_devices) and asked != num_devices:
        detail = f"{asked} processes need {asked} devices, and devices asks for {num_devices}: set"
        raise WrongAt("parallel", "processes", detail=f"{detail} both to the same number")
    return parallel if asked else parallel.model_copy(update={"processes": num_devices})
