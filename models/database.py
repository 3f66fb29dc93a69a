"""Access to the database: short read and write transactions, on SQLite and on PostgreSQL.

A write transaction on SQLite begins IMMEDIATE and uses the one write connection of the process.
With SQLAlchemy's default deferred transactions, concurrent updates are lost without an error.
"""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Engine,
    create_engine,
    event,
    make_url,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import QueuePool
from sqlalchemy.sql.functions import FunctionElement

from glasshouse.errors import DatabaseUnavailable, StorageFull, TransactionConflict

# Every SQLite connection must report these values back: a failed pragma raises no error.
SQLITE_PRAGMAS = {
    "journal_mode": "wal",
    "synchronous": 1,  # NORMAL: durable at checkpoints, never corrupt
    "foreign_keys": 1,
    "busy_timeout": 10_000,
    "journal_size_limit": 32 * 1024**2,  # shrinks the log after a long read made it grow
    "mmap_size": 0,  # the WAL-reset bug of SQLite < 3.51.3 was seen with mmap
}
IDLE_IN_TRANSACTION_S = 20
"""PostgreSQL ends a transaction that is idle for this long, and releases its locks. Otherwise a
hung process or a lost machine would keep its job from being taken over. Transactions of the service
wait for nothing but the database."""


_KEEPALIVE = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""libpq parameters, in seconds and milliseconds: a lost server is noticed in about a minute; the
system's defaults take hours. Parameters in the URL take precedence."""

_SNAPSHOT = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
"""Options of read transactions on PostgreSQL, part of BEGIN. SQLite needs none."""

_CONFLICTS = frozenset({"40001", "40P01", "55P03"})
"""SQLSTATE of serialization_failure, deadlock_detected and lock_not_available: PostgreSQL rolled
the transaction back because of another one."""

Transaction = Session
"""First argument of the functions in this package. Other packages pass it on without using it."""


class now_ms(FunctionElement[int]):  # noqa: N801 (named like the SQL function)
    """The database's clock in Unix milliseconds. Leases never depend on a worker's clock."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_ms, "sqlite")
def _now_sqlite(*_: Any, **__: Any) -> str:  # pyright: ignore[reportUnusedFunction]
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


@compiles(now_ms, "postgresql")
def _now_postgresql(*_: Any, **__: Any) -> str:  # pyright: ignore[reportUnusedFunction]
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


def database_time(tx: Session) -> datetime:
    """Return the database's time, for times of several hosts that are compared."""
    return datetime.fromtimestamp(tx.scalars(select(now_ms())).one() / 1000, UTC)


def insert_into(tx: Session, table: Any) -> Any:
    """Return an INSERT that has ``on_conflict_do_update`` and ``on_conflict_do_nothing``.

    Between a lookup and an insert, another transaction may insert the same row.
    """
    return (postgresql if tx.get_bind().dialect.name == "postgresql" else sqlite).insert(table)


def lock_at_most(tx: Session, seconds: float) -> None:
    """Limit the wait for a lock of another transaction, on PostgreSQL.

    After that, TransactionConflict is raised. On SQLite a write transaction holds the only lock.
    """
    if tx.get_bind().dialect.name == "postgresql":
        tx.execute(text(f"SET LOCAL lock_timeout = {round(seconds * 1000)}"))


class Database:
    """Opens transactions. Create one per process, after any fork."""

    def __init__(self, url: str, *, pool_size: int = 8, idle_s: float | None = None) -> None:
        """``idle_s``: like `IDLE_IN_TRANSACTION_S`, for the transactions of this process."""
        self.url = url
        self._idle_s = IDLE_IN_TRANSACTION_S if idle_s is None else idle_s
        self.is_sqlite = url.startswith("sqlite")
        self._writer = self._engine("BEGIN IMMEDIATE", 1 if self.is_sqlite else pool_size)
        self._reader = (
            self._engine("BEGIN", pool_size)
            if self.is_sqlite
            else self._writer.execution_options(**_SNAPSHOT)
        )
        self._write_session = sessionmaker(self._writer, expire_on_commit=False, autoflush=False)
        self._read_session = sessionmaker(self._reader, expire_on_commit=False, autoflush=False)

    @contextmanager
    def write(self) -> Generator[Session]:
        """Open a transaction that commits at the end of the block and rolls back on an error."""
        with translated(), self._write_session.begin() as session:
            yield session

    @contextmanager
    def read(self) -> Generator[Session]:
        """Open a read snapshot: all statements see the data committed before the first one.

        Rows stay usable after the block.
        """
        with translated(), self._read_session() as session:
            yield session

    def ping(self) -> None:
        """Query one row.

        Raises:
            DatabaseUnavailable: The database is unavailable.
        """
        with self.read() as tx:
            tx.execute(text("SELECT 1"))

    @property
    def engine(self) -> Engine:
        """Return the write engine, for migrations."""
        return self._writer

    def close(self) -> None:
        """Close every connection."""
        self._writer.dispose()
        self._reader.dispose()

    def _engine(self, begin: str, pool_size: int) -> Engine:
        engine = create_engine(
            self.url,
            poolclass=QueuePool,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=30,
            pool_pre_ping=not self.is_sqlite,
            connect_args={"check_same_thread": False}
            if self.is_sqlite
            else _keepalive_options(self.url),
        )
        if self.is_sqlite:
            event.listen(engine, "connect", _configure_sqlite)

            def begin_explicitly(connection: Connection) -> None:
                connection.exec_driver_sql(begin)

            event.listen(engine, "begin", begin_explicitly)
        else:
            event.listen(engine, "connect", self._configure_postgresql)
        return engine

    def _configure_postgresql(self, connection: Any, _record: Any) -> None:
        idle_ms = round(self._idle_s * 1000)
        connection.execute(f"SET idle_in_transaction_session_timeout = {idle_ms}")
        connection.commit()


@contextmanager
def translated() -> Generator[None]:
    """Translate database errors into errors of the service."""
    try:
        yield
    except PoolTimeout as error:
        raise DatabaseUnavailable("Every connection to the database is in use.") from error
    except DBAPIError as error:
        message = str(error.orig)
        if "disk is full" in message or "No space left" in message:
            raise StorageFull from error
        if getattr(error.orig, "sqlstate", None) in _CONFLICTS:
            raise TransactionConflict from error
        if isinstance(error, OperationalError) or error.connection_invalidated:
            raise DatabaseUnavailable from error
        raise


def _keepalive_options(url: str) -> dict[str, Any]:
    return {name: value for name, value in _KEEPALIVE.items() if name not in make_url(url).query}


def _configure_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # SQLAlchemy's begin event sends BEGIN, not the driver
    for name, wanted in SQLITE_PRAGMAS.items():
        connection.execute(f"PRAGMA {name} = {wanted}")
        found = connection.execute(f"PRAGMA {name}").fetchone()
        if found is not None and found[0] != wanted:
            raise RuntimeError(f"SQLite did not take PRAGMA {name} = {wanted}: it says {found[0]}")
