"""The settings object: environment variables that start with ``GLASSHOUSE_``."""

import ipaddress
import socket
from functools import cached_property
from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """The configuration of one process of the service. The reference documents every field."""

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
    """SQLAlchemy URL, such as ``postgresql+psycopg://…``. Empty: SQLite in the home."""
    database_url_file: Path | None = None
    """File that holds ``database_url``, which may contain a password. Read only if that is empty.
    """
    database_connections: int = Field(default=8, ge=2, le=1000)
    """Maximum connections to PostgreSQL of one API or worker process. All processes together must
    stay below the server's ``max_connections``."""
    redis_url: str = ""
    """``redis://…``, or ``unix:///…`` for a socket. Empty: the embedded broker's socket."""
    redis_url_file: Path | None = None
    """File that holds ``redis_url``, which may contain a password. Read only if that is empty."""
    artifacts_dir: Path | None = None
    """Directory of bulk data, shared by all hosts. Default: ``artifacts`` in the home."""
    work_dir: Path | None = None
    """Scratch space of this host's worker. Default: ``work`` in the home."""

    host: str = "127.0.0.1"
    """Address that the API binds."""
    port: int = Field(default=8420, ge=0, le=65535)
    """Port that the API binds; 0 picks a free one."""
    grpc_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the Open Inference Protocol over gRPC, at the address of the API. It has no TLS of
    its own, and needs ``glasshouse[grpc]``. Unset: no gRPC."""
    allowed_hosts: str = ""
    """Host names besides the loopback ones that the API answers for, separated by commas."""
    behind_proxy: bool = False
    """The API runs behind a TLS proxy. Allows binding an address other than loopback."""
    forwarded_allow_ips: str = "127.0.0.1,::1"
    """With ``behind_proxy``: addresses and networks, separated by commas, from which the proxy's
    ``X-Forwarded-Proto`` and ``X-Forwarded-For`` are trusted. ``*``: all."""
    max_json_bytes: PositiveInt = 16 * 1024**2
    """Largest JSON body of a request."""
    max_predict_bytes: PositiveInt = 64 * 1024**2
    """Largest body of a prediction request."""
    predict_timeout_s: PositiveFloat = 30.0
    """A prediction that takes longer is answered with 504, unless the request says otherwise."""
    max_upload_bytes: PositiveInt = 8 * 1024**3
    """Largest dataset upload, and the largest size that it may unpack to."""
    ingest_memory_bytes: PositiveInt = 2 * 1024**3
    """Memory limit of the process that reads an uploaded file."""
    ingest_cpu_s: PositiveInt = 600
    """CPU time limit of the process that reads an uploaded file."""
    planner_timeout_s: PositiveFloat = 20.0
    """A spec is refused if its check takes longer."""
    warm_planner: bool = True
    """Start the planner, the process that checks specs, together with the API. Otherwise the first
    spec or catalog request starts it. An API that never gets one then runs without that torch
    process."""
    stream_ping_s: float = Field(default=15.0, gt=0, le=15)
    """Interval between comments on an idle event stream."""
    stream_send_timeout_s: PositiveFloat = 60.0
    """A client that reads nothing from its stream for this long is disconnected."""
    stream_key_check_s: PositiveFloat = 20.0
    """The streams of a revoked key end within this time plus one ping interval."""
    max_streams: PositiveInt = 2000
    """Maximum open event streams of one API process."""
    max_streams_per_key: PositiveInt = 1000
    """Maximum open event streams of one key in one API process."""
    max_connections: PositiveInt = 4000
    """Maximum open connections of one API process. Further ones are closed at once."""
    head_timeout_s: PositiveFloat = 15.0
    """Time limit for receiving the complete head of a request."""
    body_timeout_s: PositiveFloat = 60.0
    """Time limit for receiving a body, plus one second for every 4 KiB received."""
    outbound_allow: str = ""
    """Networks (``10.0.0.0/8``) and host names, separated by commas, that webhooks may reach
    although they are not public."""

    quota_queued_jobs: NonNegativeInt = 1000
    """Maximum queued jobs of one owner; further ones are refused. All quotas apply to owners
    without quotas of their own (``PUT /api/v1/quotas``)."""
    quota_running_jobs: NonNegativeInt | None = None
    """Maximum running jobs of one owner; further ones wait. Unset: no limit."""
    quota_devices: NonNegativeInt | None = None
    """Maximum devices that the jobs of one owner use at once; further jobs wait. CPU cores count,
    but not one beside each CUDA device. Unset: no limit."""
    quota_storage_bytes: NonNegativeInt | None = None
    """Maximum bytes of the datasets, checkpoints, captures and artifacts of one owner. Above it,
    uploads and jobs are refused. Unset: limited by the disk."""
    quota_uploads: NonNegativeInt = 100
    """Maximum datasets of one owner that are being received or read at once."""
    quota_streams: NonNegativeInt = 1000
    """Maximum open event streams of one owner in one API process."""
    quota_requests_per_s: PositiveFloat = 1000.0
    """Requests per second of one key in one API process, with bursts of two seconds' worth."""

    worker_name: str = Field(default_factory=socket.gethostname)
    """Unique among the workers of one service."""
    serve_host: str = ""
    """Address of this host at which every API process reaches the replicas of serve jobs, which
    then listen on a free TCP port of it. Connections are authenticated and not encrypted. Empty: a
    Unix socket, which only an API process on this host reaches."""
    cpu_cores: PositiveInt | None = None
    """CPU cores of this host that jobs may use. Unset: all that the process may run on."""
    heartbeat_s: PositiveFloat = 5.0
    """Interval between heartbeats of a worker."""
    lease_s: PositiveFloat = 30.0
    """A worker without a heartbeat for this long loses its jobs."""
    sweep_s: PositiveFloat = 2.0
    """Interval at which a worker looks for attempts with an expired lease and for jobs assigned to
    it; one worker at a time also looks for queued jobs. After a lost message, a job starts at most
    two intervals later."""
    grace_s: PositiveFloat = 60.0
    """Time between asking a job to stop and the first signal."""
    kill_s: PositiveFloat = 10.0
    """Time between the first signal and SIGKILL."""
    unkillable_s: PositiveFloat = 60.0
    """A process that survives SIGKILL for this long is given up, together with its devices."""
    retry_s: PositiveFloat = 1.0
    """Delay before the first retry of a job that failed through no fault of its own. It doubles
    with each retry."""
    retry_max_s: PositiveFloat = 300.0
    """Maximum delay before a retry."""
    stall_timeout_s: PositiveFloat = 600.0
    """A job that makes no progress for this long has stalled."""
    max_backlog_bytes: PositiveInt = 1024**3
    """Maximum records of one job on disk that wait for the database. Above it, the job stops
    training."""
    inventory_s: PositiveFloat = 60.0
    """Interval between hardware checks of a worker."""
    capture_buffer_bytes: PositiveInt = 256 * 1024**2
    """Memory in which whole tensors of one job wait to be stored; at most 1/8 of what is free."""
    starvation_s: PositiveFloat = 60.0
    """A job that waited this long reserves the devices it needs, ahead of the jobs behind it."""
    infer_overcommit: NonNegativeInt = 1
    """Additional ``infer`` jobs that a worker runs when all cores are taken. Each shares a core
    with another job. Applies only to jobs that ask for one thread or for no number of threads."""

    canary_s: float = Field(default=30.0, gt=0, le=40)
    """Interval at which a worker sends itself a wake-up. One that misses three is reported as
    unresponsive."""
    min_free_bytes: int = Field(default=512 * 1024**2, ge=0)
    """With less free space on a disk, new work is refused and whole tensors are dropped."""

    keep_values_days: float | None = Field(default=3.0, ge=0)
    """Events that repeat stored values (``metrics``, ``stats``), also of running jobs. A reader
    that was disconnected for less time loses nothing. The series keep the values."""
    keep_jobs_days: float | None = Field(default=None, ge=0)
    """Ended jobs and all their data are deleted this long after their end."""
    keep_events_days: float | None = Field(default=90.0, ge=0)
    """All events of ended jobs, including logs. The last event stays with the job."""
    keep_metrics_days: float | None = Field(default=365.0, ge=0)
    """The metric series of ended jobs. A job's summary stays."""
    keep_statistics_days: float | None = Field(default=365.0, ge=0)
    """The layer statistics of ended jobs."""
    keep_requests_days: float | None = Field(default=30.0, ge=0)
    """The request log of ended serve jobs."""
    keep_captures_days: float | None = Field(default=90.0, ge=0)
    """The captured tensors of ended jobs."""
    keep_checkpoints_days: float | None = Field(default=None, ge=0)
    """The checkpoints of ended jobs, including final ones. One that a live job reads stays."""
    keep_keys_days: float | None = Field(default=30.0, ge=0)
    """Revoked and expired keys, sessions and tickets."""
    keep_workers_days: float | None = Field(default=30.0, ge=0)
    """Workers without a heartbeat for this long that run no job."""
    keep_deliveries_days: float | None = Field(default=30.0, ge=0)
    """Webhook deliveries that were delivered or failed."""
    purge_every_s: PositiveFloat = 3600.0
    """Interval at which a worker deletes expired data."""
    purge_chunk: int = Field(default=5000, ge=1, le=10_000)
    """Rows that one transaction of the purge deletes. It pauses after each transaction."""

    webhook_timeout_s: PositiveFloat = 10.0
    """A delivery fails if the receiver takes longer."""
    webhook_retry_s: PositiveFloat = 5.0
    """Delay after the first failure of a delivery. Each further delay is four times as long."""
    webhook_disable_after_s: PositiveFloat = 3 * 86400.0
    """A webhook without a successful delivery for this long is disabled."""

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
        """Return the SQLAlchemy URL in use."""
        url = self.database_url or _secret(self.database_url_file)
        return url or f"sqlite:///{self.home.absolute() / 'glasshouse.db'}"

    @cached_property
    def artifacts(self) -> Path:
        """Return the artifacts directory in use."""
        return (self.artifacts_dir or self.home / "artifacts").absolute()

    @cached_property
    def work(self) -> Path:
        """Return the work directory in use."""
        return (self.work_dir or self.home / "work").absolute()

    @cached_property
    def redis(self) -> str:
        """Return the broker's URL in redis-py's format."""
        url = self.redis_url or _secret(self.redis_url_file)
        return url or f"unix://{self.home.absolute() / 'run' / 'valkey.sock'}"

    @cached_property
    def celery_broker(self) -> str:
        """Return the broker's URL in Celery's format."""
        return (
            "redis+socket://" + self.redis.removeprefix("unix://")
            if self.redis.startswith("unix://")
            else self.redis
        )


def _secret(file: Path | None) -> str:
    """Return the content of a file, without the trailing newline that editors add."""
    return "" if file is None else file.read_text(encoding="utf-8").strip()
