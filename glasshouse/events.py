"""The events of a job: one discriminated union, dense ``seq`` per job from 1.

The rank writes, the database stores and the stream sends events in these shapes. Hot paths pass
plain dicts of the same form; the models are for documentation, client types and tests.
"""

from datetime import datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic import Field as Constraint

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""A JSON number, or the string for NaN or Inf; ``jsonio.number`` converts it to a float."""

STATS_COLUMNS = (
    "layer",
    "kind",
    "mean",
    "std",
    "min",
    "max",
    "l2",
    "absmax",
    "zeros",
    "nan",
    "inf",
)
"""The order of a ``stats`` row. ``zeros`` is a fraction; ``nan`` and ``inf`` are counts; the
moments are over the finite values, ``std`` with the biased (population) divisor."""

UPKEEP = ("time/", "throughput/", "system/", "data/")
"""Prefixes of system metrics, which describe the run and not the network."""


def is_upkeep(name: str) -> bool:
    """Whether a metric is a system metric, which summaries and progress lines do not show."""
    return name.startswith(UPKEEP)


class _Event(BaseModel):
    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, serialize_by_alias=True)

    job: str
    seq: int
    """Dense per job, from 1."""
    attempt: int
    """0 until a worker has taken the job."""
    at: datetime
    """When it happened; for a step, when the step ended in the rank."""


class StateEvent(_Event):
    """The job moved to another state."""

    type: Literal["state"]
    from_: str | None = Constraint(alias="from")
    to: str
    reason: str | None


class AttemptEvent(_Event):
    """A worker started an attempt of the job."""

    type: Literal["attempt"]
    n: int
    resumed_from_step: int | None
    """The first step of the attempt, which supersedes events of earlier attempts from this step on.
    0: it starts from scratch. Null: it is the first attempt."""


class MetricsEvent(_Event):
    """Metrics of one step."""

    type: Literal["metrics"]
    step: int
    epoch: int
    values: dict[str, Number]


class RankStats(BaseModel):
    """Statistics of one process, of the tensors whose probes want its own values."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    rank: int
    rows: list[list[str | Number]]
    histograms: list[tuple[str, str, list[int], list[int]]] | None = None
    quantiles: list[list[str | Number]] | None = None


class StatsEvent(_Event):
    """Statistics of the observed tensors of one step."""

    type: Literal["stats"]
    step: int
    phase: Literal["train", "evaluate"]
    columns: list[str]
    rows: list[list[str | Number]]
    """Rows of the tensors whose probes want ``stats``."""
    histograms: list[tuple[str, str, list[int], list[int]]] | None = None
    """Layer, kind, the non-empty bins (``glasshouse.histogram_bins``) and their counts."""
    quantiles: list[list[str | Number]] | None = None
    """Layer, kind, p01, p05, p25, p50, p75, p95, p99."""
    ranks: list[RankStats] | None = None
    """The values of single processes, which probes with ``ranks`` want; the others are those of all
    processes together."""


class CaptureEvent(_Event):
    """A tensor or a part of one was stored."""

    type: Literal["capture"]
    capture: str
    layer: str
    kind: str
    step: int
    shape: list[int]
    dtype: str
    size_bytes: int
    form: str = "full"
    """`full`, or the stored part: `slice`, `sample`."""
    slice: str | None = None
    captured_from: list[int] | None = None
    """The shape of the whole tensor."""
    rank: int | None = None
    """The process whose tensor it is. None: all processes together."""
    href: str


class CheckpointEvent(_Event):
    """A checkpoint is complete."""

    type: Literal["checkpoint"]
    checkpoint: str
    step: int
    epoch: int
    size_bytes: int


LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)
"""In ascending order."""


class LogEvent(_Event):
    """Log lines of a rank."""

    type: Literal["log"]
    rank: int
    stream: Literal["stdout", "stderr"]
    lines: list[str]
    levels: list[LogLevel] | None = None
    """The level of each line. None in events of releases before this field."""


class DroppedEvent(_Event):
    """Data was dropped so that training is not blocked."""

    type: Literal["dropped"]
    what: str
    count: int


class NonfiniteFinding(_Event):
    """A guard found NaN or Inf in a step of training."""

    type: Literal["finding"]
    rule: Literal["nonfinite"]
    severity: Literal["warning", "error"]
    step: int
    """The step whose values or update were bad."""
    layer: str | None
    """The first bad layer, or the data field, or ``loss``; null: none was found."""
    tensor: str | None
    """The leaf of the layer's output, or the parameter."""
    kind: Literal["input", "output", "output_grad", "param", "param_grad"] | None
    phase: Literal["forward", "backward", "update"] | None
    message: str
    action: Literal["none", "skipped", "failed"]
    """The action taken."""
    checks: list[str]
    """The checks of the guard that failed."""
    split: str
    samples: list[int]
    """The row numbers of the batch in the split; at most the first 1,000."""
    num_samples: int
    bad_samples: list[int]
    """The rows in which the tensor was bad; empty if the tensor has no rows."""
    causes: list[str]
    """Possible causes, most likely first."""
    steps: dict[str, Any]
    """``columns`` and ``rows``: loss, gradient norm and learning rate of the last 20 steps,
    including this one."""
    tensors: dict[str, Any]
    """``columns`` and ``rows``: statistics of the last tensors up to the bad one."""


