"""What the routes of the window answer, as schemas: for OpenAPI, and checked in the tests."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.schemas.documents import Document, ListDocument, Number, answers


class LoggedEvent(BaseModel):
    """An event of a job; its type says what else it has."""

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
    """One metric at a glance."""

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
    """Metrics over steps; null where one has no value."""

    step: list[int]
    values: dict[str, list[Number | None]]
    epoch: list[int]
    attempt: list[int] = Field(default=[])
    """Only with ``?attempt=``: whose row it is."""
    has_more: bool
    """Whether there are later steps: without ``max_points`` an answer is a page."""
    next: int | None
    """The ``from_step`` of the next page; null where this is the last."""


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
    """Without the batch axis; of a layer with several outputs, by leaf."""
    output_shapes: dict[str, list[int]]
    parameters: int
    trainable: bool
    dtype: str
    parameter_shapes: dict[str, list[int]]
    flops: int
    shared_with: str | None
    """The layer whose module this is once more, and whose the parameters are."""
    input_names: list[str]
    """Under which what goes into it is watched."""
    inner_inputs: list[str]
    """Modules inside it, by the names under which what goes into them is watched."""
    inner_outputs: list[str]
    """The same of what comes out of them."""
    state_names: list[str]
    """What the optimizer keeps of each of its parameters: ``exp_avg`` …."""
    stats: dict[str, Figures]
    """Of its output and that one's gradient, by kind."""
    tensors: dict[str, dict[str, Figures]]
    """Of everything else of it that is watched, by name and kind."""


class LayerList(ListDocument):
    """Layers, in the order of the graph."""

    data: list[Layer]


class StatsSeries(Document):
    """Figures of one tensor over steps; null where one has no value at a step."""

    layer: str
    kind: str
    phase: str
    step: list[int]
    values: dict[str, list[Number | None]]


class HistogramSeries(Document):
    """Histograms of one tensor over steps, all with the same edges."""

    layer: str
    kind: str
    phase: str
    step: list[int]
    edges: list[float]
    """One more than bars, ascending. Bars are not equally wide."""
    counts: list[list[int]]
    """For each step, the values in each bar; what is not finite is in none."""


class StatsList(ListDocument):
    """Series of statistics, by layer; of histograms with `stat=histogram`."""

    data: list[StatsSeries] | list[HistogramSeries]


class _Captured(Document):
    id: str
    job: str
    attempt: int
    step: int
    layer: str
    kind: str
    phase: str
    shape: list[int]
    dtype: str
    size_bytes: int
    form: Literal["full", "slice", "sample"]
    """What was kept of the tensor."""
    captured_from: list[int]
    """The shape of the whole tensor."""
    href: str


class Capture(_Captured):
    """A tensor that was kept."""

    object: Literal["capture"]
    slice: str | None
    """Which part was kept, as the probe asked for it."""


class CaptureList(ListDocument):
    """Captures, in the order in which they were made."""

    data: list[Capture]


class Histogram(Document):
    """How many values lie between neighbouring edges; what is not finite is in no bar."""

    edges: list[float]
    counts: list[int]


class Tensor(_Captured):
    """A tensor, summed up."""

    object: Literal["tensor"]
    slice: str | None
    captured_slice: str | None
    """Which part was kept, as the probe asked for it."""
    captured_shape: list[int]
    """Of what was kept; ``shape`` is that of the slice."""
    stats: dict[str, Number | None]
    values: Any
    """Nested lists; of more than 1,000 values the first, as one list."""
    truncated: bool
    histogram: Histogram | None
    """When it is asked for."""


