"""The kinds of job, and what they share."""

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
from glasshouse.spec.data import Data, Field
from glasshouse.spec.guards import Guards
from glasshouse.spec.metrics import Metric
from glasshouse.spec.network import Graph, Input
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
    # Whoever reads a job's network reads layers and outputs, and a preset has them too. After the
    # plan it is a graph.
    Network = Graph
else:
    Network = Annotated[
        Annotated[Graph, Tag("Graph")] | Annotated[Preset, Tag("Preset")],
        Discriminator(_kind_of_network),
    ]


class Devices(Spec):
    """The hardware that the job runs on. A device that does not exist is refused.

    The client's ``device="cuda:1"`` and the command line's ``--device cuda:1`` are short for
    ``{"type": "cuda", "ids": [1]}``.
    """

    type: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: one CUDA device where a worker has a healthy one, else CPU cores. An ``infer`` job
    takes CPU cores, too, while every CUDA device is busy."""
    count: Literal[1] | None = None
    """How many CUDA devices."""
    ids: tuple[NonNegativeInt] | None = None
    """The CUDA device by its number on its worker, as ``GET /devices`` lists it."""
    threads: int | None = Constraint(default=None, ge=1, le=1024)
    """CPU cores, one torch thread each. Default: half of the worker's cores, at least one; of an
    ``infer`` job as many of these as are free."""
    worker: str | None = Constraint(default=None, min_length=1, max_length=200)
    """Only on this worker."""

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        wanted = {"count": "cuda", "ids": "cuda", "threads": "cpu"}
        for name, kind in wanted.items():
            if self.type != kind and getattr(self, name) is not None:
                detail = f"{name} applies to type {kind} only, and type is {self.type!r}"
                raise WrongAt(name, detail=f"{detail}: remove {name}, or set type to {kind}")
        check_at_most_one(self, "count", "ids")
        return self


class Retry(Spec):
    """What happens after a failure that is not the job's own: of a worker, a process, a device."""

    max_restarts: int = Constraint(default=3, ge=0, le=1000)
    """Restarts without progress; a newer checkpoint begins the count anew. A process that crashes
    three times in a row without progress is not started again, whatever this says."""


class _Job(Spec):
    name: JobName | None = None
    """For people; need not be unique. If unset, the service creates one that is: ``mlp-7``."""
    labels: dict[Label, LabelValue] = Constraint(default={}, max_length=50)
    """Pairs to find the job by: ``GET /jobs?label=key:value``."""
    priority: int = Constraint(default=0, ge=-1000, le=1000)
    """Higher starts first; equal ones in the order they came."""
    devices: Devices = Devices()
    retry: Retry = Retry()
    """How often the job is tried again after a failure that is not its own."""
    timeout_s: PositiveFloat | None = None
    """The most that the job may take on its devices, all attempts together; then it is stopped at
    the next step boundary, saved, and has failed. Left out: no limit."""
    stall_timeout_s: PositiveFloat | None = None
    """A job that makes no progress for this long has stalled: the event ``stalled``. Left out: the
    service's setting."""
    on_stall: Literal["warn", "restart", "fail"] = "warn"
    """What happens then. ``warn``: the event. ``restart``: stopped, or killed, and tried again as
    after a lost worker. ``fail``: the job has failed."""