class DriftedSeries(BaseModel):
    """A value of each row whose distribution is compared with that of the training rows."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    of: Literal["field", "layer"]
    name: str
    """The field or the output of a layer."""
    measure: str
    """The name of a column, ``value``, ``category``, ``mean``, ``rms``, ``class``, ``length`` …"""


class DriftFinding(_Event):
    """Rows that a model is served with are not distributed as its training rows.

    Sent once, and again only after a window in which the series had not drifted.
    """

    type: Literal["finding"]
    rule: Literal["drift"]
    severity: Literal["warning"]
    model: str
    version: int
    series: DriftedSeries
    psi: float
    """Population stability index of the window."""
    threshold: float
    rows: int
    """The number of served rows of the window that have the series."""
    message: str
    """What has changed, in words."""
    causes: list[str]
    """Possible causes, most likely first."""
    remedies: list[str]
    """What to do, the most promising first."""


FindingEvent = Annotated[NonfiniteFinding | DriftFinding, Constraint(discriminator="rule")]
"""A finding about the training, or about the requests to a served model."""


class ProbeEvent(_Event):
    """A probe was attached, changed or removed while the job ran, or it failed too often."""

    type: Literal["probe"]
    probe: str
    action: Literal["attached", "changed", "removed", "failed"]
    step: int
    """The first step that the change applies to; for ``failed``, the step of the last failure."""


class CommandEvent(_Event):
    """A command was applied at a step boundary, or rejected there."""

    type: Literal["command"]
    command: str
    state: Literal["applied", "rejected"]
    step: int
    """The first step that it applies to."""
    set: dict[str, Any] | None = None
    do: Literal["checkpoint", "evaluate"] | None = None
    old: dict[str, Any] | None
    """The changed settings with their previous values."""
    new: dict[str, Any] | None
    by: str | None
    """The owner of the API key that created it."""


class AdjustedEvent(_Event):
    """The engine chose a value that the spec leaves open.

    How often a probe looks, so that watching takes no more than it may; what ``auto`` is here; the
    threads of each process, as jobs come and leave.
    """

    type: Literal["adjusted"]
    what: str
    """``probe prb_….every``, ``precision``, ``threads``."""
    probe: str | None = None
    from_: int | str = Constraint(alias="from")
    to: int | str
    by: str
    """``max_overhead``; ``device``: by what the device is; ``scheduler``: by what divides the
    cores."""
    step: int
    """The first step for which it holds. Of several ``what`` at one step the last one holds."""


class StalledRank(BaseModel):
    """What one process of a stalled job was doing."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    rank: int
    state: Literal["stopped", "silent", "running", "waiting"]
    """``stopped`` by a signal; ``silent``: it did not answer; ``waiting`` for other processes."""
    waits_in: str | None
    """What it waits in: the operation and the number of a collective."""


class StalledEvent(_Event):
    """The job makes no progress, although its worker is alive. Sent once per stall."""

    type: Literal["stalled"]
    step: int | None
    """The last step that it reported; null: none yet."""
    seconds: float
    """Seconds since the last progress."""
    action: Literal["warn", "restart", "fail"]
    """The action taken, from `on_stall` of the spec."""
    cause: int | None = None
    """The rank that keeps the others waiting; null: it is not known."""
    reason: str | None = None
    """What that rank does or has not done, as text."""
    ranks: list[StalledRank] = []
    """The processes that were running."""


class ServedVersion(BaseModel):
    """A version of a model that a replica serves."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    reference: str
    """As the spec names it: ``mnist@production``."""
    model: str
    version: int


class ServingEvent(_Event):
    """A replica of a serve job serves these versions from now on."""

    type: Literal["serving"]
    models: list[ServedVersion]
    problem: str | None = None
    """Why another version could not be loaded; the previous versions still serve."""


class GapEvent(_Event):
    """Older events were deleted; the log continues at ``first_available``."""

    type: Literal["gap"]
    first_available: int


class EndEvent(_Event):
    """The job has ended. Always the last event."""

    type: Literal["end"]
    state: Literal["succeeded", "failed", "cancelled"]


Event = Annotated[
    StateEvent
    | AttemptEvent
    | MetricsEvent
    | StatsEvent
    | CaptureEvent
    | CheckpointEvent
    | LogEvent
    | DroppedEvent
    | FindingEvent
    | ProbeEvent
    | CommandEvent
    | AdjustedEvent
    | StalledEvent
    | ServingEvent
    | GapEvent
    | EndEvent,
    Constraint(discriminator="type"),
]
EVENT_TYPES = (
    "state",
    "attempt",
    "metrics",
    "stats",
    "capture",
    "checkpoint",
    "log",
    "dropped",
    "finding",
    "probe",
    "command",
    "adjusted",
    "stalled",
    "serving",
    "gap",
    "end",
)
_EVENT: TypeAdapter[Any] = TypeAdapter(Event)


def parse_event(data: dict[str, Any]) -> Event:
    """Read one event as the API sends it.

    Raises:
        pydantic.ValidationError: it is of no known type or lacks a field.
    """
    return _EVENT.validate_python(data)
