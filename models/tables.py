"""What the database remembers. Columns only; every query is in the modules beside this one."""

from datetime import UTC, datetime
from typing import Any, ClassVar, cast

from sqlalchemy import (
    BigInteger,
    Float,
    ForeignKey,
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
    """An aware UTC time, stored as Unix milliseconds: one form on both databases."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        """To milliseconds."""
        return None if value is None else round(value.timestamp() * 1000)

    def process_result_value(self, value: int | None, dialect: Dialect) -> datetime | None:
        """From milliseconds."""
        return None if value is None else datetime.fromtimestamp(value / 1000, UTC)


class Json(TypeDecorator[Any]):
    """A JSON value as text; non-finite numbers are strings (SQLite would store them as NULL)."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """To text."""
        return None if value is None else jsonio.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """From text."""
        return None if value is None else jsonio.loads(value)


def now() -> datetime:
    """This host's time, to the millisecond that is stored, for display.

    Leases use the database's clock.
    """
    time = datetime.now(UTC)
    return time.replace(microsecond=time.microsecond // 1000 * 1000)


class Table(DeclarativeBase):
    """The base of all tables, with one naming rule for every constraint."""

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
    """A table without the ORM: a bulk insert then takes half of the time."""
    return cast(CoreTable, table.__table__)


class JobSpec(Table):
    """What a job is: written once, when it is submitted.

    Kept apart from ``jobs``, whose rows are written many times a second while a job runs. Each
    such write copies the row, and a plan of many layers takes megabytes.
    """

    __tablename__ = "job_specs"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    spec: Mapped[dict[str, Any]]
    """As submitted."""
    resolved: Mapped[dict[str, Any]]
    """As it runs: every default and size filled in."""
    plan: Mapped[dict[str, Any]]
    """What the planner found: layers, parameters, memory."""


def _of_spec(column: Any, job: Any) -> Any:
    """A column of ``job_specs`` as an attribute of a job, read when asked for.

    ``undefer_group("spec")`` has a query bring all of them.
    """
    found = select(column).where(JobSpec.job == job).correlate_except(JobSpec).scalar_subquery()
    return column_property(found, deferred=True, group="spec")


class Job(Table):
    """One job, from submission to its end and after."""

    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    created_by: Mapped[str | None]
    """The name of the owner's key that submitted it; what becomes of the key changes nothing."""
    kind: Mapped[str]
    name: Mapped[str | None]
    state: Mapped[str]
    state_reason: Mapped[str | None]
    warnings: Mapped[list[Any]] = mapped_column(server_default="[]")
    """Of the planner."""
    labels: Mapped[dict[str, Any]]
    """Also in ``job_labels``, where they are looked for."""
    priority: Mapped[int]
    wants: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    """The ``devices`` of its resolved spec: the queue is read without specs and plans."""
    parent: Mapped[str | None]
    created_at: Mapped[datetime]
    queued_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    attempt: Mapped[int] = mapped_column(default=0)
    fence: Mapped[int] = mapped_column(default=0)
    """Grows with each attempt; a write with an older fence changes nothing."""
    last_seq: Mapped[int] = mapped_column(default=0)
    num_commands: Mapped[int] = mapped_column(default=0)
    """Grows with each command, so that a supervisor sees by its beat that there are new ones."""
    lease_expires_ms: Mapped[int | None] = mapped_column(BigInteger)
    """By the database's clock."""
    cancel_requested_at: Mapped[datetime | None]
    paused_at: Mapped[datetime | None]
    """Since when it is paused."""
    paused_ms: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    """How long it was paused before that, all together."""
    resume_requested: Mapped[bool] = mapped_column(default=False, server_default=false())
    """It is to be queued again as soon as it is paused."""
    worker: Mapped[str | None]
    devices: Mapped[list[Any]]
    progress: Mapped[dict[str, Any] | None] = mapped_column(Json)
    summary: Mapped[dict[str, Any]]
    probe_overhead: Mapped[dict[str, Any] | None] = mapped_column(Json)
    """What watching takes of a step's time, and what it may: fraction and budget."""
    result: Mapped[dict[str, Any] | None] = mapped_column(Json)
    error: Mapped[dict[str, Any] | None] = mapped_column(Json)
    infra_failures: Mapped[int] = mapped_column(default=0)
    """Attempts that failed through no fault of the job, since its last progress."""
    failed_at_step: Mapped[int | None] = mapped_column(BigInteger)
    """How far its checkpoints reached when an attempt was last lost; a newer one is progress."""
    not_before_ms: Mapped[int | None] = mapped_column(BigInteger)
    """When it may be tried again, by the database's clock."""
    first_seq: Mapped[int] = mapped_column(server_default="1")
    """The oldest event that is still kept; grows by retention only."""
    version: Mapped[int] = mapped_column(default=1)
    """Grows with each change a client can see; the ETag."""
    traceparent: Mapped[str | None]
    """The trace of the request that submitted it, where requests are traced."""
    deleted_at: Mapped[datetime | None]
    """Since when it is deleted: nobody sees it any more, and the purge deletes what it left."""

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
    """One label of a job: what ``GET /jobs?label=`` looks for."""

    __tablename__ = "job_labels"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]

    __table_args__ = (Index(None, "name", "value", "job"),)


