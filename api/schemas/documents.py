"""The answers of the API as schemas: for the OpenAPI document, and checked in the tests."""

from typing import Annotated, Any, Literal

from fastapi import Header, Query
from pydantic import BaseModel, ConfigDict, JsonValue

from models.state import State

Waited = Annotated[
    str | None,
    Header(alias="Prefer", description="`wait=N`: hold the answer for up to N (≤ 60) seconds."),
]
Digest = Annotated[
    str | None,
    Query(pattern=r"^[0-9a-f]{64}$", description="Of the file, in hexadecimal."),
]
Number = float | Literal["NaN", "Infinity", "-Infinity"]


class Document(BaseModel):
    """An answer; every field is always there."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ListDocument(Document):
    """One page of a list."""

    object: Literal["list"]
    has_more: bool
    next: str | None
    """The cursor for `?after=`; null at the end."""


class FieldProblem(Document):
    """What is wrong with one field."""

    pointer: str
    """JSON Pointer into the body; `/query/…` and `/header/…` for parameters."""
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


class JobDevice(Document):
    """A device that a job has."""

    worker: str
    kind: str
    id: str


class JobWarning(Document):
    """Something that may not be meant; the job runs."""

    pointer: str
    detail: str
    code: str


class Overhead(Document):
    """What watching costs a job."""

    fraction: Number | None
    """Of a step's own time, at the intervals in force."""
    budget: float | None
    """The largest `max_overhead` of its probes; null where none has one."""
    unbudgeted: Number | None = None
    """The part of `fraction` due to probes without a budget (`max_overhead: null`, or `at`)."""


class Job(Document):
    """A job."""

    id: str
    object: Literal["job"]
    kind: Literal["train", "infer"]
    name: str
    state: State
    state_reason: str | None
    created_at: str
    created_by: str | None
    """The name of the API key that submitted it, also when that key is no more; null: not known."""
    queued_at: str
    started_at: str | None
    ended_at: str | None
    not_before: str | None
    """A queued job that failed through no fault of its own is not tried again before this."""
    paused_at: str | None
    """Since when it is paused."""
    paused_s: float
    """How long it was paused before that, all together."""
    attempt: int
    """0 until a worker has taken it."""
    labels: dict[str, str]
    priority: int
    parent: str | None
    devices: list[JobDevice]
    progress: dict[str, Any] | None
    summary: dict[str, dict[str, Number | None]]
    """The last, lowest and highest value of each metric."""
    directions: dict[str, Literal["min", "max"]]
    """Which value of a metric is its best: the lowest (`min`) or the highest (`max`). Metrics whose
    names do not tell are missing."""
    probe_overhead: Overhead | None
    """What watching costs; null before it was measured."""
    error: dict[str, JsonValue] | None
    last_seq: int
    """Number of its newest event."""
    warnings: list[JobWarning]
    links: dict[str, str]
    result: JsonValue | None = None
    """Of an inference, when it is small."""


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
    free: bool


