"""Response schemas of the routes that inspect jobs, checked by the tests."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from api.schemas.documents import Document, ListDocument, Number, answers
from glasshouse.events import LogLevel
from models.state import State


class LoggedEvent(BaseModel):
    """An event of a job. Its type determines its other fields."""

    model_config = ConfigDict(extra="allow")
    job: str
    seq: int
    attempt: int
    at: str
    type: str


class EventList(ListDocument):
    """Events, in order."""

    data: list[LoggedEvent]


class Metric(Document):
    """Summary of one metric."""

    name: str
    last: Number
    last_step: int
    min: Number | None
    max: Number | None
    count: int
    first_nonfinite_step: int | None


class MetricList(ListDocument):
    """Metrics, by name."""

    data: list[Metric]


class Columns(Document):
    """Metrics over steps; null where a metric has no value."""

    step: list[int]
    values: dict[str, list[Number | None]]
    epoch: list[int]
    attempt: list[int] = Field(default=[])
    """Only with ``?attempt=``: the attempt of each row."""
    has_more: bool
    """Whether there are later steps. Without ``max_points``, a response is one page."""
    next: int | None
    """The ``from_step`` of the next page. Null on the last page."""


class Figures(Document):
    """The newest statistics of one tensor."""

    step: int
    phase: str
    mean: Number
    std: Number
    min: Number
    max: Number
    l2: Number
    absmax: Number
    zeros: Number
    nan: Number
    inf: Number


class Layer(Document):
    """A layer of the network."""

    name: str
    type: str
    inputs: list[str]
    output_shape: list[int] | dict[str, list[int]]
    """Without the batch axis. For a layer with several outputs: by leaf."""
    output_shapes: dict[str, list[int]]
    parameters: int
    trainable: bool
    dtype: str
    parameter_shapes: dict[str, list[int]]
    flops: int
    shared_with: str | None
    """The layer whose module and parameters this one shares."""
    input_names: list[str]
    """Names under which its inputs can be watched."""
    inner_inputs: list[str]
    """Names of its submodules whose inputs can be watched."""
    inner_outputs: list[str]
    """Names of its submodules whose outputs can be watched."""
    state_names: list[str]
    """Optimizer state of each of its parameters, such as ``exp_avg``."""
    stats: dict[str, Figures]
    """Statistics of its output and the output's gradient, by kind."""
    tensors: dict[str, dict[str, Figures]]
    """Statistics of its other watched tensors, by name and kind."""


class LayerList(ListDocument):
    """Layers, in the order of the graph."""

    data: list[Layer]


class StatsSeries(Document):
    """Statistics of one tensor over steps; null where there is no value at a step."""

    layer: str
    kind: str
    phase: str
    rank: int | None
    """The process whose own values these are. Null: all processes together."""
    step: list[int]
    values: dict[str, list[Number | None]]


class HistogramSeries(Document):
    """Histograms of one tensor over steps, all with the same edges."""

    layer: str
    kind: str
    phase: str
    rank: int | None
    """The process whose own values these are. Null: all processes together."""
    step: list[int]
    edges: list[float]
    """Ascending; one more than there are bins. Bins differ in width."""
    counts: list[list[int]]
    """Counts per step and bin. NaN and Inf are in no bin."""


class StatsList(ListDocument):
    """Series of statistics, by layer. With `stat=histogram`: histograms."""

    data: list[StatsSeries] | list[HistogramSeries]


class _Captured(Document):
    id: str
    job: str
    attempt: int
    step: int
    layer: str
    kind: str
    phase: str
    rank: int | None
    """The process whose tensor it is. Null: all processes together."""
    shape: list[int]
    dtype: str
    size_bytes: int
    form: Literal["full", "slice", "sample"]
    """Which form of the tensor was stored."""
    captured_from: list[int]
    """Shape of the whole tensor."""
    href: str


class Capture(_Captured):
    """A captured tensor."""

    object: Literal["capture"]
    slice: str | None
    """The stored slice, as the probe requested it."""


class CaptureList(ListDocument):
    """Captures, oldest first."""

    data: list[Capture]


class Histogram(Document):
    """Number of values between adjacent edges. NaN and Inf are in no bin."""

    edges: list[float]
    counts: list[int]