class NameCounter(Table):
    """How many names of one kind an owner's jobs were given: see ``models/jobs/names.py``."""

    __tablename__ = "name_counters"
    owner: Mapped[str] = mapped_column(primary_key=True)
    stem: Mapped[str] = mapped_column(primary_key=True)
    """What stands before the number."""
    last: Mapped[int]


class JobUse(Table):
    """A dataset or checkpoint that a job reads; it may not be deleted before the job ends."""

    __tablename__ = "job_uses"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    used: Mapped[str] = mapped_column(primary_key=True, index=True)


class Attempt(Table):
    """One try at running a job."""

    __tablename__ = "attempts"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    n: Mapped[int] = mapped_column(primary_key=True)
    fence: Mapped[int]
    worker: Mapped[str]
    state: Mapped[str]
    """assigned, claimed, then ended or lost."""
    devices: Mapped[list[Any]]
    resumed_from_step: Mapped[int | None]
    """The step that it runs first; 0: from the beginning. NULL: the first attempt, or unclaimed."""
    checkpoint: Mapped[str | None]
    """The one that it resumes from."""
    spool_offset: Mapped[int] = mapped_column(BigInteger, default=0)
    """Everything in the spool before this byte is in the events."""
    num_shipments: Mapped[int] = mapped_column(default=0, server_default="0")
    """How many were stored: tells whether a commit whose answer was lost took place."""
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
    """The step that it tells of, or the last one done before it: where a later attempt began again
    at that step or before it, the event is hidden. NULL: it tells of no step, and is never hidden.
    """
    payload: Mapped[str]
    """The type's own fields, as JSON text: sent on as it is, never parsed on the way."""


class Metric(Table):
    """One value of one series."""

    __tablename__ = "metrics"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    value: Mapped[float | None] = mapped_column(Float(53))
    """NULL where the value is not finite; then ``nonfinite`` says what it is."""
    nonfinite: Mapped[str | None]


class MetricSpan(Table):
    """What the values of one series, of one attempt, come to over a thousand steps."""

    __tablename__ = "metric_spans"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """The step of each value, divided by a thousand."""
    attempt: Mapped[int] = mapped_column(primary_key=True)
    num_values: Mapped[int]
    low: Mapped[float | None] = mapped_column(Float(53))
    """Of the finite values."""
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
    """One watched tensor of one attempt, and the last that was folded of it."""

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
    last_step: Mapped[int] = mapped_column(BigInteger)
    last: Mapped[bytes] = mapped_column(LargeBinary)
    """Its figures at that step, as little-endian float64; of a histogram, nothing."""

    __table_args__ = (Index(None, "job", "attempt", "form", "layer", "kind", "phase", unique=True),)


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
    """A complete fold of a job: its chunks count, and its blocks are gone."""

    __tablename__ = "stats_folds"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    n: Mapped[int] = mapped_column(primary_key=True)


