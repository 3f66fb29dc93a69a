"""The spec of a training job."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic import Field as Constraint
from pydantic_core import PydanticCustomError

from glasshouse.spec.clipping import GradClip
from glasshouse.spec.data import Data
from glasshouse.spec.guards import Guards
from glasshouse.spec.jobs.job import Job, with_processes
from glasshouse.spec.metrics import Metric
from glasshouse.spec.network import Graph
from glasshouse.spec.parallel import Parallel
from glasshouse.spec.pipeline import check_pipeline, num_micro_batches
from glasshouse.spec.placement import check_placement
from glasshouse.spec.presets import Preset
from glasshouse.spec.probes import Probe
from glasshouse.spec.strict import (
    Name,
    WrongAt,
    repeated,
)
from glasshouse.spec.training import (
    Average,
    Checkpoint,
    Evaluate,
    GradScaler,
    Init,
    KeepBest,
    Loss,
    Losses,
    Optimizer,
    Scheduler,
    Stop,
)


def _kind_of_network(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)  # pyright: ignore
    return "Preset" if kind == "preset" else "Graph"


if TYPE_CHECKING:
    # Code that reads a network uses layers and outputs, which a preset has too. The plan replaces a
    # preset by its graph.
    Network = Graph
else:
    Network = Annotated[
        Annotated[Graph, Tag("Graph")] | Annotated[Preset, Tag("Preset")],
        Discriminator(_kind_of_network),
    ]


def _not_compiled(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if value is True:
        detail = "compile is not supported, remove it: a compiled step gives different bits with"
        detail += " probes than without, and on CPUs it was measured slower than tune and bfloat16"
        raise PydanticCustomError("unsupported", detail)
    return handler(value)


ActivationBoundaries = (
    Literal[True] | Annotated[tuple[Name, ...], Constraint(min_length=2, max_length=10_000)]
)


class TrainJob(Job):
    """Trains a network."""

    kind: Literal["train"]
    """Selects a training job."""
    seed: int = Constraint(default=0, ge=0, le=2**53)
    """Seed of the initial weights, the order of the rows, augmentation and dropout."""
    network: Network
    """A graph of layers, or a preset. Example: ``{"type": "preset", "preset": "mlp"}``."""
    init: Init | None = None
    """Initial weights from a checkpoint. Default: weights drawn from the seed."""
    loss: Losses
    """The loss to minimize; in a list, the weighted sum of several. Example: ``{"type":
    "CrossEntropyLoss", "inputs": ["fc", "label"]}``."""
    optimizer: Optimizer
    """The optimizer. Example: ``{"type": "SGD", "args": {"lr": 0.01}}``."""
    scheduler: Scheduler | None = None
    """The learning rate schedule. Default: a constant learning rate. Example: ``{"type":
    "CosineAnnealingLR"}``."""
    precision: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Data type of matrix products, as in ``torch.autocast``; parameters, losses and updates stay
    float32. ``float16`` scales the loss, because its range is small. ``auto``: bfloat16 if the
    device multiplies it in hardware, else float32."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of float32 matrix products, as in ``torch.set_float32_matmul_precision``. With
    ``high`` and ``medium``, CUDA uses TF32 if the device supports it; on a CPU torch decides."""
    grad_scaler: GradScaler | None = None
    """Loss scaling for ``precision`` ``float16``. Default: torch's own values. Example:
    ``{"init_scale": 1024.0}``."""
    memory_format: Literal["contiguous_format", "channels_last"] = "contiguous_format"
    """Memory layout of images and convolution weights, by torch's names. It affects speed and the
    order of sums, so results agree up to rounding."""
    tune: bool = False
    """Whether to select ``memory_format`` by a short trial before the first step. The event
    ``adjusted`` reports the selection, and the job keeps it."""
    compile: Annotated[Literal[False], WrapValidator(_not_compiled)] = False
    """``true`` is rejected: ``torch.compile`` is not supported. A compiled step gives different
    bits with probes than without, and on a CPU it is not faster (decision 19). See ``tune``."""
    deterministic: bool = False
    """Whether to use deterministic algorithms only (``torch.use_deterministic_algorithms``). The
    job fails at an operation that has none. On a CPU all operations are deterministic for the same
    number of threads: see ``devices.threads``."""
    accumulate: int = Constraint(default=1, ge=1, le=100_000)
    """Number of batches (micro-batches) whose gradients make one update. A step is then that many
    batches, and equals a step with one batch of all their rows: the loss is the mean over the whole
    step. The last step of an epoch can have fewer."""
    activation_checkpointing: ActivationBoundaries | None = None
    """Saves memory at the cost of time: between the listed layers, only the inputs of these layers
    are kept, and other activations are recomputed in the backward pass. List at least two layers,
    in the order of the graph. ``true``: the plan selects the layers that need the least memory.
    Default: keep all activations. Example: ``["block0", "block1", "norm"]``."""
    average: Average | None = None
    """Averaged weights for evaluations and checkpoints. Default: the newest weights. Example:
    ``{"type": "ema"}``."""
    grad_clip: GradClip | None = None
    """Gradient clipping. Default: no clipping. Example: ``{"type": "global_norm", "max": 1.0}``."""
    parallel: Parallel = Parallel(strategy="none")
    """Several processes that train the network together. Default: one process. Example:
    ``{"strategy": "data", "processes": 2}``."""
    data: Data
    """Training data, validation data and batching."""
    stop: Stop
    """When training ends. Example: ``{"epochs": 10}``."""
    evaluate: Evaluate | None = None
    """When to evaluate the validation data. Requires ``data.validation``. Default: after each epoch
    if ``data.validation`` is set. null: never. Example: ``{"every_epochs": 1}``."""
    metrics: tuple[Metric, ...] = Constraint(default=(), max_length=20)
    """Metrics to compute in addition to the loss. Example: ``[{"type": "accuracy", "inputs": ["fc",
    "label"]}]``."""
    probes: tuple[Probe, ...] = Constraint(default=(), max_length=1000)
    """Probes from the first step on. A probe can match several layers by globs. You can attach more
    probes while the job runs. Example: ``[{"layers": ["conv*"], "kinds": ["output"], "every":
    25}]``."""
    checkpoint: Checkpoint = Checkpoint()
    """When checkpoints are saved and which are kept. Example: ``{"every_epochs": 1}``."""
    guards: Guards = Guards()
    """Checks for NaN or Inf values, and limits of memory."""

    @model_validator(mode="after")
    def _check_evaluations(self) -> Self:
        if self.data.validation is not None and "evaluate" not in self.model_fields_set:
            object.__setattr__(self, "evaluate", Evaluate(every_epochs=1))  # frozen from here on
        if self.evaluate is not None:
            if self.data.validation is None:
                detail = "evaluate needs data.validation: set it to the rows to evaluate"
                raise WrongAt("evaluate", detail=f"{detail}, or remove evaluate")
            if "keep_best" not in self.checkpoint.model_fields_set:
                keeping = self.checkpoint.model_copy(update={"keep_best": self._keep_best()})
                object.__setattr__(self, "checkpoint", keeping)
            return self
        if self.stop.early is not None:
            raise self._never_computed("stop", "early", self.stop.early.metric)
        if self.scheduler is not None and self.scheduler.metric is not None:
            raise self._never_computed("scheduler", "metric", self.scheduler.metric)
        return self

    def _never_computed(self, part: str, field: str, metric: str) -> WrongAt:
        """The problem of a field that needs a metric which no evaluation computes."""
        validation = "" if self.data.validation is not None else "data.validation and "
        detail = f"{part}.{field} needs {metric}, which only evaluations compute: set"
        return WrongAt(part, field, detail=f"{detail} {validation}evaluate")

    def _keep_best(self) -> KeepBest:
        """The default of ``checkpoint.keep_best``."""
        early = self.stop.early
        if early is not None:
            return KeepBest(metric=early.metric, mode=early.mode)
        first = next(iter(self.data.validations))
        return KeepBest(metric=f"{first}/loss", mode="min")

    @model_validator(mode="after")
    def _check_across(self) -> Self:
        if self.grad_scaler is not None and self.precision != "float16":
            detail = f"grad_scaler needs precision float16, and precision is {self.precision!r}"
            raise WrongAt("grad_scaler", detail=f"{detail}: remove one, or set precision")
        if self.guards.memory.allocator is not None and self.devices.type != "cuda":
            detail = (
                f"allocator applies to CUDA devices only, and devices.type is {self.devices.type!r}"
            )
            detail += ": remove allocator, or set devices.type to cuda"
            raise WrongAt("guards", "memory", "allocator", detail=detail)
        if self.tune and self.memory_format != "contiguous_format":
            detail = f"tune selects memory_format, and memory_format is {self.memory_format!r}"
            raise WrongAt("tune", detail=f"{detail}: remove one of them")
        if (again := repeated(self.loss_names)) is not None:
            detail = f"two losses are named {self.loss_names[again]!r}: give each a unique name"
            raise WrongAt("loss", again, "name", detail=detail)
        for number, layer in enumerate(self.network.layers):
            if layer.name in self.data.fields:
                detail = f"{layer.name!r} names a layer and a data field; rename one"
                raise WrongAt("network", "layers", number, detail=detail)
        return self

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        counted = with_processes(self.parallel, self.devices)
        object.__setattr__(self, "parallel", counted)  # frozen from here on
        self.parallel.check_offload(self.devices.type)
        self._check_global_batch()
        self._check_single()
        for number, probe in enumerate(self.probes):
            probe.check_processes(self.processes, "probes", number)
        devices = self.devices
        check_placement(
            self.network.layers, self.parallel.strategy, devices.type, devices.num_devices
        )
        check_pipeline(self.network.layers, self.parallel, self.data.batch_size)
        return self

    def _check_global_batch(self) -> None:
        data, shares = self.data, self.num_shares
        whole = data.global_batch_size
        if whole is None:
            return
        who = f"{shares} processes" if self.parallel.num_peers == 1 else f"{shares} shares of rows"
        if whole % shares:
            detail = f"{whole} rows cannot be divided among {who} equally: set a multiple of"
            raise WrongAt("data", "global_batch_size", detail=f"{detail} {shares}")
        if "batch_size" not in data.model_fields_set:
            sized = data.model_copy(update={"batch_size": whole // shares})
            object.__setattr__(self, "data", sized)  # frozen from here on
        elif data.batch_size * shares != whole:
            detail = f"batch_size is {data.batch_size} for each of {who}, and"
            detail += f" global_batch_size is {whole}: remove one of them"
            raise WrongAt("data", "batch_size", detail=detail)

    def _check_single(self) -> None:
        """Refuse what only one process supports."""
        if self.processes == 1:
            return
        why = f"is supported with one process only, and parallel asks for {self.processes}"
        if self.tune:
            raise WrongAt("tune", detail=f"tune {why}: remove tune, and set memory_format")
        bucket = self.data.bucket_by_length
        if bucket is not None and bucket.max_tokens is not None:
            place = ("data", "bucket_by_length", "max_tokens")
            detail = f"max_tokens ({bucket.max_tokens}) {why}: remove it, batch_size is the limit"
            raise WrongAt(*place, detail=detail)
        for number, layer in enumerate(self.network.layers):
            if layer.stateful:
                detail = f"stateful (layer {layer.name!r}) {why}: remove stateful, or parallel"
                raise WrongAt("network", "layers", number, "stateful", detail=detail)
        self.check_strategy()

    def check_strategy(self) -> None:
        """Refuse what the strategy does not support.

        Raises:
            WrongAt: it names the field.
        """
        if not self.parallel.has_parts:
            return
        why = f"is not supported with parallel.strategy {self.parallel.strategy}"
        if self.precision == "float16":
            detail = f"precision float16 {why}: set bfloat16, or strategy data"
            raise WrongAt("precision", detail=detail)
        if self.optimizer.sparse is not None:
            detail = f"an optimizer of sparse gradients {why}: remove sparse, or set strategy data"
            raise WrongAt("optimizer", "sparse", detail=detail)
        for number, layer in enumerate(self.network.layers):
            if layer.args.get("sparse") is True:
                detail = f"sparse (layer {layer.name!r}) {why}: remove sparse, or set strategy data"
                raise WrongAt("network", "layers", number, "args", "sparse", detail=detail)
        self._check_pipeline()

    def _check_pipeline(self) -> None:
        """Refuse what a pipeline does not support."""
        if "pipeline" not in self.parallel.axes:
            return
        for number, layer in enumerate(self.network.layers):
            if layer.type == "SyncBatchNorm":
                detail = f"SyncBatchNorm (layer {layer.name!r}) is not supported with a pipeline:"
                detail += " not all processes have the layer: set BatchNorm, or strategy data"
                raise WrongAt("network", "layers", number, "type", detail=detail)
        for number, probe in enumerate(self.probes):
            if probe.on is not None:
                detail = f"on ({probe.on}) is not supported with a pipeline, in which no process"
                detail += " sees all layers of a step: set every or at instead, or strategy data"
                raise WrongAt("probes", number, "on", detail=detail)

    @property
    def processes(self) -> int:
        """The number of processes that train the network."""
        return self.parallel.processes or 1

    @property
    def global_batch_size(self) -> int:
        """The number of rows in a batch of all processes together."""
        return self.data.batch_size * self.num_shares

    @property
    def num_shares(self) -> int:
        """The number of shares into which the rows of a batch are divided among processes."""
        return self.processes // self.parallel.num_peers

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches into which a pipeline divides each batch of a process."""
        if "pipeline" not in self.parallel.axes:
            return 1
        return num_micro_batches(self.parallel, self.data.batch_size)

    @property
    def global_data(self) -> Data:
        """The data with the batch size of all processes together."""
        if self.num_shares == 1:
            return self.data
        return self.data.model_copy(update={"batch_size": self.global_batch_size})

    @property
    def activation_boundaries(self) -> tuple[str, ...]:
        """The boundaries of activation checkpointing, as the plan selected them."""
        asked = self.activation_checkpointing
        return asked if isinstance(asked, tuple) else ()

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The losses, also if there is only one."""
        return self.loss if isinstance(self.loss, tuple) else (self.loss,)

    @property
    def loss_inputs(self) -> tuple[str, ...]:
        """The inputs of all losses, concatenated."""
        return tuple(name for loss in self.losses for name in loss.inputs)

    @property
    def loss_reads(self) -> tuple[str, ...]:
        """The inputs and lengths of all losses, concatenated."""
        return tuple(name for loss in self.losses for name in loss.reads)

    @property
    def loss_names(self) -> tuple[str, ...]:
        """The names of losses that are reported separately; empty if ``loss`` is the only one."""
        if len(self.losses) == 1 and self.losses[0].name is None and self.losses[0].weight == 1:
            return ()
        return tuple(loss.name or loss.type for loss in self.losses)

    @property
    def clips(self) -> bool:
        """Whether any parameter gradients are clipped."""
        return self.grad_clip is not None or any(x.grad_clip for x in self.network.layers)