class AttachedProbe(Document):
    """A probe of a job."""

    id: str
    object: Literal["probe"]
    job: str
    state: Literal["pending", "active", "removed", "rejected", "failed"]
    """`pending`: its last change holds from the next step boundary on. `failed`: looking failed
    three times, and the job looks no more."""
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
    matched: list[str]
    """Layers, leaves and parameters that it looks at."""
    bytes_per_step: int
    """Of the tensors that it looks at, on a step on which it is due; where it keeps some, of what
    it keeps."""
    estimated_cost_s: float | None
    """Seconds that a due step may take, before any was measured."""
    cost_s: float | None
    """Seconds that a due step takes, as the job has measured it; null before."""
    every_now: int | None
    """The interval in force: wider than `every` where watching took more than `max_overhead`."""
    applied_step: int | None
    """The first step for which its last change held; null until then."""
    position: int
    problem: dict[str, Any] | None
    """Why it was rejected, or failed."""
    created_at: str
    links: dict[str, str]


class EstimatedProbe(Document):
    """What a probe would look at, and may cost; nothing was attached."""

    object: Literal["probe_estimate"]
    matched: list[str]
    """Layers, leaves and parameters that it would look at."""
    bytes_per_step: int
    """Of the tensors that it would look at, or would keep, on a step on which it is due."""
    estimated_cost_s: float
    """Seconds that a due step may take."""


class AttachedProbeList(ListDocument):
    """Probes, in order."""

    data: list[AttachedProbe]


class Checkpoint(Document):
    """A saved state of training."""

    id: str
    object: Literal["checkpoint"]
    name: str | None
    """Of one that was sent."""
    job: str | None
    """None: a client has sent it."""
    attempt: int | None
    step: int
    """How many updates it has had."""
    epoch: int
    final: bool
    best: bool
    """Whether it is the best of its job's that are there, by `checkpoint.keep_best`."""
    reason: str | None
    """Why it is the best: `lowest validation/loss`. None: it is not."""
    state: Literal["complete", "damaged"]
    """Nothing resumes from a damaged one."""
    size_bytes: int
    files: dict[str, dict[str, Any]]
    metrics: dict[str, Any]
    created_at: str
    links: dict[str, str]


class CheckpointNetwork(Document):
    """What a checkpoint's weights are the weights of."""

    object: Literal["checkpoint_network"]
    network: dict[str, Any]
    """The graph, with all sizes."""
    fields: dict[str, Any]
    """What it reads, as in the data of a job."""


class CheckpointList(ListDocument):
    """Checkpoints: of a job by step, of all newest first."""

    data: list[Checkpoint]


class Artifact(Document):
    """A file that a job made."""

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


class PrintedList(ListDocument):
    """What processes printed, in order."""

    data: list[Printed]


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
    """The job that has it, when that is the caller's."""


class DeviceList(ListDocument):
    """Devices, by worker."""

    data: list[Device]


class Worker(Document):
    """A machine that runs jobs."""

    id: str
    object: Literal["worker"]
    state: Literal["active", "draining", "stopped", "lost"]
    host: str
    version: str
    started_at: str
    last_seen_at: str | None
    stopped_at: str | None
    """When it was stopped gracefully; null: it was not."""
    draining: bool
    info: dict[str, Any]


class WorkerList(ListDocument):
    """Workers, by name."""

    data: list[Worker]


class QueuedJob(Document):
    """A job that waits."""

    object: Literal["queued_job"]
    position: int
    """How many jobs, of anybody, are before it."""
    job: str
    name: str | None
    priority: int
    queued_at: str
    devices: dict[str, Any]
    reason: str = Field(examples=["no worker", "no free device", "behind 2 jobs"])


class QueuedJobList(ListDocument):
    """Jobs that wait, the next to start first."""

    data: list[QueuedJob]


READ = (304, 400, 401, 404, 422)
"""What may go wrong when something of a job is read."""


def binary(*media: str, model: type[BaseModel] | None = None, others: tuple[int, ...]) -> Any:
    """The ``responses`` of a route that gives bytes, and perhaps a document too."""
    found = answers(200, model, *others)
    schema = {"schema": {"type": "string", "contentMediaType": "application/octet-stream"}}
    found[200]["content"] = dict.fromkeys(media, schema)
    return found
