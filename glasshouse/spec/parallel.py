"""How one training job is spread over several processes, or over several devices of one."""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field as Constraint
from pydantic import model_validator

from glasshouse.spec.strict import Spec, WrongAt

MAX_PROCESSES = 256
AXES = ("data", "fsdp", "tensor", "pipeline")
"""What a number of processes may be divided into, the outermost first."""


class Parallel(Spec):
    """Trains one network with several processes or devices on one host.

    ``data``: each process has the whole network and trains on its share of every batch. The
    gradients are summed over the processes before each update (torch's
    ``DistributedDataParallel``), so a step is the step of one process with the global batch, up to
    rounding.

    ``fsdp``: as ``data``, but each process keeps only a part of the parameters, their gradients and
    the optimizer state. torch gathers the parameters of a layer when it needs them
    (``fully_shard``). Takes less memory and more communication.

    ``tensor``: all processes have the same rows, and each computes and keeps a part of each Linear,
    Embedding and TiedEmbedding layer, and of the heads of DotProductAttention (Shoeybi et al.,
    2019). Takes less memory and messages within each step. ``POST /plan`` lists the layers that are
    divided.

    ``placed``: one process has several CUDA devices, and each layer runs on the one that its
    ``device`` names. What a layer reads from another device is copied to its own.

    ``pipeline``: each process has the layers of one stage, or of several. A batch is divided into
    micro-batches, which pass from stage to stage, so that processes compute at the same time
    (torch's ``torch.distributed.pipelining``). Takes less memory and little communication. Layers
    name their ``stage``, or the plan divides them by memory.

    Give ``data``, ``fsdp``, ``tensor`` and ``pipeline`` sizes instead of a strategy to combine
    them: with ``{"data": 2, "fsdp": 2}`` two groups of two processes each have one copy of the
    network, and with ``{"fsdp": 2, "tensor": 2}`` the layers are divided between two processes,
    each of which shares its part with another. ``{"data": 2, "pipeline": 2}`` runs two pipelines,
    and ``{"fsdp": 2, "pipeline": 2}`` too, with each stage shared between two processes.

    With ``cpu_offload``, what ``fsdp`` keeps in each process is in host memory.
    """

    strategy: Literal["none", "data", "fsdp", "tensor", "pipeline", "placed", "auto"] = "data"
    """``none``: one process. ``data``: each process computes its share of every batch. ``fsdp``:
    and keeps a part of the network. ``tensor``: each process computes a part of the layers.
    ``pipeline``: each process computes some of the layers. ``placed``: one process, whose layers
    name their devices. ``auto``: ``data`` if that fits into the memory of the devices that the job
    may get, or if their memory is not known; else ``fsdp`` if it fits; else, if
    ``data.global_batch_size`` is set, the first of ``tensor`` and ``pipeline`` that fits."""
    processes: int | None = Constraint(default=None, ge=1, le=MAX_PROCESSES)
    """Number of processes. On CPU cores, each gets ``devices.threads`` cores; on CUDA, each gets
    one device, and cores beside it. Default: on CUDA the number of devices; on CPU it must be
    given. Example: ``2``."""
    data: int | None = Constraint(default=None, ge=1, le=MAX_PROCESSES)
    """Number of copies of the network, for a combination with others. Example: ``2``."""
    fsdp: int | None = Constraint(default=None, ge=1, le=MAX_PROCESSES)
    """Number of processes that share a copy of the network. Example: ``2``."""
    tensor: int | None = Constraint(default=None, ge=1, le=MAX_PROCESSES)
    """Number of processes among which layers are divided. Example: ``2``."""
    pipeline: int | None = Constraint(default=None, ge=1, le=MAX_PROCESSES)
    """Number of processes of a pipeline. Example: ``2``."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] | None = None
    """Of a pipeline: the order of its passes. ``gpipe``: all forward passes of a step, then all
    backward passes (Huang et al., 2019). ``1f1b``: a stage runs the backward pass of a micro-batch
    as soon as it can, and so keeps the activations of fewer (Narayanan et al., 2019).
    ``interleaved``: ``1f1b`` with several stages in each process, which then waits less and sends
    more (Narayanan et al., 2021). Default: ``1f1b``. Example: ``"gpipe"``."""
    micro_batches: int | None = Constraint(default=None, ge=1, le=10_000)
    """Of a pipeline: the number of micro-batches that each batch of a process is divided into. The
    more there are, the less processes wait, and the smaller is each pass. ``1f1b`` and
    ``interleaved`` need at least as many as there are processes. Default: the largest divisor of
    the batch size up to 4 for each process. Example: ``8``."""

    cpu_offload: bool = False
    """With ``fsdp``, alone or with ``data`` and ``tensor``: keep each process's part of the
    parameters, gradients, optimizer state and weight averages in host memory (torch's
    ``CPUOffloadPolicy``). The parameters of a few layers are copied to the device when it needs
    them, and the optimizer runs on the CPU. Takes less memory of the device and more time. Requires
    ``devices.type`` ``cuda``."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if not (given := self._sizes):
            return self
        product = math.prod(given.values())
        fits = next((name for name in reversed(AXES) if given.get(name, 1) > 1), "data")
        sizes = " and ".join(f"{name} {size}" for name, size in given.items())
        if "strategy" in self.model_fields_set and self.strategy != fits:
            detail = f"the strategy is {self.strategy}, and the sizes {sizes} are those of {fits}"
            raise WrongAt("strategy", detail=f"{detail}: remove strategy, or the sizes")
        if self.processes not in (None, product):
            detail = f"the sizes {sizes} make {product} processes, and processes is"
            raise WrongAt("processes", detail=f"{detail} {self.processes}: remove processes")
        object.__setattr__(self, "strategy", fits)  # frozen from here on
        object.__setattr__(self, "processes", product)
        return self

    @model_validator(mode="after")
    def _check_one_process(self) -> Self:
        if self.strategy in ("none", "placed") and self.processes not in (None, 1):
            detail = f"strategy {self.strategy} runs one process, and processes is"
            detail += f" {self.processes}: remove"
            raise WrongAt("processes", detail=f"{detail} processes, or set strategy to data")
        return self

    def check_offload(self, kind: str) -> None:
        """Refuse ``cpu_offload`` where there is nothing to offload; ``kind``: ``devices.type``.

        Raises:
            WrongAt: it names the field.
        """
        if not self.cpu_offload:
            return
        if "fsdp" not in self.axes:
            detail = "cpu_offload (true) keeps in host memory what fsdp keeps in each process, and"
            if self.strategy == "fsdp" or self.fsdp == 1:
                detail += " fsdp has one process: set it to at least 2, or remove cpu_offload"
            else:
                detail += f" the strategy is {self.strategy}: set it to fsdp, or remove cpu_offload"
            raise WrongAt("parallel", "cpu_offload", detail=detail)
        if "pipeline" in self.axes:
            detail = (
                "cpu_offload (true) cannot be combined with pipeline yet, whose parameters stay"
            )
            detail += " on the device for the whole step: remove cpu_offload, or pipeline"
            raise WrongAt("parallel", "cpu_offload", detail=detail)
        if kind != "cuda":
            why = "the parameters are in host memory already"
            if kind == "auto":
                why = "a job of that type may run on CPU cores, whose parameters are there already"
            detail = (
                f"cpu_offload (true) needs CUDA devices, and devices.type is {kind}: {why}: set"
            )
            raise WrongAt(
                "parallel",
                "cpu_offload",
                detail=f"{detail} the type to cuda, or remove cpu_offload",
            )

    @property
    def _sizes(self) -> dict[str, int]:
        """The sizes that are given."""
        found = {name: getattr(self, name) for name in AXES}
        return {name: size for name, size in found.items() if size is not None}

    @property
    def axes(self) -> dict[str, int]:
        """The number of processes along each axis that has several: ``data`` first."""
        name = self.strategy if self.strategy in AXES else "data"
        sizes = self._sizes or {name: self.processes or 1}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def num_peers(self) -> int:
        """The number of processes that have the same rows."""
        return self.axes.get("tensor", 1) * self.axes.get("pipeline", 1)

    @property
    def has_parts(self) -> bool:
        """Whether each process has only a part of the network."""
        return not {"fsdp", "tensor", "pipeline"}.isdisjoint(self.axes)

    @property
    def why_no_predictions(self) -> str | None:
        """Why no process can predict while it trains: none computes the whole network."""
        if self.strategy == "placed":
            return "parallel.strategy placed computes the network on several devices"
        if self.has_parts:
            listed = " and ".join(name for name in AXES[1:] if name in self.axes)
            return f"with {listed}, each process has a part of the network"
        return None

    @property
    def num_stages_default(self) -> int:
        """The number of stages of a pipeline whose layers do not name any."""
        return self.axes.get("pipeline", 1) * (2 if self.schedule == "interleaved" else 1)


def num_processes(resolved: Mapping[str, Any]) -> int:
    """Return the number of processes of a resolved spec."""
    parallel: Mapping[str, Any] = resolved.get("parallel") or {}
    return parallel.get("processes") or 1


def num_shares(resolved: Mapping[str, Any]) -> int:
    """Return the number of shares into which a resolved spec divides the rows of a batch."""
    return num_processes(resolved) // parallel_of(resolved).num_peers


def parallel_of(resolved: Mapping[str, Any]) -> Parallel:
    """Return what a resolved spec, perhaps of an older version, says of its processes."""
    parallel: Mapping[str, Any] = resolved.get("parallel") or {}
    known = {name: parallel.get(name) for name in (*AXES, "processes", "strategy")}
    return Parallel.model_validate({name: x for name, x in known.items() if x is not None})
