"""Interleaves two operations on one database at their statements, in every order of one detour.

Each operation runs in a thread of its own with connections of its own, as two processes would.
It stops before each statement and before each commit until it may continue. If a statement waits
for a lock of the other operation, that operation continues instead.

    for meeting in meetings(url, prepare, first, second):
        check(meeting)

``prepare`` creates new rows for each order; ``first`` and ``second`` get a database and what
``prepare`` returned. The orders are: i statements of one, j statements of the other, the rest of
the one, the rest of the other, for every i and j, and with the roles swapped.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, event, text

from models.database import Database

DEADLINE_S = 60.0
S = TypeVar("S")
Act = Callable[[Database, S], Any]


@dataclass(frozen=True)
class Result:
    """What an operation returned, or the error that it raised."""

    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Meeting(Generic[S]):
    """The result of two operations that ran in one order."""

    state: S
    """What ``prepare`` returned."""
    order: tuple[tuple[int, int], ...]
    """Pairs: the operation (0 or 1), and how many statements it could run."""
    results: tuple[Result, Result]
    statements: tuple[str, ...]
    """All statements in the order in which they began."""

    @property
    def values(self) -> tuple[Any, Any]:
        """The values that the operations returned; an error that one of them raised is raised."""
        for result in self.results:
            if result.error is not None:
                raise result.error
        return self.results[0].value, self.results[1].value


class _Side:
    """Runs one operation at a time in a thread; its connections are reused by the next one."""

    def __init__(self, url: str, name: str, said: list[str], changed: threading.Condition) -> None:
        self.database = Database(url, pool_size=2)
        self._name = name
        self._said = said
        self._changed = changed
        self._reset()
        writer, reader = self.database._writer, self.database._reader  # pyright: ignore[reportPrivateUsage]
        shared = reader.pool is writer.pool  # then listeners on one cover both
        for engine in (writer,) if shared else (writer, reader):
            event.listen(engine, "before_cursor_execute", self._before)
            event.listen(engine, "after_cursor_execute", self._after)
            event.listen(engine, "commit", self._commit)
            event.listen(engine, "rollback", self._rollback)

    def _reset(self) -> None:
        self.result: Result | None = None
        self.stopped = False
        self.num_stops = 0
        self.statement = ""
        self.pid = 0
        self.writes = False
        """On SQLite: whether it holds the write lock."""
        self._may_go = False

    def start(self, act: Callable[[], Any]) -> None:
        """Start the operation; it stops before its first statement."""
        self._reset()

        def run() -> None:
            try:
                result = Result(act())
            except BaseException as error:  # the error is the result
                result = Result(error=error)
            with self._changed:
                self.result = result
                self._changed.notify_all()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait for its thread to end."""
        self._thread.join(DEADLINE_S)

    def go_on(self) -> None:
        """Let it run one more statement. The caller must hold the condition."""
        self.stopped, self._may_go = False, True
        self._changed.notify_all()

    def _stop(self, statement: str) -> None:
        with self._changed:
            self.statement, self.stopped = statement, True
            self.num_stops += 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._may_go, DEADLINE_S):
                raise TimeoutError(f"nobody let {self._name} continue")
            self._may_go = False
            self._said.append(f"{self._name}: {statement}")

    def _before(self, connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if not self.database.is_sqlite:
            self.pid = connection.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
        self._stop(" ".join(statement.split()))

    def _after(self, _connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if statement == "BEGIN IMMEDIATE":
            self.writes = True

    def _commit(self, _connection: Connection) -> None:
        self._stop("COMMIT")
        self.writes = False  # a moment early: the other one's BEGIN waits for the commit anyway

    def _rollback(self, _connection: Connection) -> None:
        self.writes = False


class _Table:
    """Runs two operations in one order after another."""

    def __init__(self, url: str) -> None:
        self.said: list[str] = []
        self._changed = threading.Condition()
        self._watcher = Database(url, pool_size=1)
        self.sides = [_Side(url, name, self.said, self._changed) for name in ("first", "second")]

    def close(self) -> None:
        """Close all connections."""
        for database in (self._watcher, *(side.database for side in self.sides)):
            database.close()

    def meet(
        self, state: S, acts: Sequence[Act[S]], order: Sequence[tuple[int, int]]
    ) -> Meeting[S]:
        """Run both operations in one order."""
        self.said.clear()
        for side, act in zip(self.sides, acts, strict=True):
            side.start(lambda act=act, side=side: act(side.database, state))
        try:
            for which, count in order:
                for _ in range(count):
                    if not self._step(which):
                        break
            self._finish()
        finally:
            for side in self.sides:
                side.end()
        one, two = self.sides
        results = (one.result or Result(), two.result or Result())
        return Meeting(state, tuple(order), results, tuple(self.said))

    def _finish(self) -> None:
        end = time.monotonic() + DEADLINE_S
        while any(side.result is None for side in self.sides):
            assert time.monotonic() < end, f"they wait for each other: {self.said}"
            for which in (0, 1):
                while self._step(which):
                    pass
            time.sleep(0.002)  # both may wait for a lock until the database ends one of them

    def _step(self, which: int) -> bool:
        """Let one run a statement. Return False if it has ended or waits for the other's lock."""
        side = self.sides[which]
        if not self._settled(side) or side.result is not None:
            return False
        with self._changed:
            side.go_on()
        self._settled(side)
        return True

    def _settled(self, side: _Side) -> bool:
        """Wait until it has stopped or ended. Return False if it waits for a lock."""
        end = time.monotonic() + DEADLINE_S
        while True:
            with self._changed:
                if self._changed.wait_for(
                    lambda: side.stopped or side.result is not None, timeout=0.005
                ):
                    return True
            if self._waits(side):
                return False
            assert time.monotonic() < end, f"no end of {side.statement}"

    def _waits(self, side: _Side) -> bool:
        other = self.sides[1 - self.sides.index(side)]
        if side.database.is_sqlite:
            return side.statement == "BEGIN IMMEDIATE" and other.writes and not side.stopped
        query = text("SELECT count(*) FROM pg_locks WHERE pid = :pid AND NOT granted")
        with self._watcher.read() as tx:
            return bool(tx.scalar(query, {"pid": side.pid}))


def meetings(
    url: str,
    prepare: Callable[[], S],
    first: Act[S],
    second: Act[S],
    *,
    most: int = 1000,
) -> Generator[Meeting[S]]:
    """Run every order, one after another; ``most``: at most so many, evenly spaced."""
    table = _Table(url)
    try:
        yield table.meet(prepare(), (first, second), ((0, 1000), (1, 1000)))
        orders = list(_orders(*(side.num_stops for side in table.sides)))
        for order in orders[:: -(-len(orders) // most)]:
            yield table.meet(prepare(), (first, second), order)
    finally:
        table.close()


def meeting(
    url: str, first: Act[None], second: Act[None], order: Sequence[tuple[int, int]]
) -> Meeting[None]:
    """Run one order: pairs of an operation, 0 or 1, and a number of statements; then the rest."""
    table = _Table(url)
    try:
        return table.meet(None, (first, second), order)
    finally:
        table.close()


def _orders(num_first: int, num_second: int) -> Generator[tuple[tuple[int, int], ...]]:
    for i, j in product(range(num_first + 1), range(1, num_second + 1)):
        yield ((0, i), (1, j), (0, num_first))
    for j, i in product(range(1, num_second + 1), range(1, num_first + 1)):
        yield ((1, j), (0, i), (1, num_second))
