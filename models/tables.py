"""The tables of the database.

Columns only; the queries are in the other modules of this package.
"""

from datetime import UTC, datetime
from typing import Any, ClassVar, cast

from sqlalchemy import (
    BigInteger,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    TypeDecorator,
    false,
    select,
    text,
)
from sqlalchemy import Table as CoreTable
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, column_property, mapped_column

from glasshouse import jsonio


class Time(TypeDecorator[datetime]):
    """An aware UTC time, stored as Unix milliseconds: the same on both databases."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        """Convert to milliseconds."""
        return None if value is None else round(value.timestamp() * 1000)

    def process_result_value(self, value: int | None, dialect: Dialect) -> datetime | None:
        """Convert from milliseconds."""
        return None if value is None else datetime.fromtimestamp(value / 1000, UTC)


class Json(TypeDecorator[Any]):
    """A JSON value as text. NaN and Inf are strings (SQLite would store them as NULL)."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Convert to text."""
        return None if value is None else jsonio.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Convert from text."""
        return None if value is None else jsonio.loads(value)


def now() -> datetime:
    """Return this host's time, truncated to stored milliseconds, for display.

    Leases use the database's clock.
    """
    time = datetime.now(UTC)
    return time.replace(microsecond=time.microsecond // 1000 * 1000)


class Table(DeclarativeBase):
    """The base of all tables, with one naming convention for all constraints."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: Time,
        str: Text,
        dict[str, Any]: Json,
        list[Any]: Json,
    }


def core(table: type[Table]) -> CoreTable:
    """Return a table without the ORM, which halves the time of a bulk insert."""
    return cast(CoreTable, table.__table__)


class JobSpec(Table):
    """The spec of a job: written once, when it is submitted.

    Separate from ``jobs``, whose rows are written many times a second while a job runs. Each write
    copies the row, and the plan of a network with many layers takes megabytes.
    """

    __tablename__ = "job_specs"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    spec: Mapped[dict[str, Any]]
    """As submitted."""
    resolved: Mapped[dict[str, Any]]
    """As it runs, with every default and size filled in."""
    plan: Mapped[dict[str, Any]]
    """The planner's result: layers, parameters, memory."""


def _of_spec(column: Any, job: Any) -> Any:
    """Map a column of ``job_specs`` to an attribute of a job that is loaded on access.

    ``undefer_group("spec")`` makes a query load all of them.
    """
    found = select(column).where(JobSpec.job == job).correlate_except(JobSpec).scalar_subquery()
    return column_property(found, deferred=True, group="spec")


