"""Response schemas, for the OpenAPI document. The tests check responses against them."""

from typing import Annotated, Any, Literal

from fastapi import Header, Query
from pydantic import BaseModel, ConfigDict, JsonValue

from models.state import State

Waited = Annotated[
    str | None,
    Header(alias="Prefer", description="`wait=N`: hold the response for up to N (≤ 60) seconds."),
]
Digest = Annotated[
    str | None,
    Query(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the file, in hexadecimal."),
]
Number = float | Literal["NaN", "Infinity", "-Infinity"]


class Document(BaseModel):
    """A response. Every field is always present."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ListDocument(Document):
    """One page of a list."""

    object: Literal["list"]
    has_more: bool
    next: str | None
    """The cursor for `?after=`. Null on the last page."""


class FieldProblem(Document):
    """A problem with one field."""

    pointer: str
    """JSON Pointer into the body. Parameters are `/query/…` and `/header/…`."""
    detail: str
    code: str


class Problem(BaseModel):
    """RFC 9457 problem document."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)
    type: str
    """Path of the page that explains this code."""
    title: str
    status: int
    detail: str
    code: str
    request_id: str
    retryable: bool
    """Whether the same request may succeed later."""
    errors: list[FieldProblem] | None = None
    hint: str | None = None
    error: str | None = None
    """Only below `/v2`: `detail` and `hint`, as the Open Inference Protocol names them."""


class JobDevice(Document):
    """A device that is assigned to a job."""

    worker: str
    kind: str
    id: str


class JobRank(Document):
    """One process of a job."""

    rank: int
    worker: str
    device: str
    """Its CUDA device, or the first of its CPU cores. With `parallel.strategy` `placed` it has all
    CUDA devices of the job, and this is the first."""
    threads: int
    """The number of its torch threads. On CPU cores it has one on each, and the number changes
    while the job runs if the spec names no ``threads``. With CUDA devices it is ``threads``, or
    one."""
    state: str
    """The state of the job: its processes start and end together."""


class JobWarning(Document):
    """Something that may be a mistake. The job runs anyway."""

    pointer: str
    detail: str
    code: str


class Overhead(Document):
    """The cost of watching a job."""

    fraction: Number | None
    """Fraction of the step time without watching, at the current intervals."""
    budget: float | None
    """The largest `max_overhead` of the job's probes. Null: none of them has one."""
    unbudgeted: Number | None = None
    """The part of `fraction` that probes without a budget cause (`max_overhead: null`, or `at`)."""


class ServedReference(Document):
    """A model that a replica serves."""

    reference: str
    """As the spec names it: `mnist@production`."""
    model: str
    version: int
    """The version that answers now."""


class Quantiles(Document):
    """Quantiles of durations in milliseconds."""

    p50: float
    p99: float


class Shadow(Document):
    """How the answers of a shadow version differ from those that clients got."""

    requests: int
    """The number of requests that it computed."""
    same_classes: int
    """Those for which all classes were the same."""
    max_difference: Number
    """The largest absolute difference of an output. Infinity: the shapes differ."""


class DriftSeries(Document):
    """How one value of a served row is distributed, compared with the training rows."""

    of: Literal["field", "layer"]
    name: str
    """The field or the output of a layer."""
    measure: str
    """The name of a column, `value`, `category`, `mean`, `rms`, `class`, `length` …"""
    psi: float
    """Population stability index."""
    threshold: float
    drifted: bool
    """Whether `psi` is above `threshold`."""


class ServedDrift(Document):
    """How the rows that a version answers differ from its training rows."""

    model: str
    version: int
    state: Literal["collecting", "watching", "unavailable"]
    """`collecting`: no window is complete yet."""
    detail: str | None
    """Why it is not watched, or what it waits for."""
    rows: int
    """The number of rows of the last complete window; 0: there was none."""
    at: str | None
    """When that was complete."""
    series: list[DriftSeries]
    """Of the last complete window, the fields first."""


class RecordedRequests(Document):
    """Counts of the request log since the process started."""

    recorded: int
    skipped: int
    """Not recorded because there was no time or no space, beside `share`."""


class Serving(Document):
    """What a serve job serves, and its requests since its process started.

    The newest report of its process, at most some seconds old. Counts stay while no process runs.
    """

    models: list[ServedReference]
    """Empty while no process listens."""
    requests: int
    """The number of requests that it received."""
    requests_per_s: float
    """The rate since the report before."""
    latency_ms: Quantiles | None
    """Of the requests since the report before, from their arrival in the process to the end of the
    computation. Null: there were none."""
    queue_ms: Quantiles | None
    """The part of it in which a request waits."""
    waiting: int
    """The requests in the queue."""
    answered: dict[str, int]
    """`model:version` → the number of requests that it answered."""
    refused: dict[str, int]
    """Error code → the number of requests that were refused with it."""
    failed: dict[str, int]
    """`model:version` → the number of requests on which its network failed."""
    shadows: dict[str, Shadow]
    """`model:version` → how the answers of a shadow differ."""
    drift: list[ServedDrift]
    """How served rows differ from training rows, for each version that answers clients. Empty: the
    job has `drift` null, or no process has reported yet."""
    request_log: RecordedRequests | None
    """Null: requests are not recorded, or the process has not reported yet."""


class Job(Document):
    """A job."""

    id: str
    object: Literal["job"]
    kind: Literal["train", "infer", "evaluate", "serve", "diagnose"]
    name: str
    state: State
    state_reason: str | None
    created_at: str
    created_by: str | None
    """Name of the API key that submitted it, even if the key no longer exists. Null: unknown."""
    queued_at: str
    started_at: str | None
    ended_at: str | None
    not_before: str | None
    """A queued job that failed through no fault of its own is not retried before this time."""
    paused_at: str | None
    """When the current pause began."""
    paused_s: float
    """Total seconds of earlier pauses."""
    attempt: int
    """0 until a worker has taken the job."""
    labels: dict[str, str]
    priority: int
    parent: str | None
    devices: list[JobDevice]
    ranks: list[JobRank]
    """The processes that train the network, of the newest attempt. ``error.rank`` is the one that
    failed first."""
    progress: dict[str, Any] | None
    summary: dict[str, dict[str, Number | None]]
    """The last, min and max value of each metric."""
    directions: dict[str, Literal["min", "max"]]
    """Whether the best value of a metric is its min or its max. Metrics for which the name does not
    imply a direction are absent."""
    probe_overhead: Overhead | None
    """The cost of watching. Null until it is measured."""
    error: dict[str, JsonValue] | None
    serving: Serving | None
    """What a job of the kind `serve` serves. Null for other kinds."""
    last_seq: int
    """Sequence number of the newest event."""
    warnings: list[JobWarning]
    links: dict[str, str]
    result: JsonValue | None = None
    """The result of a job that is not a training: the outputs of an inference if they are small,
    the measurements and findings of a diagnose job."""


class JobList(ListDocument):
    """Jobs."""

    data: list[Job]


class PlannedDevice(Document):
    """A device that the job may get."""

    worker: str
    kind: str
    id: str
    name: str
    memory_bytes: int | None
    host_memory_bytes: int | None
    """The memory of its worker's host; of a CPU core that is its ``memory_bytes``."""
    free: bool


class PlannedStrategy(Document):
    """What a job would take under one strategy."""

    strategy: Literal["data", "fsdp", "tensor", "pipeline"]
    memory: dict[str, int]
    """Bytes by what they are for, of each process."""
    exchanged_bytes: int
    """What each process sends in a step, if all exchanges are rings."""
    fits: bool | None
    """Whether that fits into the memory of a device that the job may get. Null: no memory is
    known."""
    host_bytes: int | None = None
    """What all processes need together, on CPU cores of one host; with ``cpu_offload``, of the host
    of their devices. With ``pipeline``, whose processes differ, ``memory`` is that of the process
    that needs the most."""
    cpu_offload: bool = False
    """Whether what each process keeps is in host memory: ``offloaded_bytes`` of ``memory``."""


class PlannedPart(Document):
    """What one device of a job with the strategy `placed` has."""

    device: int
    """Index into the devices of the job."""
    layers: list[str]
    memory: dict[str, int]
    """Bytes by what they are for."""


class PlannedStage(Document):
    """What one stage of a pipeline has."""

    stage: int
    process: int
    """Its place in the pipeline: of the job's ranks, those whose remainder by the size of the
    pipeline is this."""
    layers: list[str]
    memory: dict[str, int]
    """Bytes by what they are for. Activations: the outputs of the layers, and what the stage
    receives, of all micro-batches that it holds at once."""
    sent_bytes: int
    """What it sends in a step: values to the next stage, and gradients to the previous one."""


class PlannedSharing(Document):
    """How several processes, or several devices of one process, share a training."""

    strategy: Literal["data", "fsdp", "tensor", "pipeline", "placed"]
    processes: int
    axes: dict[str, int]
    """Number of processes along each axis: ``data``, ``fsdp``, ``tensor``, ``pipeline``."""
    global_batch_size: int
    """Rows of a batch of all processes."""
    exchanged_bytes: int
    """What each process sends in a step, if all exchanges are rings. With ``pipeline``: what the
    process sends that sends the most. With ``placed``: what is copied between the devices. Both at
    the size of float32."""
    host_bytes: int | None = None
    """What all processes need together, on CPU cores of one host; with ``cpu_offload``, of the host
    of their devices; null with ``placed``."""
    cpu_offload: bool = False
    """Whether what each process keeps is in host memory."""
    divided: list[str]
    """The layers of which each process computes a part, with ``tensor``."""
    strategies: list[PlannedStrategy]
    """The strategies that support the job and keep its batches, the simplest first. Empty with
    ``placed``."""
    devices: list[PlannedPart] = []
    """With ``placed``: what each device has."""
    stages: list[PlannedStage] = []
    """With ``pipeline``: what each stage has."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] | None = None
    """With ``pipeline``: the order of its passes."""
    micro_batches: int | None = None
    """With ``pipeline``: the number of micro-batches of each batch."""
    bubble: float | None = None
    """With ``pipeline``: the fraction of its time in which a process waits if all stages take
    equally long: (p - 1) / (v m + p - 1), for p processes with v stages each and m micro-batches
    (Narayanan et al., 2021)."""


class Plan(BaseModel):
    """What a job would do."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)
    object: Literal["plan"]
    spec: dict[str, JsonValue]
    """The resolved spec. You can submit it."""
    layers: list[dict[str, JsonValue]]
    parameters: int
    flops: int | None
    memory: dict[str, int]
    """Bytes by what they are for, of each process; with a pipeline, of the one that needs the
    most."""
    parallel: PlannedSharing | None
    """How several processes or devices share the training. Null: there is one of each."""
    probes: list[dict[str, JsonValue]]
    num_steps: int | None
    devices: list[PlannedDevice]
    warnings: list[JobWarning]


class Column(BaseModel):
    """A column of a dataset."""

    model_config = ConfigDict(extra="allow")
    name: str
    dtype: str
    shape: list[int | None]
    """Shape of one row. ``null`` comes first if rows are lists of different lengths."""


class Note(BaseModel):
    """An assumption of the reader about a file. Check it after the upload."""

    code: str
    """``header_guessed``: the columns are all text, so the first row may or may not be a header."""
    detail: str


class Dataset(Document):
    """A dataset."""

    id: str
    object: Literal["dataset"]
    name: str
    format: str
    state: Literal["pending", "ready", "failed"]
    problem: dict[str, JsonValue] | None
    size_bytes: int
    sha256: str | None
    columns: list[Column]
    splits: dict[str, int]
    resize: str | None
    """Images: the height x width that all images were resized to, if requested."""
    header: bool | None
    """csv and tsv: whether the first row names the columns, if the upload said so."""
    notes: list[Note]
    """Assumptions of the reader that you may want to correct."""
    created_at: str
    links: dict[str, str]


class DatasetList(ListDocument):
    """Datasets."""

    data: list[Dataset]


class Rows(ListDocument):
    """Rows of a dataset."""

    data: list[dict[str, JsonValue]]
    split: str
    offset: int
    num_rows: int
    """Number of rows in the whole split."""
    note: str | None
    """What is omitted from long rows."""


class DatasetStats(Document):
    """Statistics by split and column."""

    object: Literal["dataset_stats"]
    splits: dict[str, dict[str, dict[str, JsonValue]]]


class Key(Document):
    """An API key."""

    id: str
    object: Literal["key"]
    name: str
    owner: str
    scopes: list[str]
    hint: str
    """The first characters of the key."""
    created_at: str
    revoked_at: str | None


class NewKey(Key):
    """An API key with its secret, shown only once."""

    key: str | None
    """Null in a replayed response, because keys are never stored."""


class KeyList(ListDocument):
    """API keys."""

    data: list[Key]


class Ticket(Document):
    """A link that opens a browser session once."""

    url: str
    expires_in_s: int


class Command(Document):
    """A command to a running job."""

    id: str
    object: Literal["command"]
    job: str
    body: dict[str, JsonValue]
    by: str
    """Owner of the key that sent it."""
    state: Literal["pending", "applied", "rejected"]
    step: int | None
    """The first step to which it applies."""
    old: dict[str, JsonValue] | None
    """The previous values of the settings that it changed."""
    new: dict[str, JsonValue] | None
    problem: dict[str, JsonValue] | None
    """Why it was rejected."""
    created_at: str
    links: dict[str, str]


class CommandList(ListDocument):
    """Commands."""

    data: list[Command]


class QuotaLimits(Document):
    """The quotas in force. Null: no limit."""

    queued_jobs: int
    running_jobs: int | None
    devices: int | None
    storage_bytes: int | None
    uploads: int
    streams: int
    requests_per_s: float


class QuotaUse(Document):
    """Current use. Streams and uploads in progress are those of the API process that responds."""

    queued_jobs: int
    running_jobs: int
    devices: int
    storage_bytes: int
    uploads: int
    streams: int


class Quotas(Document):
    """The limits and the current use of an owner."""

    object: Literal["quotas"]
    owner: str
    limits: QuotaLimits
    own: dict[str, int | float]
    """Limits set for this owner. The others come from the settings."""
    used: QuotaUse


class Catalog(Document):
    """One section of the catalog."""

    object: Literal["catalog"]
    section: str
    entries: list[dict[str, JsonValue]]


class Service(Document):
    """The service."""

    object: Literal["service"]
    version: str
    capabilities: dict[str, JsonValue]
    limits: dict[str, int | float | None]


class Webhook(Document):
    """An address that is notified of state changes and findings of jobs."""

    id: str
    object: Literal["webhook"]
    owner: str
    url: str
    events: list[str]
    """Types of message that it receives. Empty: all."""
    labels: dict[str, str]
    created_at: str
    failing_since: str | None
    """Time of the first failure since the last success."""
    disabled_at: str | None
    """When it was disabled. Create a new one to receive messages again."""
    disabled_reason: str | None
    links: dict[str, str]


class NewWebhook(Webhook):
    """A webhook with its secret, shown only once."""

    secret: str | None
    """Null in a replayed response."""


class WebhookList(ListDocument):
    """Webhooks."""

    data: list[Webhook]


class Delivery(Document):
    """A message to a webhook."""

    id: str
    """Also sent as the header `webhook-id`."""
    object: Literal["delivery"]
    webhook: str
    type: str
    state: Literal["pending", "delivered", "failed"]
    tries: int
    status: int | None
    """HTTP status of the last response."""
    problem: str | None
    """Why the last try failed."""
    payload: dict[str, JsonValue]
    created_at: str
    ended_at: str | None


class DeliveryList(ListDocument):
    """Messages to a webhook."""

    data: list[Delivery]


class Readiness(Document):
    """The readiness of the service."""

    status: Literal["ok", "degraded", "down"]
    checks: dict[str, str]
    """By name: `ok`, or the problem."""
    warnings: dict[str, str]
    """What works, but should be fixed."""


TITLES = {
    200: "OK.",
    201: "Created.",
    202: "Accepted.",
    204: "Deleted.",
    304: "Not modified.",
    400: "The request cannot be parsed.",
    401: "The key is missing or not valid.",
    403: "The API key does not permit this.",
    404: "Not found, or owned by someone else.",
    406: "The requested format is not available.",
    408: "The rest of the request did not arrive in time.",
    409: "The state of the resource does not allow this.",
    412: "The resource has changed since you read it.",
    413: "The body is too large.",
    415: "The body has the wrong media type.",
    422: "The request is well-formed, but not valid.",
    429: "A quota is used up, or too many requests; `Retry-After` says when to ask again.",
    500: "The request failed in the service.",
    504: "No answer in time.",
    503: "Temporarily unavailable. Try again.",
}


def answers(status: int, model: type[BaseModel] | None, *others: int) -> dict[int | str, Any]:
    """Return the ``responses`` of a route: its own response, then problem documents."""
    own: dict[str, Any] = {"description": TITLES[status]}
    if model is not None:
        own["model"] = model
    found: dict[int | str, Any] = {status: own}
    for other in others:
        if other == 304:
            found[other] = {"description": TITLES[other]}
            continue
        schema = {"$ref": "#/components/schemas/Problem"}
        found[other] = {
            "description": TITLES[other],
            "content": {"application/problem+json": {"schema": schema}},
        }
    return found


TRAIN_EXAMPLE: dict[str, Any] = {
    "kind": "train",
    "name": "digits",
    "seed": 1,
    "network": {
        "type": "graph",
        "layers": [
            {"name": "conv", "type": "Conv2d", "args": {"out_channels": 8, "kernel_size": 3}},
            {"name": "relu", "type": "ReLU"},
            {"name": "flat", "type": "Flatten"},
            {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
        ],
    },
    "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
    "optimizer": {"type": "Adam", "args": {"lr": 0.001}},
    "data": {
        "train": {"dataset": "ds_…", "split": "train"},
        "validation": {"dataset": "ds_…", "split": "validation"},
        "fields": {
            "image": {"type": "dense", "shape": [1, 8, 8]},
            "label": {"type": "integer", "dim": 10},
        },
        "batch_size": 100,
    },
    "stop": {"epochs": 2},
    "evaluate": {"every_epochs": 1},
    "metrics": [{"type": "accuracy", "inputs": ["fc", "label"]}],
    "probes": [{"layers": ["conv"], "kinds": ["output"], "every": 25, "want": ["stats"]}],
}