class Tensor(_Captured):
    """Summary of a tensor."""

    object: Literal["tensor"]
    slice: str | None
    captured_slice: str | None
    """The stored slice, as the probe requested it."""
    captured_shape: list[int]
    """Shape of what was stored. ``shape`` is that of the slice."""
    stats: dict[str, Number | None]
    values: Any
    """Nested lists. If there are more than 1,000 values: the first ones, as one list."""
    truncated: bool
    histogram: Histogram | None
    """Only if requested."""


class AttachedProbe(Document):
    """A probe of a job."""

    id: str
    object: Literal["probe"]
    job: str
    state: Literal["pending", "active", "removed", "rejected", "failed"]
    """`pending`: the last change applies from the next step boundary. `failed`: it raised three
    errors, and the job no longer runs it."""
    layers: list[str]
    kinds: list[str]
    every: int | None
    at: list[int] | None
    on: Literal["nonfinite"] | None
    phase: Literal["train", "evaluate"]
    max_overhead: float | None
    start: int
    stop: int | None
    point: Literal["raw", "clipped"]
    want: list[str]
    slice: str | None
    max_bytes: int | None
    lossless: bool
    ranks: Literal["merged", "all"] | list[int]
    """The processes whose own values it records, beside those of all together."""
    matched: list[str]
    """Layers, leaves and parameters that it watches."""
    bytes_per_step: int
    """Size of the tensors that it watches on a due step. If it stores tensors: size of what it
    stores."""
    estimated_cost_s: float | None
    """Estimated seconds per due step, before measurement."""
    cost_s: float | None
    """Measured seconds per due step. Null until it is measured."""
    every_now: int | None
    """The current interval. It is wider than `every` if watching exceeded `max_overhead`."""
    applied_step: int | None
    """The first step to which its last change applied. Null until then."""
    position: int
    problem: dict[str, Any] | None
    """Why it was rejected, or failed."""
    created_at: str
    links: dict[str, str]


class EstimatedProbe(Document):
    """What a probe would match, and its estimated cost. Nothing was added."""

    object: Literal["probe_estimate"]
    matched: list[str]
    """Layers, leaves and parameters that it would watch."""
    bytes_per_step: int
    """Size of the tensors that it would watch, or store, on a due step."""
    estimated_cost_s: float
    """Estimated seconds per due step."""


class AttachedProbeList(ListDocument):
    """Probes, in order."""

    data: list[AttachedProbe]


class Checkpoint(Document):
    """A saved training state."""

    id: str
    object: Literal["checkpoint"]
    name: str | None
    """Only for uploaded checkpoints."""
    job: str | None
    """Null for uploaded checkpoints."""
    attempt: int | None
    step: int
    """Number of updates so far."""
    epoch: int
    final: bool
    best: bool
    """Whether it is the best of the job's existing checkpoints, according to
    `checkpoint.keep_best`."""
    reason: str | None
    """Why it is the best, such as `lowest validation/loss`. Null if it is not."""
    state: Literal["complete", "damaged"]
    """No job resumes from a damaged one."""
    size_bytes: int
    files: dict[str, dict[str, Any]]
    metrics: dict[str, Any]
    created_at: str
    links: dict[str, str]


class CheckpointNetwork(Document):
    """The network that a checkpoint's weights belong to."""

    object: Literal["checkpoint_network"]
    network: dict[str, Any]
    """The graph, with all sizes."""
    fields: dict[str, Any]
    """The fields that it reads, as in the data of a job."""


class CheckpointList(ListDocument):
    """Checkpoints: of a job by step; of all jobs newest first."""

    data: list[Checkpoint]


class ModelVersion(Document):
    """A published checkpoint."""

    object: Literal["model_version"]
    model: str
    version: int
    aliases: list[str]
    """Those that name this version."""
    checkpoint: str
    job: str | None
    """The job that saved the checkpoint. Null for uploaded weights."""
    step: int
    """Number of updates until the checkpoint was saved."""
    epoch: int
    state: Literal["complete", "damaged"]
    """State of the checkpoint."""
    size_bytes: int
    metrics: dict[str, Any]
    """The metrics when the checkpoint was saved."""
    created_at: str
    """When it was published."""
    created_by: str | None
    """Name of the API key that published it, even if the key no longer exists."""
    links: dict[str, str]


