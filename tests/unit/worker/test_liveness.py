import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from models.settings import Settings
from worker.attempt.control import Backpressure, Watchdog
from worker.processes.rank import Rank

Make = Callable[..., Watchdog]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def make(clock: Clock, spool: Path) -> Make:
    def make(spent_s: float = 0.0, **spec: Any) -> Watchdog:
        settings = Settings(stall_timeout_s=10)
        return Watchdog(spec, settings, spool, spent_s=spent_s, clock=clock)

    return make


def test_a_replica_may_load_its_models_for_longer_than_it_may_be_silent_afterwards(
    clock: Clock, spool: Path, make: Make
):
    watchdog = make(kind="serve", stall_timeout_s=3, on_stall="restart")
    clock.now += 9
    assert watchdog.check(None) is None
    spool.write_bytes(b"listening")
    clock.now += 1
    assert watchdog.check(None) is None
    clock.now += 3
    stalled = watchdog.check(None)
    assert stalled is not None
    assert stalled.payload["action"] == "restart"
    spool.unlink()
    also = make(kind="serve", stall_timeout_s=3)
    clock.now += 11
    assert also.check(None) is not None


def test_a_stall_is_reported_once_until_the_rank_has_moved(clock: Clock, spool: Path, make: Make):
    watchdog = make()
    told: list[float] = []
    for number in range(100):
        clock.now += 1
        if number == 40:
            spool.write_bytes(b"more bytes")
        if watchdog.check(0):
            told.append(clock.now)
    assert told == [110.0, 151.0]
    assert watchdog.spool_bytes == len(b"more bytes")


def test_a_rank_that_reports_does_not_stall(clock: Clock, spool: Path, make: Make):
    watchdog = make()
    for number in range(100):
        clock.now += 1
        if number % 5 == 0:
            spool.write_bytes(b"." * (number + 1))
        assert not watchdog.check(0)


def test_time_in_which_it_was_made_to_stand_still_does_not_count(clock: Clock, make: Make):
    watchdog = make()
    for _ in range(100):
        clock.now += 1
        watchdog.reset()
        assert not watchdog.check(0)


def test_time_before_the_rank_was_started_does_not_count(clock: Clock, make: Make):
    watchdog = make(timeout_s=20.0)
    clock.now += 100
    watchdog.start()
    clock.now += 9
    assert watchdog.check(0) is None
    assert watchdog.exceeded_s is None


def test_it_is_not_inspected_on_every_turn(clock: Clock, spool: Path, make: Make):
    watchdog = make(stall_timeout_s=600.0)
    spool.write_bytes(b"much")
    clock.now += 0.01
    watchdog.check(0)
    assert watchdog.spool_bytes == 0


@pytest.mark.parametrize(("on_stall", "presses"), [("warn", False), ("restart", True)])
def test_the_spec_sets_what_a_stall_leads_to(
    on_stall: str, presses: bool, clock: Clock, make: Make
):
    watchdog = make(stall_timeout_s=7.0, on_stall=on_stall)
    clock.now += 6
    assert watchdog.check(3) is None
    clock.now += 2
    event = watchdog.check(3)
    assert event is not None
    assert (event.type, event.payload) == (
        "stalled",
        {"step": 3, "seconds": 8.0, "action": on_stall},
    )
    assert (watchdog.stalled_s is not None) == presses


def test_the_settings_decide_where_the_spec_is_silent(clock: Clock, make: Make):
    watchdog = make()
    clock.now += 9
    assert watchdog.check(None) is None
    clock.now += 2
    assert watchdog.check(None) is not None
    assert watchdog.stalled_s is None


def test_the_time_of_earlier_attempts_counts(clock: Clock, make: Make):
    watchdog, unlimited = make(timeout_s=10.0, spent_s=7), make(spent_s=1e6)
    clock.now += 2.9
    watchdog.check(0)
    assert watchdog.exceeded_s is None
    clock.now += 0.2
    watchdog.check(0)
    assert watchdog.exceeded_s == 10.0
    unlimited.check(0)
    assert unlimited.exceeded_s is None


class Signaled:
    """A rank that notes its signals."""

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []

    def signal(self, number: signal.Signals) -> bool:
        self.signals.append(number)
        return True


def test_a_rank_is_stopped_above_the_limit_and_continued_at_half_of_it():
    rank = Signaled()
    backpressure = Backpressure(cast("Rank", rank), 100)
    stopped: list[bool] = []
    for waiting_bytes in (100, 101, 200, 51, 50, 100):
        backpressure.check(waiting_bytes)
        stopped.append(backpressure.is_stopped)
    assert stopped == [False, True, True, True, False, False]
    assert rank.signals == [signal.SIGSTOP, signal.SIGCONT]
    backpressure.check(101)
    backpressure.release()
    backpressure.release()
    assert rank.signals[2:] == [signal.SIGSTOP, signal.SIGCONT]
