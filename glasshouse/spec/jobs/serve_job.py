"""The spec of a job that serves published models."""

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    NonNegativeFloat,
    PositiveFloat,
    Tag,
    model_validator,
)
from pydantic import Field as Constraint

from glasshouse.spec.jobs.job import Job, Retry
from glasshouse.spec.jobs.request_log import RequestLog
from glasshouse.spec.model_names import canonical, parse_model_reference
from glasshouse.spec.probes import Glob
from glasshouse.spec.strict import Spec, WrongAt, repeated

MAX_MODELS = 100
MAX_REPLICAS = 64
DEFAULT_IDLE_S = 300.0
IDLE = "no request came for idle_s"
"""Why a job with ``replicas.min`` 0 is paused; a request resumes it."""


def _check_reference(text: str) -> str:
    if parse_model_reference(text) is None:
        detail = f"{text[:100]!r} refers to no published model: write name, name@alias or"
        raise ValueError(f"{detail} name:version")
    return canonical(text)


PublishedName = Annotated[
    str, Constraint(min_length=1, max_length=300), AfterValidator(_check_reference)
]
"""A published model: ``mnist`` (its newest version), ``mnist@production``, ``mnist:3``."""


class OtherVersion(Spec):
    """Another version of a model, which gets a share of its requests."""

    model: PublishedName
    """The version, of the same model. Example: ``"mnist@candidate"``."""
    share: float = Constraint(gt=0, le=1)
    """The share of requests, drawn at random for each. Example: ``0.05``."""


class ServedModel(Spec):
    """A published model to serve."""

    model: PublishedName
    """``mnist`` serves the newest version and ``mnist@production`` the one that the alias names;
    when a version is published or the alias moves, the job changes to the other version without
    losing a request. ``mnist:3`` always serves version 3. Example: ``"mnist@production"``."""
    canary: OtherVersion | None = None
    """A version that answers a share of the requests; each response names the version that
    answered. Default: none. Example: ``{"model": "mnist@candidate", "share": 0.05}``."""
    shadow: OtherVersion | None = None
    """A version that also computes a share of the requests, after they were answered and while the
    queue is not busy. Clients never get its outputs; ``serving.shadows`` of the job has how they
    differ. Default: none. Example: ``{"model": "mnist:4", "share": 0.1}``."""


def _form_of(value: object) -> str:
    return "name" if isinstance(value, str) else "object"


Entry = Annotated[
    Annotated[PublishedName, Tag("name")] | Annotated[ServedModel, Tag("object")],
    Discriminator(_form_of),
]


