"""The events of a job: one discriminated union, dense ``seq`` per job from 1.

What the rank writes, the ledger stores and the stream sends has these shapes. Hot paths pass
plain dicts of the same form; these models document them, type the client and check the tests.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic import Field as Constraint

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""A number as JSON carries it; ``jsonio.number`` turns the names into floats."""

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
"""How the names of metrics begin that are about the job's running, not about its network."""


def is_upkeep(name: str) -> bool:
    """Whether a metric is about the job's running: no summary and no line of progress shows it."""
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
    """A worker began to run the job."""

    type: Literal["attempt"]
    n: int
    resumed_from_step: int | None
    """The step that it runs first: what earlier attempts said of that step and of later ones gives
    way. 0: it begins anew. Null: it is the first attempt."""


class MetricsEvent(_Event):
    """Figures of one step."""

    type: Literal["metrics"]
    step: int
    epoch: int
    values: dict[str, Number]


class StatsEvent(_Event):
    """Summaries of watched tensors of one step."""

    type: Literal["stats"]
    step: int
    phase: Literal["train", "evaluate"]
    columns: list[str]
    rows: list[list[str | Number]]
    """Of the tensors of which ``stats`` are wanted."""
    histograms: list[tuple[str, str, list[int], list[int]]] | None = None
    """Layer, kind, the bins that are not empty (``glasshouse.bins``), and their counts."""
    quantiles: list[list[str | Number]] | None = None
    """Layer, kind, p01, p05, p25, p50, p75, p95, p99."""


class CaptureEvent(_Event):
    """A tensor, or a part of one, was kept."""

    type: Literal["capture"]
    capture: str
    layer: str
    kind: str
    step: int
    shape: list[int]
    dtype: str
    size_bytes: int
    form: str = "full"
    """`full`, or the part that was kept: `slice`, `sample`."""
    slice: str | None = None
    captured_from: list[int] | None = None
    """The shape of the whole tensor."""
    href: str


class CheckpointEvent(_Event):
    """A checkpoint is complete."""

    type: Literal["checkpoint"]
    checkpoint: str
    step: int
    epoch: int
    size_bytes: int


class LogEvent(_Event):
    """Lines that a rank printed."""

    type: Literal["log"]
    rank: int
    stream: Literal["stdout", "stderr"]
    lines: list[str]


class DroppedEvent(_Event):
    """Something was left out to keep training going, and how much of it."""

    type: Literal["dropped"]
    what: str
    count: int


class FindingEvent(_Event):
    """Something about the training that its owner should know."""

    type: Literal["finding"]
    rule: Literal["nonfinite"]
    severity: Literal["warning", "error"]
    step: int
    """The step whose numbers, or whose update, went bad."""
    layer: str | None
    """The first layer, or the data field, or ``loss``; null: nothing was found."""
    tensor: str | None
    """The leaf of its output, or the parameter."""
    kind: Literal["input", "output", "output_grad", "param", "param_grad"] | None
    phase: Literal["forward", "backward", "update"] | None
    message: str
    action: Literal["none", "skipped", "failed"]
    """What was done about it."""
    checks: list[str]
    """Which checks of the guard it was that found it."""
    split: str
    samples: list[int]
    """The rows of the batch, by their numbers in the split; the first thousand."""
    num_samples: int
    bad_samples: list[int]
    """Those of them in which the tensor was bad; empty where it has no rows."""
    causes: list[str]
    """What may have led there, the likeliest first."""
    steps: dict[str, Any]
    """``columns`` and ``rows``: loss, norm of the gradients and learning rate of the last 20 steps,
    this one included."""
    tensors: dict[str, Any]
    """``columns`` and ``rows``: statistics of the last tensors up to the bad one."""


class ProbeEvent(_Event):
    """A probe was attached, changed or removed while the job ran, or looking failed too often."""

    type: Literal["probe"]
    probe: str
    action: Literal["attached", "changed", "removed", "failed"]
    step: int
    """The first step that was watched like this; of ``failed``, the step of the last failure."""


class CommandEvent(_Event):
    """A command was applied at a step boundary, or rejected there."""

    type: Literal["command"]
    command: str
    state: Literal["applied", "rejected"]
    step: int
    """The first step for which it holds."""
    set: dict[str, Any] | None = None
    do: Literal["checkpoint", "evaluate"] | None = None
    old: dict[str, Any] | None
    """The settings that it changed, as they were."""
    new: dict[str, Any] | None
    by: str | None
    """The owner of the key that asked."""


class AdjustedEvent(_Event):
    """The engine decided something by itself that the spec leaves open.

    How often a probe looks, so that watching takes no more than it may; what ``auto`` is here.
    """

    type: Literal["adjusted"]
    what: str
    """``probe prb_….every``, ``precision``."""
    probe: str | None = None
    from_: int | str = Constraint(alias="from")
    to: int | str
    by: str
    """``max_overhead``; ``device``: by what the device is."""
    step: int
    """The first step for which it holds. Of several ``what`` at one step the last one holds."""


class StalledEvent(_Event):
    """The job makes no progress, although its worker lives. Told once, until it goes on."""

    type: Literal["stalled"]
    step: int | None
    """The last step that it reported; null: none yet."""
    seconds: float
    """Since the last sign of progress."""
    action: Literal["warn", "restart", "fail"]
    """What happens now: the spec's `on_stall`."""


class GapEvent(_Event):
    """Older events were deleted; the log goes on with the one that is named."""

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