class Job(Table):
    """One job, from submission to its end and after."""

    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    created_by: Mapped[str | None]
    """Name of the owner's key that submitted it; stays the same if the key is revoked or deleted.
    """
    kind: Mapped[str]
    name: Mapped[str | None]
    state: Mapped[str]
    state_reason: Mapped[str | None]
    warnings: Mapped[list[Any]] = mapped_column(server_default="[]")
    """Warnings of the planner."""
    labels: Mapped[dict[str, Any]]
    """Also in ``job_labels``, which queries use."""
    priority: Mapped[int]
    wants: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    """The ``devices`` of its resolved spec, so that the queue is read without specs and plans."""
    parent: Mapped[str | None]
    created_at: Mapped[datetime]
    queued_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    attempt: Mapped[int] = mapped_column(default=0)
    fence: Mapped[int] = mapped_column(default=0)
    """Grows with each attempt. A write with an older fence changes nothing."""
    last_seq: Mapped[int] = mapped_column(default=0)
    num_commands: Mapped[int] = mapped_column(default=0)
    """Grows with each command, so that a supervisor's heartbeat finds new ones."""
    lease_expires_ms: Mapped[int | None] = mapped_column(BigInteger)
    """By the database's clock."""
    cancel_requested_at: Mapped[datetime | None]
    paused_at: Mapped[datetime | None]
    """When the current pause began."""
    paused_ms: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    """Total time of earlier pauses."""
    resume_requested: Mapped[bool] = mapped_column(default=False, server_default=false())
    """Queue it again as soon as it is paused."""
    worker: Mapped[str | None]
    devices: Mapped[list[Any]]
    progress: Mapped[dict[str, Any] | None] = mapped_column(Json)
    summary: Mapped[dict[str, Any]]
    probe_overhead: Mapped[dict[str, Any] | None] = mapped_column(Json)
    """Cost of watching: fraction of the step time, and budget."""
    result: Mapped[dict[str, Any] | None] = mapped_column(Json)
    error: Mapped[dict[str, Any] | None] = mapped_column(Json)
    infra_failures: Mapped[int] = mapped_column(default=0)
    """Attempts that failed through no fault of the job, since its last progress."""
    failed_at_step: Mapped[int | None] = mapped_column(BigInteger)
    """Step of its newest checkpoint when an attempt was last lost. A newer checkpoint is progress.
    """
    not_before_ms: Mapped[int | None] = mapped_column(BigInteger)
    """Earliest time of the next retry, by the database's clock."""
    first_seq: Mapped[int] = mapped_column(server_default="1")
    """The oldest event that still exists. Only retention increases it."""
    version: Mapped[int] = mapped_column(default=1)
    """Grows with each change that a client can see; used for the ETag."""
    traceparent: Mapped[str | None]
    """The trace of the request that submitted it, if requests are traced."""
    deleted_at: Mapped[datetime | None]
    """When it was deleted. It is no longer visible, and the purge deletes the rest."""

    __table_args__ = (
        Index(None, "state", "priority", "id"),
        Index(None, "owner", "id"),
        Index(None, "owner", "state"),
        Index(None, "parent", "id"),
        Index(None, "ended_at", "id"),
        Index(
            None,
            "deleted_at",
            sqlite_where=text("deleted_at IS NOT NULL"),
            postgresql_where=text("deleted_at IS NOT NULL"),
        ),
        Index(None, "owner", "name"),
    )

    spec: Mapped[dict[str, Any]] = _of_spec(JobSpec.spec, id)  # noqa: A003
    resolved: Mapped[dict[str, Any]] = _of_spec(JobSpec.resolved, id)  # noqa: A003
    plan: Mapped[dict[str, Any]] = _of_spec(JobSpec.plan, id)  # noqa: A003


class JobLabel(Table):
    """One label of a job, for ``GET /jobs?label=``."""

    __tablename__ = "job_labels"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]

    __table_args__ = (Index(None, "name", "value", "job"),)


class NameCounter(Table):
    """Last number of an owner's generated job names of one stem: see ``models/jobs/names.py``."""

    __tablename__ = "name_counters"
    owner: Mapped[str] = mapped_column(primary_key=True)
    stem: Mapped[str] = mapped_column(primary_key=True)
    """The part of the name before the number."""
    last: Mapped[int]


class JobUse(Table):
    """A dataset or checkpoint that a job reads. It cannot be deleted before the job ends."""

    __tablename__ = "job_uses"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    used: Mapped[str] = mapped_column(primary_key=True, index=True)


class Attempt(Table):
    """One attempt to run a job."""

    __tablename__ = "attempts"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    n: Mapped[int] = mapped_column(primary_key=True)
    fence: Mapped[int]
    worker: Mapped[str]
    state: Mapped[str]
    """assigned, claimed, then ended or lost."""
    devices: Mapped[list[Any]]
    resumed_from_step: Mapped[int | None]
    """Its first step; 0: from the beginning. NULL: the first attempt, or not claimed yet."""
    checkpoint: Mapped[str | None]
    """The checkpoint that it resumes from."""
    spool_offset: Mapped[int] = mapped_column(BigInteger, default=0)
    """Everything in the spool before this byte is stored."""
    num_shipments: Mapped[int] = mapped_column(default=0, server_default="0")
    """Number of stored shipments, to find out whether an unconfirmed commit succeeded."""
    created_at: Mapped[datetime]
    claimed_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    exit_kind: Mapped[str | None] = mapped_column(index=True)

    __table_args__ = (Index(None, "worker", "state"),)


class Event(Table):
    """One entry of a job's log."""

    __tablename__ = "events"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    at: Mapped[datetime]
    type: Mapped[str]
    step: Mapped[int | None] = mapped_column(BigInteger)
    """The step that it belongs to, or the last step before it. The event is hidden if a later
    attempt restarted at that step or before it. NULL: it belongs to no step, and is never hidden.
    """
    payload: Mapped[str]
    """The type's own fields, as JSON text: sent to clients as is, without parsing."""


