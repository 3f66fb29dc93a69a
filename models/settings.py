"""The one settings object: environment variables that start with ``GLASSHOUSE_``."""

import ipaddress
import socket
from functools import cached_property
from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """How one process of the service is configured. Every field is documented in the docs."""

    model_config = SettingsConfigDict(
        env_prefix="GLASSHOUSE_",
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
        env_parse_none_str="null",
    )

    home: Path = Field(default_factory=lambda: Path.home() / ".glasshouse")
    """Directory of everything that the embedded service stores, mode 0700."""
    database_url: str = ""
    """SQLAlchemy URL; empty: SQLite in the home. For PostgreSQL ``postgresql+psycopg://…``."""
    database_url_file: Path | None = None
    """File that holds ``database_url``, which may have a password; read where that is empty."""
    database_connections: int = Field(default=8, ge=2, le=1000)
    """Connections to PostgreSQL that one API or worker process opens at most. All processes
    together must stay below the server's ``max_connections``."""
    redis_url: str = ""
    """``redis://…``, or ``unix:///…`` for a socket; empty: the embedded broker's socket."""
    redis_url_file: Path | None = None
    """File that holds ``redis_url``, which may have a password; read where that is empty."""
    artifacts_dir: Path | None = None
    """Where bulk bytes are kept; left out, ``artifacts`` in the home. Shared by all hosts."""
    work_dir: Path | None = None
    """Scratch space of this host's worker; left out, ``work`` in the home."""

    host: str = "127.0.0.1"
    """Address that the API binds."""
    port: int = Field(default=8420, ge=0, le=65535)
    """Port that the API binds; 0 takes a free one."""
    allowed_hosts: str = ""
    """Host names beside the loopback ones that the API answers for, separated by commas."""
    behind_proxy: bool = False
    """A TLS proxy stands before the API: allows binding an address other than loopback."""
    forwarded_allow_ips: str = "127.0.0.1,::1"
    """Of ``behind_proxy``: addresses and networks, separated by commas, from which the proxy's
    ``X-Forwarded-Proto`` and ``X-Forwarded-For`` are believed; ``*``: from everywhere."""
    max_json_bytes: PositiveInt = 16 * 1024**2
    """Largest JSON body of a request."""
    max_upload_bytes: PositiveInt = 8 * 1024**3
    """Largest dataset upload, and the most that it may unpack to."""
    ingest_memory_bytes: PositiveInt = 2 * 1024**3
    """Memory of the process that reads an uploaded file."""
    ingest_cpu_s: PositiveInt = 600
    """CPU time of the process that reads an uploaded file."""
    planner_timeout_s: PositiveFloat = 20.0
    """A spec whose check takes longer is refused."""
    warm_planner: bool = True
    """Start the process that checks specs together with the API. Without it the first spec
    or catalogue question does, and an API that is asked neither has one process with torch less."""
    stream_ping_s: float = Field(default=15.0, gt=0, le=15)
    """A silent event stream sends a comment this often."""
    stream_send_timeout_s: PositiveFloat = 60.0
    """A client that takes nothing from its stream for this long is cut off."""
    stream_key_check_s: PositiveFloat = 20.0
    """The streams of a revoked key end this much later, and at most a ping's interval more."""
    max_streams: PositiveInt = 2000
    """Open event streams of one API process."""
    max_streams_per_key: PositiveInt = 1000
    """Open event streams of one key in one API process."""
    max_connections: PositiveInt = 4000
    """Open connections of one API process; more are closed at once."""
    head_timeout_s: PositiveFloat = 15.0
    """The head of a request must have come whole after this long."""
    body_timeout_s: PositiveFloat = 60.0
    """A body may be waited for this long, and a second more for every 4 KiB that came."""
    outbound_allow: str = ""
    """Networks (``10.0.0.0/8``) and host names, separated by commas, that webhooks may reach
    although they are not public."""

    quota_queued_jobs: NonNegativeInt = 1000
    """Jobs of one owner that wait; one more is refused. The quotas are what an owner has that was
    given none of its own with ``PUT /api/v1/quotas``."""
    quota_running_jobs: NonNegativeInt | None = None
    """Jobs of one owner that run at once; further ones wait. Left out: any number."""
    quota_devices: NonNegativeInt | None = None
    """Devices that the jobs of one owner have at once; further jobs wait. Left out: any number."""
    quota_storage_bytes: NonNegativeInt | None = None
    """Bytes that the datasets, checkpoints, captures and artifacts of one owner take; beyond it no
    upload and no job is taken. Left out: what the disk has room for."""
    quota_uploads: NonNegativeInt = 100
    """Datasets of one owner that are being received or read at once."""
    quota_streams: NonNegativeInt = 1000
    """Open event streams of one owner in one API process."""
    quota_requests_per_s: PositiveFloat = 1000.0
    """Requests of one key that one API process takes each second; bursts of two seconds' worth."""

    worker_name: str = Field(default_factory=socket.gethostname)
    """Unique among the workers of one service."""
    cpu_cores: PositiveInt | None = None
    """CPU cores that jobs may use on this host; left out, all that the process may run on."""
    heartbeat_s: PositiveFloat = 5.0
    """How often a worker says that it lives."""
    lease_s: PositiveFloat = 30.0
    """A worker silent for this long has lost its jobs."""
    sweep_s: PositiveFloat = 2.0
    """How often a worker looks for attempts whose lease ran out, for jobs that were given to it,
    and, one worker for all, for jobs that wait. A job whose message was lost starts at most twice
    this time later."""
    grace_s: PositiveFloat = 60.0
    """Time between asking a job to stop and the first signal."""
    kill_s: PositiveFloat = 10.0
    """Time between the first signal and SIGKILL."""
    unkillable_s: PositiveFloat = 60.0
    """A process that outlives SIGKILL for this long is given up, and its devices with it."""
    retry_s: PositiveFloat = 1.0
    """A job that failed through no fault of its own is tried again after this, then twice that …"""
    retry_max_s: PositiveFloat = 300.0
    """… and at most this."""
    stall_timeout_s: PositiveFloat = 600.0
    """A job that makes no progress for this long has stalled."""
    max_backlog_bytes: PositiveInt = 1024**3
    """Records of one job that wait on disk for the database; past it, the job stands still."""
    inventory_s: PositiveFloat = 60.0
    """How often a worker looks at its hardware."""
    capture_buffer_bytes: PositiveInt = 256 * 1024**2
    """Memory in which whole tensors of one job wait to be stored; at most 1/8 of what is free."""
    starvation_s: PositiveFloat = 60.0
    """A job that waited this long keeps the devices it needs from jobs behind it."""
    infer_overcommit: NonNegativeInt = 1
    """``infer`` jobs that each worker runs although all of its cores are taken: each shares a core
    with the job that has it. Only of jobs that ask for one thread, or for no number of threads."""

    canary_s: float = Field(default=30.0, gt=0, le=40)
    """How often a worker notifies itself. One that misses three is reported as unresponsive."""
    min_free_bytes: int = Field(default=512 * 1024**2, ge=0)
    """With less space left on a disk, new work is refused, and whole tensors are dropped."""

    keep_values_days: float | None = Field(default=3.0, ge=0)
    """Events that repeat stored values (``metrics``, ``stats``), also of running jobs. A reader
    that was away for less resumes with nothing lost; the values stay in the series."""
    keep_jobs_days: float | None = Field(default=None, ge=0)
    """Ended jobs, with all that belongs to them, are deleted so long after their end."""
    keep_events_days: float | None = Field(default=90.0, ge=0)
    """All events of ended jobs, their logs among them; the last event stays with the job."""
    keep_metrics_days: float | None = Field(default=365.0, ge=0)
    """The metric series of ended jobs; what is in a job's summary stays."""
    keep_statistics_days: float | None = Field(default=365.0, ge=0)
    """The layer statistics of ended jobs."""
    keep_captures_days: float | None = Field(default=90.0, ge=0)
    """The captured tensors of ended jobs."""
    keep_checkpoints_days: float | None = Field(default=None, ge=0)
    """The checkpoints of ended jobs, the final ones too; one that a live job reads stays."""
    keep_keys_days: float | None = Field(default=30.0, ge=0)
    """Revoked and expired keys, sessions and tickets."""
    keep_workers_days: float | None = Field(default=30.0, ge=0)
    """Workers that have not been heard of for so long, and that no job runs on."""
    keep_deliveries_days: float | None = Field(default=30.0, ge=0)
    """What was sent to webhooks, or was given up."""
    purge_every_s: PositiveFloat = 3600.0
    """How often a worker looks for what is to be deleted."""
    purge_chunk: int = Field(default=5000, ge=1, le=10_000)
    """Rows that one transaction of the purge deletes; it rests after each."""

    webhook_timeout_s: PositiveFloat = 10.0
    """A receiver that takes longer has not taken the message."""
    webhook_retry_s: PositiveFloat = 5.0
    """Pause after the first failure of a delivery; each further one is four times as long."""
    webhook_disable_after_s: PositiveFloat = 3 * 86400.0
    """A webhook that took nothing for this long is switched off."""

    @field_validator("forwarded_allow_ips")
    @classmethod
    def _check_addresses(cls, value: str) -> str:
        for text in map(str.strip, value.split(",")):
            try:
                if value.strip() != "*":
                    ipaddress.ip_network(text)
            except ValueError:
                detail = f"{text[:60]!r} is no address or network, as in 172.16.0.0/12"
                raise ValueError(detail) from None
        return value

    @field_validator("database_url_file", "redis_url_file")
    @classmethod
    def _check_secret(cls, value: Path | None) -> Path | None:
        if value is not None:
            try:
                found = _secret(value)
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{value} cannot be read: {type(error).__name__}") from None
            if not found:
                raise ValueError(f"{value} is empty; write the URL into it")
        return value

    @cached_property
    def database(self) -> str:
        """The SQLAlchemy URL in force."""
        url = self.database_url or _secret(self.database_url_file)
        return url or f"sqlite:///{self.home.absolute() / 'glasshouse.db'}"

    @cached_property
    def artifacts(self) -> Path:
        """The artifacts directory in force."""
        return (self.artifacts_dir or self.home / "artifacts").absolute()

    @cached_property
    def work(self) -> Path:
        """The work directory in force."""
        return (self.work_dir or self.home / "work").absolute()

    @cached_property
    def redis(self) -> str:
        """The broker's URL as redis-py reads it."""
        url = self.redis_url or _secret(self.redis_url_file)
        return url or f"unix://{self.home.absolute() / 'run' / 'valkey.sock'}"

    @cached_property
    def celery_broker(self) -> str:
        """The broker's URL as Celery reads it."""
        return (
            "redis+socket://" + self.redis.removeprefix("unix://")
            if self.redis.startswith("unix://")
            else self.redis
        )


def _secret(file: Path | None) -> str:
    """What a file holds, without the newline that editors add."""
    return "" if file is None else file.read_text(encoding="utf-8").strip()