class Capture(Table):
    """A tensor that was kept; the bytes are in an artifact, a safetensors file of one or more."""

    __tablename__ = "captures"
    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    step: Mapped[int] = mapped_column(BigInteger)
    layer: Mapped[str]
    kind: Mapped[str]
    phase: Mapped[str]
    shape: Mapped[list[Any]]
    dtype: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    form: Mapped[str]
    """full, slice, sample."""
    slice: Mapped[str | None]
    captured_from: Mapped[list[Any]]
    """The shape of the whole tensor."""
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
    """NULL where ``job`` is."""
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
    """complete; damaged: nothing resumes from it."""
    name: Mapped[str | None]
    """Of an uploaded one."""
    network: Mapped[dict[str, Any] | None] = mapped_column(Json)
    """Of an uploaded one: the graph, and the fields that it reads. Jobs have theirs in the spec."""
    sha256: Mapped[str | None] = mapped_column(index=True)
    """Of an uploaded one: the digest of the uploaded file."""
    held_until_ms: Mapped[int | None] = mapped_column(BigInteger)
    """Until then, by the database's clock, no newer one of its job supersedes it."""

    __table_args__ = (Index(None, "job", "step"), Index(None, "owner", "id"))


class JobArtifact(Table):
    """A named file that a job made."""

    __tablename__ = "job_artifacts"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    media_type: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    key: Mapped[str]
    created_at: Mapped[datetime]
    attempt: Mapped[int | None]
    step: Mapped[int | None] = mapped_column(BigInteger)
    """The step that it belongs to; NULL: it belongs to the whole job."""


class Dataset(Table):
    """An uploaded or built-in dataset; the bytes are artifacts."""

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
    """Of images: height x width that all of them are brought to."""
    header: Mapped[bool | None]
    """Of tables of text: whether the first row names the columns; None: the reader finds out."""
    notes: Mapped[list[Any] | None] = mapped_column(Json)
    """What the reader says of the file, each a ``code`` and a ``detail``."""
    key: Mapped[str]
    created_at: Mapped[datetime]
    version: Mapped[int] = mapped_column(default=1)
    reader: Mapped[str | None]
    """The worker that reads its file, or read it last."""
    reading_until_ms: Mapped[int | None] = mapped_column(BigInteger)
    """Until when the reader's claim holds, by the database's clock; null: nobody reads it."""
    reads: Mapped[int] = mapped_column(default=0, server_default="0")
    """How many times its file was begun to be read: the fence of a claim."""

    __table_args__ = (Index(None, "owner", "id"), Index(None, "state"))


class Worker(Table):
    """A machine that runs jobs."""

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
    """The process that works under this name; another one of the same name has another."""
    stopped_ms: Mapped[int | None] = mapped_column(BigInteger)
    """When it was stopped gracefully, by the database's clock; NULL: it was not."""
    draining: Mapped[bool] = mapped_column(default=False)
    info: Mapped[dict[str, Any]]
    canary_ms: Mapped[int | None] = mapped_column(BigInteger)
    """When it last heard its own bell, by the database's clock."""
    sweep_ms: Mapped[int | None] = mapped_column(BigInteger)
    """When it last swept, by the database's clock."""
    figures: Mapped[dict[str, Any] | None] = mapped_column(Json)
    """What it counted since its start, and the space on its disks."""


class Device(Table):
    """A CPU core or an accelerator of a worker, and the job that has it."""

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
    """An API key, a browser session, or a one-time ticket for one. Only a hash of it."""

    __tablename__ = "keys"
    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    """key, session, ticket."""
    name: Mapped[str]
    """Of a session or ticket, the name of its API key."""
    parent: Mapped[str | None] = mapped_column(index=True)
    """Of a session or ticket, the id of the API key that opened it; of an API key, NULL."""
    owner: Mapped[str] = mapped_column(index=True)
    scopes: Mapped[list[Any]]
    hint: Mapped[str]
    """The first characters of the key, to tell keys apart."""
    sha256: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class Quota(Table):
    """What one owner may use, where it is not what the settings say."""

    __tablename__ = "quotas"
    owner: Mapped[str] = mapped_column(primary_key=True)
    limits: Mapped[dict[str, Any]]
    """Name of a quota → its limit; a quota that is not named is that of the settings."""
    by: Mapped[str]
    updated_at: Mapped[datetime]


class Idempotency(Table):
    """The answer to a creating request, to be given again when the request comes again."""

    __tablename__ = "idempotency"
    owner: Mapped[str] = mapped_column(primary_key=True)
    route: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    body_sha256: Mapped[str]
    status: Mapped[int | None]
    """NULL while the first request is being answered."""
    headers: Mapped[dict[str, Any] | None] = mapped_column(Json)
    body: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(index=True)