class Plan(BaseModel):
    """What a job would do."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)
    object: Literal["plan"]
    spec: dict[str, JsonValue]
    """As it would run; can be submitted."""
    layers: list[dict[str, JsonValue]]
    parameters: int
    flops: int | None
    memory: dict[str, int]
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
    """Of one row; ``null`` first where each row is a list with its own length."""


class Note(BaseModel):
    """What the reader assumed about a file; check it after the upload."""

    code: str
    """``header_guessed``: nothing in a table of texts settles whether its first row is a header."""
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
    """Of images: the height x width that all of them were brought to, if one was asked for."""
    header: bool | None
    """Of csv and tsv: whether the first row names the columns, if the upload said so."""
    notes: list[Note]
    """Guesses of the reader that you may want to correct."""
    created_at: str
    links: dict[str, str]


class DatasetList(ListDocument):
    """Datasets."""

    data: list[Dataset]


class Rows(ListDocument):
    """Some rows of a dataset."""

    data: list[dict[str, JsonValue]]
    split: str
    offset: int
    num_rows: int
    """Of the whole split."""
    note: str | None
    """What is left out of long rows."""


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
    """Its first characters."""
    created_at: str
    revoked_at: str | None


class NewKey(Key):
    """An API key, shown this once."""

    key: str | None
    """Null when the answer is given again: a key is never stored."""


class KeyList(ListDocument):
    """API keys."""

    data: list[Key]


class Ticket(Document):
    """A link that opens a browser session once."""

    url: str
    expires_in_s: int


class Command(Document):
    """Something asked of a running job."""

    id: str
    object: Literal["command"]
    job: str
    body: dict[str, JsonValue]
    by: str
    """The owner of the key that asked."""
    state: Literal["pending", "applied", "rejected"]
    step: int | None
    """The first step for which it holds."""
    old: dict[str, JsonValue] | None
    """The settings that it changed, as they were."""
    new: dict[str, JsonValue] | None
    problem: dict[str, JsonValue] | None
    """Why it was rejected."""
    created_at: str
    links: dict[str, str]


class CommandList(ListDocument):
    """Commands."""

    data: list[Command]


class QuotaLimits(Document):
    """The quotas in force; null: no limit."""

    queued_jobs: int
    running_jobs: int | None
    devices: int | None
    storage_bytes: int | None
    uploads: int
    streams: int
    requests_per_s: float


class QuotaUse(Document):
    """How much is used; streams, and uploads coming in, are those of the process that answers."""

    queued_jobs: int
    running_jobs: int
    devices: int
    storage_bytes: int
    uploads: int
    streams: int


class Quotas(Document):
    """What an owner may use, and uses."""

    object: Literal["quotas"]
    owner: str
    limits: QuotaLimits
    own: dict[str, int | float]
    """Those that are set for this owner; the others are the settings'."""
    used: QuotaUse


class Catalog(Document):
    """One section of the catalogue."""

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
    """An address that is told when jobs move."""

    id: str
    object: Literal["webhook"]
    owner: str
    url: str
    events: list[str]
    """Types that it wants; empty: all."""
    labels: dict[str, str]
    created_at: str
    failing_since: str | None
    """The first failure after the last success."""
    disabled_at: str | None
    """It was switched off then; make a new one."""
    disabled_reason: str | None
    links: dict[str, str]


class NewWebhook(Webhook):
    """A webhook with its secret, shown this once."""

    secret: str | None
    """Null when the answer is given again."""


class WebhookList(ListDocument):
    """Webhooks."""

    data: list[Webhook]


class Delivery(Document):
    """A message to a webhook."""

    id: str
    """Also its `webhook-id`."""
    object: Literal["delivery"]
    webhook: str
    type: str
    state: Literal["pending", "delivered", "failed"]
    tries: int
    status: int | None
    """HTTP status of the last answer."""
    problem: str | None
    """Why the last try failed."""
    payload: dict[str, JsonValue]
    created_at: str
    ended_at: str | None


class DeliveryList(ListDocument):
    """Messages to a webhook."""

    data: list[Delivery]


class Readiness(Document):
    """Whether the service can work."""

    status: Literal["ok", "degraded", "down"]
    checks: dict[str, str]
    """By name: `ok`, or what is wrong."""
    warnings: dict[str, str]
    """What works, but should be mended."""


TITLES = {
    200: "Done.",
    201: "Made.",
    202: "Asked for.",
    204: "Gone.",
    304: "Not changed.",
    400: "The request cannot be read.",
    401: "The key is missing or not valid.",
    403: "The key does not allow this.",
    404: "There is no such thing, or it is somebody else's.",
    406: "There is no such format.",
    408: "The rest of the request did not come in time.",
    409: "The thing is in a state that does not allow this.",
    412: "The thing has changed meanwhile.",
    413: "The body is too large.",
    415: "The body has the wrong media type.",
    422: "The request can be read but not be done.",
    429: "A quota is used up, or too many requests; `Retry-After` says when to ask again.",
    503: "Not now; try again.",
}


def answers(status: int, model: type[BaseModel] | None, *others: int) -> dict[int | str, Any]:
    """The ``responses`` of a route: its own, then problem documents."""
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
