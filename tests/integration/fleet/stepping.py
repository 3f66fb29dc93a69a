"""Two transactions side by side, one statement at a time, to try every interleaving of them."""

import threading
import time
from collections.abc import Callable
from typing import Any, Self

from sqlalchemy import event, text

from models.database import Database

TIMEOUT_S = 60.0


class Stepped:
    """Runs a function in a thread; each of its statements, and each commit, waits for a step.

    The function gets a database of its own. ``error`` is what it raised.
    """

    def __init__(self, url: str, act: Callable[[Database], Any]) -> None:
        self._database = Database(url, pool_size=1)
        self._observer = Database(url, pool_size=1)
        self._act = act
        self._arrived = threading.Condition()
        self._waits = self._free = self.ended = False
        self._backend: int | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        event.listen(self._database.engine, "before_cursor_execute", self._before_statement)
        event.listen(self._database.engine, "commit", self._before_commit)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.settle()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        self._database.close()
        self._observer.close()

    def step(self) -> bool:
        """Let it run one statement. False: it has ended, or it waits for a lock."""
        with self._arrived:
            if not self._waits:
                return False
            self._waits = False
            self._arrived.notify_all()
        return self.settle()

    def steps(self, count: int) -> None:
        """Let it run so many statements."""
        for _ in range(count):
            if not self.step():
                return

    def release(self) -> None:
        """Let it run on by itself."""
        with self._arrived:
            self._free, self._waits = True, False
            self._arrived.notify_all()

    def finish(self) -> None:
        """Let it run to its end, and wait for that."""
        self.release()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "it never ended"

    def settle(self) -> bool:
        """Until it waits for a step (True), has ended, or waits for a lock of another."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            with self._arrived:
                if self._arrived.wait_for(lambda: self._waits or self.ended, 0.02):
                    return self._waits
            if self._waits_for_lock():
                return False
        raise AssertionError("neither a statement nor a lock")

    def _waits_for_lock(self) -> bool:
        if self._backend is None:
            return False
        query = text("SELECT wait_event_type FROM pg_stat_activity WHERE pid = :pid")
        with self._observer.read() as tx:
            return tx.scalar(query, {"pid": self._backend}) == "Lock"

    def _run(self) -> None:
        try:
            self.result = self._act(self._database)
        except BaseException as error:
            self.error = error
        with self._arrived:
            self.ended = True
            self._arrived.notify_all()

    def _before_statement(self, connection: Any, *_: Any) -> None:
        if not self._database.is_sqlite:
            self._backend = connection.connection.dbapi_connection.info.backend_pid
        self._gate()

    def _before_commit(self, _: Any) -> None:
        self._gate()

    def _gate(self) -> None:
        with self._arrived:
            if self._free:
                return
            self._waits = True
            self._arrived.notify_all()
            assert self._arrived.wait_for(lambda: not self._waits, TIMEOUT_S), "no step came"


def count_statements(url: str, act: Callable[[Database], Any]) -> int:
    """How many steps a function takes by itself."""
    with Stepped(url, act) as alone:
        count = 0
        while not alone.ended:
            alone.step()
            count += 1
    assert alone.error is None, alone.error
    return count