class Mark(Table):
    """A time that the processes share: when something was last done, and who does it now."""

    __tablename__ = "marks"
    name: Mapped[str] = mapped_column(primary_key=True)
    at_ms: Mapped[int] = mapped_column(BigInteger)
    """By the database's clock."""
    by: Mapped[str]


class DoomedFile(Table):
    """An artifact whose rows are deleted: written with the deletion, forgotten once it is gone."""

    __tablename__ = "doomed_files"
    key: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime]


class Webhook(Table):
    """An address that is told when a job of its owner moves to another state."""

    __tablename__ = "webhooks"
    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    url: Mapped[str]
    events: Mapped[list[Any]]
    """Types that it wants, such as ``job.failed``; empty: all."""
    labels: Mapped[dict[str, Any]]
    """Labels that a job must have."""
    secret: Mapped[str]
    """What messages are signed with: unlike a key it must be known to be used."""
    created_at: Mapped[datetime]
    failing_since: Mapped[datetime | None]
    """The first failure after the last success."""
    disabled_at: Mapped[datetime | None]
    disabled_reason: Mapped[str | None]

    __table_args__ = (Index(None, "owner", "id"),)


class Delivery(Table):
    """One message for one webhook: written with the change that it tells of."""

    __tablename__ = "deliveries"
    id: Mapped[str] = mapped_column(primary_key=True)
    """Also the message's ``webhook-id``: the same at every try."""
    webhook: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    type: Mapped[str]
    body: Mapped[str]
    state: Mapped[str]
    """pending, delivered, failed."""
    tries: Mapped[int] = mapped_column(default=0)
    next_ms: Mapped[int] = mapped_column(BigInteger)
    """When to try next, by the database's clock."""
    status: Mapped[int | None]
    """HTTP status of the last answer."""
    problem: Mapped[str | None]
    """Why the last try failed."""
    created_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]

    __table_args__ = (Index(None, "state", "next_ms"), Index(None, "webhook", "id"))


class Probe(Table):
    """Something that is watched inside a job."""

    __tablename__ = "probes"
    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    body: Mapped[dict[str, Any]]
    """As in a spec, every default filled in."""
    state: Mapped[str]
    """pending, active, removed, rejected, failed."""
    problem: Mapped[dict[str, Any] | None] = mapped_column(Json)
    matched: Mapped[list[Any]]
    bytes_per_step: Mapped[int] = mapped_column(BigInteger)
    """Of the tensors that it looks at, on a step on which it is due."""
    estimated_cost_s: Mapped[float | None] = mapped_column(Float(53))
    """Of a due step, before anything was measured."""
    cost_s: Mapped[float | None] = mapped_column(Float(53))
    """Of a due step, as it was measured last."""
    every_now: Mapped[int | None] = mapped_column(BigInteger)
    """The interval in force, where watching cost too much at the one asked for."""
    revision: Mapped[int]
    """The job's ``num_commands`` at its last change; 0: it came with the spec."""
    applied_step: Mapped[int | None] = mapped_column(BigInteger)
    """The first step for which its last change held; NULL until then."""
    position: Mapped[int]
    created_at: Mapped[datetime]
    by: Mapped[str]
    """The owner of the key that asked."""

    __table_args__ = (Index(None, "job", "position"),)


class Command(Table):
    """Something asked of a running job."""

    __tablename__ = "commands"
    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    body: Mapped[dict[str, Any]]
    by: Mapped[str]
    """The owner of the key that asked."""
    state: Mapped[str]
    """pending, applied, rejected."""
    step: Mapped[int | None] = mapped_column(BigInteger)
    """The first step for which it holds."""
    problem: Mapped[dict[str, Any] | None] = mapped_column(Json)
    created_at: Mapped[datetime]
    number: Mapped[int] = mapped_column(default=0, server_default="0")
    """The order of asking; 0 for what no rank is told of."""
    old: Mapped[dict[str, Any] | None] = mapped_column(Json)
    """Of a setting that was changed: its path and its value before."""
    new: Mapped[dict[str, Any] | None] = mapped_column(Json)