class ServedBy(Document):
    """A serve job that names a model."""

    job: str
    reference: str
    """As its spec names the model: `mnist@production`."""
    version: int | None
    """The version that answers. Null: no process of the job listens, for example while it is
    queued or paused."""
    state: State
    """The state of the job."""


class ModelSummary(Document):
    """A published model in a list."""

    id: str
    object: Literal["model"]
    name: str
    """Unique for its owner."""
    latest: int
    """The number of the newest version."""
    num_versions: int
    aliases: dict[str, int]
    """Alias → number of the version that it names."""
    served_by: list[ServedBy]
    """The jobs of the kind `serve` that have not ended and name the model, oldest first."""
    created_at: str
    updated_at: str
    """When a version was published or deleted, or an alias was changed."""
    links: dict[str, str]


class Model(ModelSummary):
    """A published model."""

    versions: list[ModelVersion]
    """Newest first. Their checkpoints cannot be deleted."""


class ModelList(ListDocument):
    """Published models, newest first."""

    data: list[ModelSummary]


class Artifact(Document):
    """A file that a job created."""

    object: Literal["artifact"]
    job: str
    name: str
    media_type: str
    size_bytes: int
    created_at: str
    href: str


class ArtifactList(ListDocument):
    """Artifacts, by name."""

    data: list[Artifact]


class Printed(Document):
    """Lines that a process printed."""

    job: str
    seq: int
    attempt: int
    at: str
    type: Literal["log"]
    rank: int
    stream: str
    lines: list[str]
    levels: list[LogLevel]
    """The level of each line."""


class PrintedList(ListDocument):
    """Output of processes, in order."""

    data: list[Printed]


class ServedRequest(Document):
    """A request to a served model, as the request log keeps it."""

    id: str
    object: Literal["served_request"]
    job: str
    """The serve job."""
    replica: str
    """The job whose process answered: the serve job itself, or a further replica."""
    at: str
    """When the request arrived in the process."""
    model: str
    version: int
    """The version that answered, or that the request was checked against."""
    status: int
    code: str | None
    """Of the error. Null: the request was answered."""
    reference: str
    """The model as the client named it."""
    request_id: str | None
    """`X-Request-Id` of the response. Null: the client chose it, or used gRPC."""
    num_rows: int | None
    """Null: the request could not be read."""
    asked: list[str] | None
    """The layers that were returned; the first 100."""
    queue_ms: Number | None
    compute_ms: Number | None
    """Of the batch that the request was a part of."""
    form: Literal["inputs", "rows"] | None
    """Whether `inputs` are by field or by column. Null: no inputs were recorded."""
    inputs: dict[str, JsonValue] | None
    """Values as they were sent, with an entry for each row. A large array is an object with
    `shape`, `dtype` and `sha256`, an image one with `image.size_bytes` and `image.sha256`."""
    outputs: dict[str, JsonValue] | None
    """Values by `<layer>/<field>`, as in the response. A large one is an object with `shape`."""
    redacted: list[str]
    """Fields, columns and outputs whose values are not recorded."""
    too_large: list[Literal["inputs", "outputs"]]
    """What was not recorded because of `max_request_bytes`."""


class ServedRequestList(ListDocument):
    """Recorded requests, newest first."""

    data: list[ServedRequest]


class DeviceProcess(Document):
    """A process that computes on a device."""

    pid: int | None
    """Null: only admins see it."""
    memory_bytes: int | None


class Interconnect(Document):
    """How a device is attached to its host and to the other devices there."""

    pci_bus: str | None
    pcie_generation: int | None
    """The current one: an idle device may use a lower one."""
    pcie_lanes: int | None
    pcie_max_generation: int | None
    pcie_max_lanes: int | None
    nvlinks: int | None
    """Number of active NVLinks."""
    peers: dict[str, str]
    """By the id of another device: ``nvlink``, or the nearest thing that both share:
    ``same_board``, ``pcie_switch``, ``pcie_switches``, ``host_bridge``, ``numa_node``,
    ``system``."""