class Metric(Table):
    """One value of one series."""

    __tablename__ = "metrics"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    value: Mapped[float | None] = mapped_column(Float(53))
    """NULL if the value is NaN or Inf; then ``nonfinite`` names it."""
    nonfinite: Mapped[str | None]


class MetricSpan(Table):
    """Rollup of the values of one series and attempt over a thousand steps."""

    __tablename__ = "metric_spans"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Step divided by a thousand."""
    attempt: Mapped[int] = mapped_column(primary_key=True)
    num_values: Mapped[int]
    low: Mapped[float | None] = mapped_column(Float(53))
    """Minimum of the finite values."""
    high: Mapped[float | None] = mapped_column(Float(53))
    first_nonfinite_step: Mapped[int | None] = mapped_column(BigInteger)
    last_step: Mapped[int] = mapped_column(BigInteger)


class StatsBlock(Table):
    """Layer statistics of some steps, columnar: never a row per value."""

    __tablename__ = "stats_blocks"
    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    form: Mapped[str] = mapped_column(server_default="stats")
    """stats, quantiles, histogram."""
    from_step: Mapped[int] = mapped_column(BigInteger)
    to_step: Mapped[int] = mapped_column(BigInteger)
    data: Mapped[bytes] = mapped_column(LargeBinary)

    __table_args__ = (Index(None, "job", "id"),)


class StatsSeries(Table):
    """One watched tensor of one attempt, with its last folded row."""

    __tablename__ = "stats_series"
    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    form: Mapped[str]
    layer: Mapped[str]
    kind: Mapped[str]
    phase: Mapped[str]
    rank: Mapped[int] = mapped_column(server_default="-1")
    """The process whose values these are; -1: all processes together."""
    last_step: Mapped[int] = mapped_column(BigInteger)
    last: Mapped[bytes] = mapped_column(LargeBinary)
    """The statistics at that step, as little-endian float64. Empty for histograms."""

    __table_args__ = (
        Index(None, "job", "attempt", "form", "layer", "kind", "phase", "rank", unique=True),
    )


class StatsChunk(Table):
    """Many steps of one series, columnar."""

    __tablename__ = "stats_chunks"
    series: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"),
        ForeignKey("stats_series.id", ondelete="CASCADE"),
        primary_key=True,
    )
    fold: Mapped[int] = mapped_column(primary_key=True)
    from_step: Mapped[int] = mapped_column(BigInteger)
    to_step: Mapped[int] = mapped_column(BigInteger)
    data: Mapped[bytes] = mapped_column(LargeBinary)


class StatsFold(Table):
    """A complete fold of a job: its chunks are valid, and its blocks are deleted."""

    __tablename__ = "stats_folds"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    n: Mapped[int] = mapped_column(primary_key=True)


class Capture(Table):
    """A captured tensor. The bytes are in an artifact, a safetensors file of one or more."""

    __tablename__ = "captures"
    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    step: Mapped[int] = mapped_column(BigInteger)
    layer: Mapped[str]
    kind: Mapped[str]
    phase: Mapped[str]
    rank: Mapped[int] = mapped_column(server_default="-1")
    """The process whose tensor it is; -1: all processes together."""
    shape: Mapped[list[Any]]
    dtype: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    form: Mapped[str]
    """full, slice, sample."""
    slice: Mapped[str | None]
    captured_from: Mapped[list[Any]]
    """Shape of the whole tensor."""
    key: Mapped[str]
    tensor: Mapped[str]
    """Its name inside the file."""

    __table_args__ = (Index(None, "job", "layer", "kind", "step"),)


class Checkpoint(Table):
    """A saved network: of a job, with its training state, or uploaded. The bytes are artifacts."""

    __tablename__ = "checkpoints"
    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str | None] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    """NULL: a client uploaded it."""
    owner: Mapped[str]
    attempt: Mapped[int | None]
    """NULL if ``job`` is NULL."""
    step: Mapped[int] = mapped_column(BigInteger)
    epoch: Mapped[int]
    final: Mapped[bool]
    files: Mapped[dict[str, Any]]
    """Name → size_bytes and sha256."""
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    metrics: Mapped[dict[str, Any]]
    key: Mapped[str]
    created_at: Mapped[datetime]
    state: Mapped[str] = mapped_column(server_default="complete")
    """complete, or damaged: nothing resumes from it."""
    name: Mapped[str | None]
    """Only for uploaded ones."""
    network: Mapped[dict[str, Any] | None] = mapped_column(Json)
    """Only for uploaded ones: the graph and the fields that it reads. Jobs have them in the spec.
    """
    sha256: Mapped[str | None] = mapped_column(index=True)
    """Only for uploaded ones: the digest of the file."""
    held_until_ms: Mapped[int | None] = mapped_column(BigInteger)
    """Until then, by the database's clock, no newer checkpoint of its job supersedes it."""

    __table_args__ = (Index(None, "job", "step"), Index(None, "owner", "id"))


