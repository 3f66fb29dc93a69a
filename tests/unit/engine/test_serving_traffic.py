"""The reports of a replica on its requests."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from engine.serving import traffic
from engine.serving.listener import Listener
from engine.serving.queue import RequestQueue
from engine.serving.traffic import BEAT_S, REPORT_S, Traffic
from engine.training.report import Outputs


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Replica:
    """A replica without a network, at a time that a test sets."""

    def __init__(self, clock: Clock, home: Path, stall_s: float | None) -> None:
        self.records: list[dict[str, Any]] = []
        self.listener = Listener("t", RequestQueue(4, 4, 0.0), 4)
        self.traffic = Traffic(Outputs(home, self.records.append), stall_s)
        self._clock = clock

    def after(self, seconds: float) -> dict[str, Any] | None:
        """Return what it reports then, if anything."""
        self._clock.now += seconds
        before = len(self.records)
        self.traffic.look(0, self.listener)
        return self.records[-1] if len(self.records) > before else None


Make = Callable[[float | None], Replica]


@pytest.fixture
def make(clock: Clock, tmp_path: Path) -> Generator[Make]:
    made: list[Replica] = []

    def make(stall_s: float | None) -> Replica:
        made.append(Replica(clock, tmp_path, stall_s))
        made[-1].listener.open({"path": str(tmp_path / "s")})
        return made[-1]

    yield make
    for replica in made:
        replica.listener.stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(traffic, "time", made)
    return made


def test_an_idle_replica_reports_before_it_counts_as_stalled(make: Make):
    usual = make(60.0)
    assert usual.after(BEAT_S - 0.1) is None
    assert usual.after(0.1) is not None
    hasty = make(4.0)
    assert hasty.after(0.9) is None
    report = hasty.after(0.1)
    assert report is not None
    assert (report["idle_s"], report["requests"], report["busy"]) == (1.0, 0, 0.0)


def test_requests_are_reported_soon_and_how_busy_the_replica_was(make: Make):
    replica = make(None)
    replica.listener.num_received = 10
    replica.traffic.worked(0.5)
    assert replica.after(REPORT_S - 0.1) is None
    report = replica.after(0.1)
    assert report is not None
    assert (report["requests"], report["requests_per_s"], report["busy"]) == (10, 5.0, 0.25)
    assert report["idle_s"] == 0.0
    replica.traffic.worked(100.0)  # a batch that began long before
    report = replica.after(BEAT_S)
    assert report is not None
    assert (report["busy"], report["requests_per_s"], report["idle_s"]) == (1.0, 0.0, BEAT_S)