def _not_compiled(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if value is True:
        detail = "steps are not compiled: a watched step would be another program than an unwatched"
        detail += " one, with other bits, and on CPUs it was measured slower than tune and bfloat16"
        raise PydanticCustomError("unsupported", detail)
    return handler(value)


KeptAt = Literal[True] | Annotated[tuple[Name, ...], Constraint(min_length=2, max_length=10_000)]


class TrainJob(_Job):
    """Train a network."""

    kind: Literal["train"]
    seed: int = Constraint(default=0, ge=0, le=2**53)
    """Decides the initial weights, the order of the rows, and dropout."""
    network: Network
    """A graph of layers, or a preset: a network by name and sizes."""
    init: Init | None = None
    """Left out, the weights are drawn from the seed."""
    loss: Losses
    optimizer: Optimizer
    scheduler: Scheduler | None = None
    """Left out, the learning rate stays what it is."""
    precision: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """``bfloat16``, ``float16``: products are computed in it where torch.autocast says so;
    parameters, losses and updates stay float32. ``float16`` scales the loss, for its range is
    small. ``auto``: bfloat16 where the device multiplies it in hardware."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """``torch.set_float32_matmul_precision``: how precisely float32 matrices are multiplied. With
    ``high`` and ``medium`` CUDA uses TF32 where the device has it. On a CPU torch decides."""
    grad_scaler: GradScaler | None = None
    """Of ``float16``; left out, torch's own numbers."""
    memory_format: Literal["contiguous_format", "channels_last"] = "contiguous_format"
    """How images and the weights of convolutions lie in memory, by torch's names. It changes how
    fast they are, and the order of sums: the numbers are the same up to rounding."""
    tune: bool = False
    """Whether a short trial before the first step chooses ``memory_format``; the event ``adjusted``
    says what it has become, and the job keeps to it."""
    compile: Annotated[Literal[False], WrapValidator(_not_compiled)] = False
    """``torch.compile`` is refused: a watched step would be another program than an unwatched one,
    with other bits, and on a CPU it is not faster (decision 19). See ``tune``."""
    deterministic: bool = False
    """``torch.use_deterministic_algorithms``: an operation that has none fails the job. On a CPU
    all are so with the same number of threads."""
    accumulate: int = Constraint(default=1, ge=1, le=100_000)
    """Batches (micro-batches) whose gradients make one update together, as one batch of all their
    rows would: a step is then so many batches. The loss is the mean over the whole step, whatever
    torch's mean divides by. At the end of an epoch the last step may have fewer."""
    activation_checkpointing: KeptAt | None = None
    """Less memory for more time: what layers keep for the backward pass is computed again there,
    but for what goes into the layers named here, in their order. Before the first and from the last
    one on all is kept. True: the plan chooses those that leave the least. Left out, all is kept."""
    average: Average | None = None
    """Left out, evaluations and checkpoints take the newest weights."""
    grad_clip: GradClip | None = None
    """Left out, gradients stay what they are."""
    data: Data
    stop: Stop
    evaluate: Evaluate | None = None
    """Needs ``data.validation``. Left out where that is named: ``every_epochs`` 1; null: never."""
    metrics: tuple[Metric, ...] = Constraint(default=(), max_length=20)
    probes: tuple[Probe, ...] = Constraint(default=(), max_length=1000)
    """What is watched from the first step on. One probe may watch many layers, by globs
    (``conv*``); others are attached while the job runs."""
    checkpoint: Checkpoint = Checkpoint()
    guards: Guards = Guards()
    """What watches over the numbers of training."""

    @model_validator(mode="after")
    def _check_evaluations(self) -> Self:
        if self.data.validation is not None and "evaluate" not in self.model_fields_set:
            object.__setattr__(self, "evaluate", Evaluate(every_epochs=1))  # frozen from here on
        if self.evaluate is not None:
            if self.data.validation is None:
                detail = "evaluate needs data.validation: name the rows to evaluate on"
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
        """No evaluation computes the metric that a field follows."""
        validation = "" if self.data.validation is not None else "data.validation and "
        detail = f"{part}.{field} needs {metric}, which only evaluations compute: set"
        return WrongAt(part, field, detail=f"{detail} {validation}evaluate")

    def _keep_best(self) -> KeepBest:
        """By which value checkpoints are kept where the spec does not say so."""
        early = self.stop.early
        if early is not None:
            return KeepBest(metric=early.metric, mode=early.mode)
        return KeepBest(metric="validation/loss", mode="min")

    @model_validator(mode="after")
    def _check_across(self) -> Self:
        if self.grad_scaler is not None and self.precision != "float16":
            detail = f"grad_scaler needs precision float16, and precision is {self.precision!r}"
            raise WrongAt("grad_scaler", detail=f"{detail}: remove one, or set precision")
        if self.guards.memory.allocator is not None and self.devices.type != "cuda":
            detail = f"allocator is for CUDA devices, and devices.type is {self.devices.type!r}"
            detail += ": remove allocator, or set devices.type to cuda"
            raise WrongAt("guards", "memory", "allocator", detail=detail)
        if self.tune and self.memory_format != "contiguous_format":
            detail = f"tune chooses memory_format, and memory_format is {self.memory_format!r}"
            raise WrongAt("tune", detail=f"{detail}: remove one of them")
        if (again := repeated(self.loss_names)) is not None:
            detail = f"two losses are named {self.loss_names[again]!r}: give each its own name"
            raise WrongAt("loss", again, "name", detail=detail)
        for number, layer in enumerate(self.network.layers):
            if layer.name in self.data.fields:
                detail = f"{layer.name!r} names a layer and a data field; rename one"
                raise WrongAt("network", "layers", number, detail=detail)
        return self

    @property
    def kept_at(self) -> tuple[str, ...]:
        """Where activations are kept, as the plan has settled it; none: everywhere."""
        asked = self.activation_checkpointing
        return asked if isinstance(asked, tuple) else ()

    @property
    def losses(self) -> tuple[Loss, ...]:
        """What is made small, each part of it."""
        return self.loss if isinstance(self.loss, tuple) else (self.loss,)

    @property
    def loss_inputs(self) -> tuple[str, ...]:
        """What the losses compare, one after the other."""
        return tuple(name for loss in self.losses for name in loss.inputs)

    @property
    def loss_reads(self) -> tuple[str, ...]:
        """All that the losses need: what they compare, and lengths."""
        return tuple(name for loss in self.losses for name in loss.reads)

    @property
    def loss_names(self) -> tuple[str, ...]:
        """The names of losses that are told by themselves; empty where the loss says it all."""
        if len(self.losses) == 1 and self.losses[0].name is None and self.losses[0].weight == 1:
            return ()
        return tuple(loss.name or loss.type for loss in self.losses)

    @property
    def clips(self) -> bool:
        """Whether gradients of parameters are clipped, all or those of some layers."""
        return self.grad_clip is not None or any(x.grad_clip for x in self.network.layers)


class InferData(Spec):
    """Rows of a dataset to run through the network, in their stored order."""

    dataset: str = Constraint(min_length=1, max_length=500)
    """A dataset's id (``ds_…``) or name."""
    split: str = Constraint(default="all", min_length=1, max_length=64)
    fields: dict[Name, Field] | None = Constraint(default=None, min_length=1, max_length=1000)
    """Left out: the fields of the job that trained the checkpoint."""
    batch_size: int = Constraint(default=256, ge=1, le=1_000_000)


class Flatten(Spec):
    """Join the results of all layers into one tensor per field."""

    axis: Literal[0, 1]
    """0: below each other, widths must agree. 1: side by side, heights must agree."""


class InferJob(_Job):
    """Run a trained network and return the outputs of any of its layers."""

    kind: Literal["infer"]
    checkpoint: str | None = Constraint(default=None, min_length=1, max_length=500)
    """A checkpoint's id (``ckpt_…``)."""
    job: str | None = Constraint(default=None, min_length=1, max_length=64)
    """A training job: its newest complete checkpoint."""
    data: InferData | None = None
    inputs: dict[Name, JsonData] | None = Constraint(default=None, min_length=1, max_length=1000)
    """Values of the network's input fields, a nested list each, first axis the rows."""
    outputs: tuple[Input, ...] | None = Constraint(default=None, min_length=1, max_length=1000)
    """Layers to return; left out, the network's own outputs."""
    fields: tuple[Literal["value", "id", "prob"], ...] | None = Constraint(
        default=None, min_length=1, max_length=3
    )
    """``value``: the output. ``id``: the index of its largest entry along the last axis.
    ``prob``: the softmax probability of that entry. Left unset: ``value``, and for scores that a
    loss compared with classes in training all three."""
    flatten: Literal[False] | Flatten = False
    """``false``: one tensor per layer and field. Else joined, one tensor per field."""
    sequence_layout: Literal["padded", "packed"] = "padded"
    """Of outputs with a value per step. ``padded``: ``[rows, longest, …]``, zeros behind the end of
    a row. ``packed``: ``[all steps, …]``, the rows one after the other. Either way
    ``<layer>/lengths`` says how many steps each row has."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        check_exactly_one(self, "checkpoint", "job")
        check_exactly_one(self, "data", "inputs")
        return self


JobSpec = Annotated[TrainJob | InferJob, Constraint(discriminator="kind")]
_JOB: TypeAdapter[TrainJob | InferJob] = TypeAdapter(JobSpec)


def parse_job(body: bytes | str) -> TrainJob | InferJob:
    """Read a job spec from JSON.

    Raises:
        pydantic.ValidationError: with one entry per field that is wrong.
    """
    return _JOB.validate_json(body)