class PublishedModel(Table):
    """A name under which an owner publishes checkpoints, as numbered versions."""

    __tablename__ = "models"
    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    name: Mapped[str]
    """Unique for its owner."""
    last_version: Mapped[int]
    """The highest number that a version got. It stays when that version is deleted, so no number
    is used twice."""
    revision: Mapped[int]
    """Grows with each change of the model, its versions or its aliases."""
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]

    __table_args__ = (Index(None, "owner", "name", unique=True), Index(None, "owner", "id"))


class ModelVersion(Table):
    """A published checkpoint. The checkpoint cannot be deleted while it is one."""

    __tablename__ = "model_versions"
    model: Mapped[str] = mapped_column(
        ForeignKey("models.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """From 1, without gaps until a version is deleted."""
    checkpoint: Mapped[str] = mapped_column(ForeignKey("checkpoints.id"), index=True)
    created_at: Mapped[datetime]
    created_by: Mapped[str | None]
    """Name of the owner's key that published it."""


class ModelAlias(Table):
    """A name for one version of a model, which can move to another version."""

    __tablename__ = "model_aliases"
    model: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int]

    __table_args__ = (
        ForeignKeyConstraint(
            ["model", "number"],
            ["model_versions.model", "model_versions.number"],
            ondelete="CASCADE",
        ),
    )


class Replica(Table):
    """The process that serves the models of a serve job, as its newest attempt reported it.

    Also the process of a training job that was asked for predictions: see
    ``models.jobs.live_predictions``.
    """

    __tablename__ = "replicas"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int]
    """The attempt that listens at ``address``. If it is not the job's current one, nobody does."""
    starts: Mapped[int]
    """Number of attempts that have listened."""
    address: Mapped[str]
    """``unix:/path`` or ``tcp:host:port``."""
    token: Mapped[str]
    """The secret of connections to this address; new for each attempt."""
    models: Mapped[list[Any]]
    """What it serves: ``reference``, ``model``, ``version`` of each."""
    traffic: Mapped[dict[str, Any]]
    """The newest counts of its requests. Of a training job: ``problem``, if it cannot listen."""
    drift: Mapped[list[Any]] = mapped_column(server_default="[]")
    """How served rows differ from training rows, by version."""
    updated_at: Mapped[datetime]
    """By the database's clock."""
    parent: Mapped[str | None] = mapped_column(index=True)
    """The serve job that it is a further replica of. NULL: it is the first replica of its own."""
    scaling: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    """Of a serve job with children: see ``ReplicaGroup.scaling``."""


class ServedRequest(Table):
    """A request to a serve job that its request log keeps."""

    __tablename__ = "served_requests"
    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    """The serve job, also if one of its further replicas answered."""
    replica: Mapped[str]
    """The job whose process answered."""
    at: Mapped[datetime]
    model: Mapped[str]
    version: Mapped[int]
    status: Mapped[int]
    code: Mapped[str | None]
    """Of the error; NULL: the request was answered."""
    size_bytes: Mapped[int]
    """Of ``details``."""
    details: Mapped[str]
    """Its values and everything else, as JSON text: sent to clients as is, without parsing."""

    __table_args__ = (Index(None, "job", "id", "size_bytes"),)


class JobArtifact(Table):
    """A named file that a job created."""

    __tablename__ = "job_artifacts"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    media_type: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    key: Mapped[str]
    created_at: Mapped[datetime]
    attempt: Mapped[int | None]
    step: Mapped[int | None] = mapped_column(BigInteger)
    """The step that it belongs to; NULL: the whole job."""


