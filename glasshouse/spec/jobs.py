"""The kinds of job, and the fields that they share."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    NonNegativeInt,
    PositiveFloat,
    Tag,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic import Field as Constraint
from pydantic_core import PydanticCustomError

from glasshouse.spec.clipping import GradClip
from glasshouse.spec.data import Data, Field, Source, check_fraction
from glasshouse.spec.guards import Guards
from glasshouse.spec.metrics import Metric
from glasshouse.spec.network import Graph, Input
from glasshouse.spec.parallel import MAX_PROCESSES, Parallel
from glasshouse.spec.pipeline import check_pipeline, num_micro_batches
from glasshouse.spec.placement import check_placement
from glasshouse.spec.presets import Preset
from glasshouse.spec.probes import Probe
from glasshouse.spec.strict import (
    JsonData,
    Name,
    Spec,
    WrongAt,
    check_at_most_one,
    check_exactly_one,
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

SPEC_VERSION = 1

Label = Annotated[str, Constraint(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f:=,]+$")]
LabelValue = Annotated[str, Constraint(max_length=512, pattern=r"^[^\x00-\x1f]*$")]
JobName = Annotated[str, Constraint(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$")]


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
    free, at least one. Default on CUDA: one torch thread, and cores for it and for each of
    ``data.workers``, but no more than the worker has; for ``infer`` and ``evaluate`` jobs, one core
    if it is free. Example: ``4``."""
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


class _Job(Spec):
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


def _counted(parallel: Parallel, devices: Devices) -> Parallel:
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