class Replicas(Spec):
    """How many replicas serve the models.

    A replica is a process with all models and its own device. The first one is the serve job
    itself. Each further one is a job whose ``parent`` is the serve job, and ends when that is
    paused or ends.
    """

    min: int = Constraint(default=1, ge=0, le=MAX_REPLICAS)
    """The fewest. With ``0`` the job is paused when no request came for ``idle_s``, and the next
    request resumes it and waits for it."""
    max: int = Constraint(default=1, ge=1, le=MAX_REPLICAS)
    """The most. A replica is added while requests wait too long in the queues of all replicas."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min > self.max:
            detail = f"min ({self.min}) is above max ({self.max}): set max to at least {self.min}"
            raise WrongAt("min", detail=detail)
        return self


class Drift(Spec):
    """How served rows are compared with the training rows.

    The distribution of each input field, and of the outputs of some layers, is compared by the
    population stability index (PSI): the sum over bins of (q - p) ln(q / p), where p is the share
    of the training rows in a bin, and q that of the served rows.
    """

    window: int = Constraint(default=1000, ge=100, le=1_000_000)
    """How many watched rows of a version are compared at once."""
    reference_rows: int = Constraint(default=4096, ge=100, le=100_000)
    """How many training rows they are compared with, drawn at random."""
    min_psi: float = Constraint(default=0.2, ge=0, le=100)
    """The smallest PSI that is reported. The threshold is higher where chance alone would exceed
    it: all comparisons of a window together raise a false alarm with a probability of at most
    1 %. ``0``: only chance counts."""
    layers: tuple[Glob, ...] | None = Constraint(default=None, min_length=1, max_length=100)
    """Globs of layers whose outputs are compared. Default: the network's outputs, and up to eight
    other layers with parameters. Example: ``["conv*", "fc"]``."""
    max_overhead: float = Constraint(default=0.02, gt=0, le=1)
    """Maximum time of watching. Half of it is a fraction of the time in which the network computes,
    for what delays answers; half is a fraction of all time, for counting rows after the answers.
    Requests beyond it are not watched."""

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if self.layers is not None and (again := repeated(self.layers)) is not None:
            detail = f"{self.layers[again]!r} is listed twice: remove one of them"
            raise WrongAt("layers", again, detail=detail)
        return self


class ServeJob(Job):
    """Serves published models: answers ``POST /models/{name}/predict`` and ``/v2``.

    It runs until it is canceled.
    """

    kind: Literal["serve"]
    """Selects a job that serves models."""
    models: tuple[Entry, ...] = Constraint(min_length=1, max_length=MAX_MODELS)
    """Published models, by name or with options. Example: ``["mnist@production"]``."""
    replicas: Replicas = Replicas()
    """The number of processes. Default: one. Example: ``{"min": 1, "max": 4}``."""
    max_queue: int = Constraint(default=256, ge=1, le=100_000)
    """The most requests that wait in a replica. Further ones are refused with 429 ``queue_full``
    and ``Retry-After``."""
    max_batch_size: int = Constraint(default=64, ge=1, le=65_536)
    """The most rows that the network computes at once, of several requests together. Requests with
    more rows are computed in parts."""
    max_delay_ms: NonNegativeFloat = Constraint(default=0.0, le=10_000)
    """How long a batch that is not full waits for more requests, in milliseconds. With ``0`` it
    never waits: the requests that come while the network computes are the next batch."""
    idle_s: PositiveFloat | None = None
    """Seconds after which a replica above ``replicas.min`` stops that is not needed: the last one
    after so long without a request, a further one after the others could have answered all requests
    for so long. Requires ``replicas.min`` below ``replicas.max``. Default: 300. Example: ``60``."""
    drift: Drift | None = Drift()
    """Compares served rows with the training rows of each version, and reports an event ``finding``
    when a field or a layer has drifted. null: no comparison. Example: ``{"window": 5000}``."""
    request_log: RequestLog | None = None
    """Records requests with their inputs and outputs. Default: nothing of a request is stored.
    Example: ``{"share": 0.1, "redact": ["name"]}``."""
    retry: Retry = Retry(max_restarts=1000)
    """Automatic restarts of a replica whose process, worker or device fails."""
    stall_timeout_s: PositiveFloat | None = 60.0
    """Seconds without a sign of life after which a replica counts as stalled, and the event
    ``stalled`` is sent. While it loads its models, the service's setting applies if that is longer.
    A batch that takes longer counts as stalled too. Default: 60. Example: ``300``."""
    on_stall: Literal["warn", "restart", "fail"] = "restart"
    """What to do with a stalled replica. ``restart``: stop or kill the process, and retry as after
    a lost worker. ``warn``: only send the event. ``fail``: fail the job. Default: ``restart``."""

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        references = [entry.model for entry in self.entries]
        if (again := repeated(references)) is not None:
            detail = f"{references[again]!r} is listed twice: list each model once"
            raise WrongAt("models", again, detail=detail)
        for number, entry in enumerate(self.entries):
            for part in ("canary", "shadow"):
                other: OtherVersion | None = getattr(entry, part)
                if other is not None and _name(other.model) != _name(entry.model):
                    detail = f"{other.model!r} is another model than {entry.model!r}: name another"
                    detail += f" version of {_name(entry.model)!r}, because it gets its requests"
                    raise WrongAt("models", number, part, "model", detail=detail)
        self.devices.check_one("each replica is one process with one device: ask for one")
        if self.timeout_s is not None:
            detail = f"timeout_s ({self.timeout_s:g}) limits jobs that end by themselves: remove it"
            raise WrongAt("timeout_s", detail=detail)
        return self

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.idle_s is not None and self.replicas.min == self.replicas.max:
            detail = f"idle_s ({self.idle_s:g}) has no effect, because replicas.min equals max: set"
            raise WrongAt("idle_s", detail=f"{detail} replicas.min below max, or remove idle_s")
        return self

    @property
    def entries(self) -> tuple[ServedModel, ...]:
        """The models with their options."""
        return tuple(
            ServedModel(model=entry) if isinstance(entry, str) else entry for entry in self.models
        )

    @property
    def processes(self) -> int:
        """The number of processes of this job; further replicas are jobs of their own."""
        return 1


def _name(reference: str) -> str:
    found = parse_model_reference(reference)
    return reference if found is None else found.name