class Dataset(Table):
    """An uploaded or built-in dataset. The bytes are artifacts."""

    __tablename__ = "datasets"
    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    name: Mapped[str]
    format: Mapped[str]
    state: Mapped[str]
    """pending, ready, failed."""
    problem: Mapped[dict[str, Any] | None] = mapped_column(Json)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str | None]
    columns: Mapped[list[Any]]
    splits: Mapped[dict[str, Any]]
    resize: Mapped[str | None]
    """Images: the height x width that all images are resized to."""
    header: Mapped[bool | None]
    """csv and tsv: whether the first row names the columns. NULL: the reader detects it."""
    notes: Mapped[list[Any] | None] = mapped_column(Json)
    """Assumptions of the reader about the file, each with ``code`` and ``detail``."""
    key: Mapped[str]
    created_at: Mapped[datetime]
    version: Mapped[int] = mapped_column(default=1)
    reader: Mapped[str | None]
    """The worker that reads the file, or read it last."""
    reading_until_ms: Mapped[int | None] = mapped_column(BigInteger)
    """End of the reader's claim, by the database's clock. NULL: nobody reads it."""
    reads: Mapped[int] = mapped_column(default=0, server_default="0")
    """How many times reading the file was started: the fence of a claim."""

    __table_args__ = (Index(None, "owner", "id"), Index(None, "state"))


class Worker(Table):
    """A worker process that runs jobs."""

    __tablename__ = "workers"
    id: Mapped[str] = mapped_column(primary_key=True)
    """The worker's name."""
    host: Mapped[str]
    pid: Mapped[int]
    version: Mapped[str]
    started_at: Mapped[datetime]
    beat_ms: Mapped[int] = mapped_column(BigInteger)
    """Last heartbeat, by the database's clock."""
    instance: Mapped[str] = mapped_column(default="", server_default="")
    """The process that works under this name. Another process of the same name has another value.
    """
    stopped_ms: Mapped[int | None] = mapped_column(BigInteger)
    """When it was stopped gracefully, by the database's clock. NULL: it was not."""
    draining: Mapped[bool] = mapped_column(default=False)
    info: Mapped[dict[str, Any]]
    canary_ms: Mapped[int | None] = mapped_column(BigInteger)
    """When it last received its own wake-up, by the database's clock."""
    sweep_ms: Mapped[int | None] = mapped_column(BigInteger)
    """When it last swept, by the database's clock."""
    figures: Mapped[dict[str, Any] | None] = mapped_column(Json)
    """Its counters since it started, and the free space on its disks."""


class Device(Table):
    """A CPU core or an accelerator of a worker, and the job that uses it."""

    __tablename__ = "devices"
    worker: Mapped[str] = mapped_column(
        ForeignKey("workers.id", ondelete="CASCADE"), primary_key=True
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    """``cpu:0``, ``cuda:3``."""
    kind: Mapped[str]
    number: Mapped[int]
    uuid: Mapped[str | None]
    name: Mapped[str]
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    healthy: Mapped[bool]
    reason: Mapped[str | None]
    """Why it is not healthy."""
    job: Mapped[str | None] = mapped_column(index=True)
    fence: Mapped[int | None]


class Key(Table):
    """An API key, a browser session, or a one-time ticket for one. Only the hash is stored."""

    __tablename__ = "keys"
    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    """key, session, ticket."""
    name: Mapped[str]
    """For a session or ticket: the name of its API key."""
    parent: Mapped[str | None] = mapped_column(index=True)
    """For a session or ticket: the id of the API key that opened it. NULL for API keys."""
    owner: Mapped[str] = mapped_column(index=True)
    scopes: Mapped[list[Any]]
    hint: Mapped[str]
    """The first characters of the key, to identify it."""
    sha256: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class Quota(Table):
    """The limits of one owner that differ from the settings."""

    __tablename__ = "quotas"
    owner: Mapped[str] = mapped_column(primary_key=True)
    limits: Mapped[dict[str, Any]]
    """Name of a quota → its limit. The settings apply to the others."""
    by: Mapped[str]
    updated_at: Mapped[datetime]


class Idempotency(Table):
    """The response to a creating request, to replay it if the request is repeated."""

    __tablename__ = "idempotency"
    owner: Mapped[str] = mapped_column(primary_key=True)
    route: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    body_sha256: Mapped[str]
    status: Mapped[int | None]
    """NULL until the first request is answered."""
    headers: Mapped[dict[str, Any] | None] = mapped_column(Json)
    body: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(index=True)


class Mark(Table):
    """A time that processes share: when something was last done, and by which process."""

    __tablename__ = "marks"
    name: Mapped[str] = mapped_column(primary_key=True)
    at_ms: Mapped[int] = mapped_column(BigInteger)
    """By the database's clock."""
    by: Mapped[str]


class DoomedFile(Table):
    """A pending deletion: an artifact without rows.

    Stored with their deletion, until the file is gone.
    """

    __tablename__ = "doomed_files"
    key: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime]