def _not_compiled(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if value is True:
        detail = "compile is not supported, remove it: a compiled step gives different bits with"
        detail += " probes than without, and on CPUs it was measured slower than tune and bfloat16"
        raise PydanticCustomError("unsupported", detail)
    return handler(value)


ActivationBoundaries = (
    Literal[True] | Annotated[tuple[Name, ...], Constraint(min_length=2, max_length=10_000)]
)


class TrainJob(_Job):
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
        counted = _counted(self.parallel, self.devices)
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


class InferData(Spec):
    """Rows of a dataset to run through the network, in their stored order."""

    dataset: str = Constraint(min_length=1, max_length=500)
    """The id (``ds_…``) or name of a dataset."""
    split: str = Constraint(default="all", min_length=1, max_length=64)
    """A split of the dataset. Example: ``"test"``."""
    fields: dict[Name, Field] | None = Constraint(default=None, min_length=1, max_length=1000)
    """The inputs of the network, by name. Default: the fields of the job that trained the
    checkpoint."""
    batch_size: int = Constraint(default=256, ge=1, le=1_000_000)
    """Number of rows per batch."""
    on_bad_row: Literal["fail", "drop"] = "fail"
    """What to do with rows that do not fit their fields: a missing value without ``fill``, or an
    index out of range. ``fail``: the job fails and names the first. ``drop``: the results have the
    other rows, with their numbers as ``row``, and the artifact ``bad_rows.jsonl`` lists each
    dropped row with the reason."""


class Flatten(Spec):
    """Joins the results of all layers into one tensor per field.

    Each result is first flattened to [rows, values].
    """

    axis: Literal[0, 1]
    """Axis of the concatenation. ``0``: vertically, which requires equal widths. ``1``:
    horizontally, which requires equal numbers of rows."""


class InferJob(_Job):
    """Runs a trained network and returns the outputs of any of its layers.

    Set exactly one of ``checkpoint`` and ``job``, and exactly one of ``data`` and ``inputs``.
    """

    kind: Literal["infer"]
    """Selects an inference job."""
    checkpoint: str | None = Constraint(default=None, min_length=1, max_length=500)
    """The id of the checkpoint to use, or a version of a published model: ``mnist``,
    ``mnist@production``, ``mnist:3``. Example: ``"ckpt_019a7c4f2b6e"``."""
    job: str | None = Constraint(default=None, min_length=1, max_length=64)
    """The id of a training job, whose newest complete checkpoint is used. Example:
    ``"job_019a7c4f2b6e"``."""
    data: InferData | None = None
    """Rows of a dataset. Example: ``{"dataset": "digits", "split": "test"}``."""
    inputs: dict[Name, JsonData] | None = Constraint(default=None, min_length=1, max_length=1000)
    """Values of the network's input fields by name, each a nested list whose first axis is the
    rows. Example: ``{"image": [[0.0, 0.5, 1.0]]}``."""
    outputs: tuple[Input, ...] | None = Constraint(default=None, min_length=1, max_length=1000)
    """Layers to return. Default: the outputs of the network. Example: ``["conv1", "fc"]``."""
    fields: tuple[Literal["value", "id", "prob", "top_k"], ...] | None = Constraint(
        default=None, min_length=1, max_length=4
    )
    """What to return for each layer. ``value``: the output. ``id``: the index of its largest entry
    along the last axis. ``prob``: the softmax probability of that entry. ``top_k``: the indices of
    the largest entries in descending order, and as ``top_k_prob`` their probabilities. Default:
    ``value``, with ``id`` and ``prob`` for scores that a loss compared with classes in training,
    and ``top_k`` if that is set. Example: ``["id", "prob"]``."""
    top_k: int | None = Constraint(default=None, ge=1, le=10_000)
    """Number of entries of the field ``top_k``, at most the size of the last axis. Default: 5.
    Example: ``3``."""
    format: Literal["safetensors", "npz", "jsonl", "csv", "parquet"] = "safetensors"
    """Format of the artifact ``outputs.<format>``. ``safetensors``, ``npz``: a tensor for each
    layer and field, ``<layer>/<field>``. ``jsonl``: an object for each row. ``csv``: a line for
    each row, with a column for each number. ``parquet``: a row for each row, with nested lists.
    Example: ``"parquet"``."""
    flatten: Literal[False] | Flatten = False
    """``false``: one tensor per layer and field. Otherwise the layers are joined into one tensor
    per field. Example: ``{"axis": 1}``."""
    sequence_layout: Literal["padded", "packed"] = "padded"
    """Layout of outputs with a value per step. ``padded``: ``[rows, longest, …]``, with zeros after
    the end of each row. ``packed``: ``[all steps, …]``, the rows concatenated. ``<layer>/lengths``
    has the number of steps of each row in both."""
    parallel: Parallel = Parallel(strategy="none")
    """Several processes that divide the rows among them; each has the whole network. Default: one
    process. Example: ``{"strategy": "data", "processes": 2}``."""
    retry: Retry = Retry()
    """Automatic restarts. Outputs that are stored are not computed again."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        check_exactly_one(self, "checkpoint", "job")
        check_exactly_one(self, "data", "inputs")
        if self.top_k is not None and self.fields is not None and "top_k" not in self.fields:
            detail = f"top_k ({self.top_k}) is the size of a field that fields does not name: add"
            raise WrongAt("top_k", detail=f'{detail} "top_k" to fields, or remove top_k')
        self._check_format()
        return self

    def _check_format(self) -> None:
        if self.format in ("safetensors", "npz"):
            return
        detail = f"{self.format} has one entry for each row of the data, and"
        fix = "set format to safetensors or npz, or remove"
        if self.flatten is not False and self.flatten.axis == 0:
            detail += " flatten with axis 0 joins the rows of all layers"
            raise WrongAt("flatten", "axis", detail=f"{detail}: {fix} flatten")
        if self.flatten is not False:
            detail += " flatten joins tensors: its layers are columns beside each other anyway"
            raise WrongAt("flatten", detail=f"{detail}: {fix} flatten")
        if self.sequence_layout == "packed":
            detail += " each row has its own steps in it: packed would change nothing"
            raise WrongAt("sequence_layout", detail=f"{detail}: {fix} sequence_layout")

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        parallel = self.parallel
        if parallel.strategy not in ("none", "data", "auto") or parallel.has_parts:
            detail = (
                f"the processes of an infer job divide the rows, and {parallel.strategy} divides"
            )
            raise WrongAt("parallel", detail=f"{detail} the network: set strategy to data")
        for name in ("schedule", "micro_batches", "cpu_offload"):
            if value := getattr(parallel, name):
                shown = "true" if value is True else value
                detail = f"{name} ({shown}) is that of a training: remove {name}"
                raise WrongAt("parallel", name, detail=detail)
        counted = _counted(parallel, self.devices)
        if counted.processes not in (None, 1) and self.data is None:
            detail = f"{counted.processes} processes divide the rows of a dataset, and the rows are"
            raise WrongAt("parallel", "processes", detail=f"{detail} in inputs: remove parallel")
        object.__setattr__(self, "parallel", counted)  # frozen from here on
        return self

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.parallel.processes or 1


class EvaluateData(InferData):
    """Rows of a dataset to evaluate, in their stored order."""

    fraction: tuple[float, float] | None = None
    """The part of the split to use, as ``[from, to]`` with 0 <= from < to <= 1, drawn as in the
    training job: the same fraction of the same split has the same rows. Default: the whole split.
    Example: ``[0.8, 1]``."""

    @model_validator(mode="after")
    def _check_fraction(self) -> Self:
        check_fraction(self.fraction)
        return self

    def source(self) -> Source:
        """Return the rows as a source of a training job."""
        return Source(dataset=self.dataset, split=self.split, fraction=self.fraction)


Want = Literal["confusion", "pr_curve", "roc_curve", "calibration", "worst_samples"]
Column = Annotated[str, Constraint(min_length=1, max_length=500)]
DEFAULT_WORST = 20
"""The number of worst samples that an evaluation lists by default."""


class EvaluateJob(_Job):
    """Evaluates a trained network on rows of a dataset.

    The result has the loss and the metrics of the training job over all rows, and what ``want``
    and ``by`` ask for. Set exactly one of ``checkpoint`` and ``job``.
    """

    kind: Literal["evaluate"]
    """Selects an evaluation job."""
    checkpoint: str | None = Constraint(default=None, min_length=1, max_length=500)
    """The id of the checkpoint to evaluate, of a training job, or a version of a published model:
    ``mnist``, ``mnist@production``, ``mnist:3``. Example: ``"ckpt_019a7c4f2b6e"``."""
    job: str | None = Constraint(default=None, min_length=1, max_length=64)
    """The id of a training job, whose newest complete checkpoint is evaluated. Example:
    ``"job_019a7c4f2b6e"``."""
    data: EvaluateData
    """Rows of a dataset, with their targets. Example: ``{"dataset": "digits", "split": "test"}``.
    """
    metrics: tuple[Metric, ...] = Constraint(default=(), max_length=20)
    """Metrics to compute in addition to those of the training job: ``accuracy`` or classes of
    torchmetrics. Example: ``[{"type": "MulticlassF1Score", "args": {"num_classes": 10}, "inputs":
    ["fc", "label"]}]``."""
    want: tuple[Want, ...] | None = Constraint(default=None, max_length=5)
    """What to compute besides metrics. ``confusion``: the number of targets of each class by
    predicted class. ``pr_curve``: precision and recall of each class against the others, at 200
    thresholds. ``roc_curve``: true and false positive rates at the same thresholds.
    ``calibration``: accuracy by predicted probability in 15 bins, the expected calibration error,
    the Brier score. ``worst_samples``: the rows with the largest loss. Default: all that apply to
    the loss of the training job. Example: ``["confusion", "worst_samples"]``."""
    worst: int | None = Constraint(default=None, ge=1, le=1000)
    """Number of worst samples. Default: 20. Example: ``100``."""
    by: Column | Annotated[tuple[Column, ...], Constraint(min_length=1, max_length=8)] | None = None
    """One column of the dataset or several: the losses and scalar metrics are also computed for the
    rows of each value of the column, of which it may have at most 100. Example: ``"label"``."""

    @model_validator(mode="after")
    def _check_evaluation(self) -> Self:
        check_exactly_one(self, "checkpoint", "job")
        self.devices.check_one("an evaluation is one process with one device: ask for one")
        for number, metric in enumerate(self.metrics):
            if not metric.is_evaluated:
                detail = f"{metric.type} is computed for training batches only: name accuracy or a"
                raise WrongAt("metrics", number, "type", detail=f"{detail} class of torchmetrics")
            if metric.every is not None:
                detail = f"every ({metric.every}) is an interval of training steps: remove every"
                raise WrongAt("metrics", number, "every", detail=detail)
        if self.worst is not None and self.want is not None and "worst_samples" not in self.want:
            detail = f"worst ({self.worst}) is the number of worst_samples, which want does not"
            detail += ' name: add "worst_samples" to want, or remove worst'
            raise WrongAt("worst", detail=detail)
        for name, values in (("want", self.want or ()), ("by", self.columns)):
            if (again := repeated(values)) is not None:
                detail = f"{values[again]!r} is listed twice: list it once"
                raise WrongAt(name, again, detail=detail)
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of ``by``."""
        return (self.by,) if isinstance(self.by, str) else self.by or ()

    @property
    def processes(self) -> int:
        """The number of processes."""
        return 1


MAX_MESSAGE_BYTES = 1 << 30
"""The largest message of a diagnose job."""
VALUE_BYTES = 4
"""The size of the float32 values that a diagnose job sends."""


class DiagnoseJob(_Job):
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
        counted = _counted(self.parallel, self.devices)
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


AnyJob = TrainJob | InferJob | EvaluateJob | DiagnoseJob
"""A job of any kind."""
JobSpec = Annotated[AnyJob, Constraint(discriminator="kind")]
KINDS: tuple[type[_Job], ...] = (TrainJob, InferJob, EvaluateJob, DiagnoseJob)
"""The models of all kinds of job."""
_JOB: TypeAdapter[AnyJob] = TypeAdapter(JobSpec)


def parse_job(body: bytes | str) -> AnyJob:
    """Read a job spec from JSON.

    Raises:
        pydantic.ValidationError: with one entry for each wrong field.
    """
    return _JOB.validate_json(body)