class Device(Document):
    """A device of a worker."""

    object: Literal["device"]
    worker: str
    worker_state: Literal["active", "draining", "stopped", "lost"]
    id: str
    kind: str
    number: int
    name: str
    uuid: str | None
    memory_bytes: int | None
    healthy: bool
    reason: str | None
    state: Literal["free", "busy", "unavailable"]
    job: str | None
    """The job that uses it, if the caller may see that job."""
    memory_used_bytes: int | None
    """Null, as for all that follows: it is a CPU core, or the driver does not report it."""
    utilization_percent: float | None
    """Part of the last moments in which the device computed. A MIG instance has none of its own."""
    temperature_celsius: float | None
    power_watts: float | None
    processes: list[DeviceProcess] | None
    """The processes that compute on it, also those outside this service."""
    compute_capability: str | None = Field(examples=["9.0"])
    mig: Literal["instance", "enabled", "disabled"] | None
    """Whether it is a MIG instance, or in MIG mode. Null: it has no MIG mode."""
    numa_node: int | None
    """The NUMA node of the host that it is attached to."""
    interconnect: Interconnect | None


DEVICE_FACTS = (
    *("memory_used_bytes", "utilization_percent", "temperature_celsius", "power_watts"),
    *("processes", "compute_capability", "mig", "numa_node", "interconnect"),
)
"""The fields of a device that its driver reports."""


class DeviceList(ListDocument):
    """Devices, by worker."""

    data: list[Device]


class Worker(Document):
    """A worker process that runs jobs."""

    id: str
    object: Literal["worker"]
    state: Literal["active", "draining", "stopped", "lost"]
    host: str
    version: str
    started_at: str
    last_seen_at: str | None
    stopped_at: str | None
    """When it was stopped gracefully. Null: it was not."""
    draining: bool
    info: dict[str, Any]


VERSIONS = (
    *("glasshouse", "python", "torch", "triton", "driver", "driver_cuda"),
    *("cuda", "hip", "cudnn", "nccl", "mkl", "onednn", "openmp"),
)
"""The names of `System.versions`."""


class NumaNode(Document):
    """A NUMA node of a host."""

    node: int
    cpus: str | None = Field(examples=["0-15,32-47"])
    memory_bytes: int | None


class Processors(Document):
    """The processors of a host."""

    name: str | None
    cores: int | None
    logical_cores: int | None
    job_cores: int | None
    """How many cores jobs may use."""
    core_flops: float | None
    """Measured FLOP/s of one core, float32."""
    numa_nodes: list[NumaNode] | None


class HostMemory(Document):
    """The memory of a host."""

    total_bytes: int | None
    available_bytes: int | None


class System(Document):
    """The hardware and the library versions of a worker's host."""

    object: Literal["system"]
    worker: str
    state: Literal["active", "draining", "stopped", "lost"]
    host: str
    platform: str | None
    measured_at: str | None
    versions: dict[str, str | None]
    """``glasshouse``, ``python``, ``torch``, ``triton``, ``driver``, ``driver_cuda`` (the newest
    CUDA that the driver supports), and the libraries of this build of torch: ``cuda``, ``hip``,
    ``cudnn``, ``nccl``, ``mkl``, ``onednn``, ``openmp``. Null: it has none."""
    cpu: Processors
    memory: HostMemory
    devices: list[Device]
    """The accelerators, as in ``GET /devices``."""


class SystemList(ListDocument):
    """Hardware and versions, by worker."""

    data: list[System]


class WorkerList(ListDocument):
    """Workers, by name."""

    data: list[Worker]


class QueuedJob(Document):
    """A queued job."""

    object: Literal["queued_job"]
    position: int
    """Number of jobs ahead of it, of all owners."""
    job: str
    name: str | None
    priority: int
    queued_at: str
    devices: dict[str, Any]
    reason: str = Field(examples=["no worker", "no free device", "behind 2 jobs"])


class QueuedJobList(ListDocument):
    """Queued jobs, the next to start first."""

    data: list[QueuedJob]


READ = (304, 400, 401, 404, 422)
"""Error statuses of routes that read data of a job."""


def binary(*media: str, model: type[BaseModel] | None = None, others: tuple[int, ...]) -> Any:
    """Return the ``responses`` of a route that returns bytes and optionally JSON."""
    found = answers(200, model, *others)
    schema = {"schema": {"type": "string", "contentMediaType": "application/octet-stream"}}
    found[200]["content"] = dict.fromkeys(media, schema)
    return found