class Webhook(Table):
    """An address that is notified when a job of its owner changes state."""

    __tablename__ = "webhooks"
    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    url: Mapped[str]
    events: Mapped[list[Any]]
    """Types of message that it receives, such as ``job.failed``. Empty: all."""
    labels: Mapped[dict[str, Any]]
    """Labels that a job must have."""
    secret: Mapped[str]
    """Secret that signs messages. Unlike a key, it must be stored in plain text."""
    created_at: Mapped[datetime]
    failing_since: Mapped[datetime | None]
    """Time of the first failure since the last success."""
    disabled_at: Mapped[datetime | None]
    disabled_reason: Mapped[str | None]

    __table_args__ = (Index(None, "owner", "id"),)


class Delivery(Table):
    """One message for one webhook, stored in the same transaction as the change."""

    __tablename__ = "deliveries"
    id: Mapped[str] = mapped_column(primary_key=True)
    """Also the message's ``webhook-id``: the same for every try."""
    webhook: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    type: Mapped[str]
    body: Mapped[str]
    state: Mapped[str]
    """pending, delivered, failed."""
    tries: Mapped[int] = mapped_column(default=0)
    next_ms: Mapped[int] = mapped_column(BigInteger)
    """Time of the next try, by the database's clock."""
    status: Mapped[int | None]
    """HTTP status of the last response."""
    problem: Mapped[str | None]
    """Why the last try failed."""
    created_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]

    __table_args__ = (Index(None, "state", "next_ms"), Index(None, "webhook", "id"))


class Probe(Table):
    """A probe of a job."""

    __tablename__ = "probes"
    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    body: Mapped[dict[str, Any]]
    """As in a spec, with every default filled in."""
    state: Mapped[str]
    """pending, active, removed, rejected, failed."""
    problem: Mapped[dict[str, Any] | None] = mapped_column(Json)
    matched: Mapped[list[Any]]
    bytes_per_step: Mapped[int] = mapped_column(BigInteger)
    """Size of the tensors that it watches, or stores, on a due step."""
    estimated_cost_s: Mapped[float | None] = mapped_column(Float(53))
    """Seconds per due step, before measurement."""
    cost_s: Mapped[float | None] = mapped_column(Float(53))
    """Last measured seconds per due step."""
    every_now: Mapped[int | None] = mapped_column(BigInteger)
    """The current interval, if watching at the requested one cost too much."""
    revision: Mapped[int]
    """The job's ``num_commands`` at the last change; 0: it came with the spec."""
    applied_step: Mapped[int | None] = mapped_column(BigInteger)
    """The first step to which its last change applied; NULL until then."""
    position: Mapped[int]
    created_at: Mapped[datetime]
    by: Mapped[str]
    """Owner of the key that sent it."""

    __table_args__ = (Index(None, "job", "position"),)


class Command(Table):
    """A command to a running job."""

    __tablename__ = "commands"
    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    body: Mapped[dict[str, Any]]
    by: Mapped[str]
    """Owner of the key that sent it."""
    state: Mapped[str]
    """pending, applied, rejected."""
    step: Mapped[int | None] = mapped_column(BigInteger)
    """The first step to which it applies."""
    problem: Mapped[dict[str, Any] | None] = mapped_column(Json)
    created_at: Mapped[datetime]
    number: Mapped[int] = mapped_column(default=0, server_default="0")
    """Order of arrival; 0 for commands that no rank carries out."""
    old: Mapped[dict[str, Any] | None] = mapped_column(Json)
    """For changed settings: path → previous value."""
    new: Mapped[dict[str, Any] | None] = mapped_column(Json)
