"""Clocks that are wrong: a worker an hour ahead, one an hour behind, one that is set while it runs.

The whole processes, ranks and SQLite with them, read a shifted clock (``shifted_clock.cpp``).
"""

import struct
import subprocess
from pathlib import Path

import pytest

from engine.native.compiling import find_compiler
from tests.conftest import absent
from tests.integration.worker.harness import Harness, endless, train_spec
from tests.integration.worker.job_history import SAVED_EVERY, JobHistory, spec_of
from tests.waiting import until

HOUR_S = 3600
LEASE_S = "5"


@pytest.fixture(scope="session")
def shifted_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that shifts a clock."""
    compiler = find_compiler()
    if compiler is None:
        absent("a C++ compiler")
        raise AssertionError
    library = tmp_path_factory.mktemp("clock") / "shifted_clock.so"
    source = Path(__file__).with_name("shifted_clock.cpp")
    command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return library


class Clocks:
    """Wall clocks of the processes that a test starts."""

    def __init__(self, library: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._environment = monkeypatch
        monkeypatch.setenv("LD_PRELOAD", str(library))

    def choose(self, name: str, seconds: int) -> None:
        """Processes that start from now on have this clock; wrong by so much."""
        self.set(name, seconds)
        self._environment.setenv("CLOCK_SHIFT", str(self._directory / f"{name}.shift"))

    def set(self, name: str, seconds: int) -> None:
        """Set a clock for every process that reads it."""
        path = self._directory / f"{name}.shift"
        path.touch()
        with path.open("r+b") as file:
            file.write(struct.pack("=q", seconds))


@pytest.fixture
def clocks(shifted_clock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(shifted_clock, tmp_path, monkeypatch)


def start(harness: Harness, clocks: Clocks, **shifts: int) -> None:
    """Start workers with clocks of their own."""
    for name, seconds in shifts.items():
        clocks.choose(name, seconds)
        harness.start_worker(name, misbehaving=True, LEASE_S=LEASE_S, RETRY_MAX_S="0.3")


@pytest.mark.parametrize(
    ("first", "then"), [(HOUR_S, -HOUR_S), pytest.param(-HOUR_S, HOUR_S, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_job_that_moves_between_wrong_clocks_ends_as_if_they_were_right(
    any_harness: Harness, clocks: Clocks, undisturbed: JobHistory, first: int, then: int
):
    """Nor does it seem to have taken the two hours that lie between the clocks."""
    harness = any_harness
    start(harness, clocks, w1=first)
    labels = {"misbehave": "sleep", "at": "40", "attempts": "1"}
    job_id = harness.submit(spec_of(harness.dataset()) | {"timeout_s": 600.0, "labels": labels})
    until(lambda: len(harness.payloads(job_id, "checkpoint")) >= 40 // SAVED_EVERY)
    lost = harness.workers.pop("w1")
    lost.kill()
    lost.wait()
    start(harness, clocks, w2=then)
    assert harness.wait(job_id, timeout_s=180).state == "succeeded", harness.logs()
    *lost, last = [(one.worker, one.exit_kind) for one in harness.attempts(job_id)]
    assert {kind for _, kind in lost} == {"lease_lost"}
    assert last == ("w2", "succeeded")
    JobHistory.of(harness, job_id).check(undisturbed)
    seqs = [event.seq for event in harness.events(job_id)]
    assert seqs == list(range(1, len(seqs) + 1))


@pytest.mark.parametrize("shift", [HOUR_S, pytest.param(-HOUR_S, marks=pytest.mark.slow)])
def test_a_clock_that_is_set_while_jobs_run_costs_none_of_them(
    any_harness: Harness, clocks: Clocks, shift: int
):
    """On SQLite it is the clock of the leases too: two workers of one host, and their database."""
    harness = any_harness
    clocks.choose("host", 0)
    for name in ("w1", "w2"):
        harness.start_worker(name, misbehaving=True, LEASE_S=LEASE_S)
    dataset, asleep = harness.dataset(), harness.home / "asleep"
    silent = {"misbehave": "sleep", "at": "20", "reached": str(asleep)}
    trains, sleeps = (harness.submit(endless(dataset, labels=labels)) for labels in ({}, silent))
    harness.wait_step(trains, 10)
    until(asleep.exists)  # of this one only beats are heard, once a second
    for seconds in (shift, 0):
        noticed = {name: len(harness.logged(name, "clock_set")) for name in harness.workers}
        clocks.set("host", seconds)
        harness.wait_more(trains, 400)
        if harness.database.is_sqlite:
            for name, before in noticed.items():
                until(
                    lambda name=name, before=before: len(harness.logged(name, "clock_set")) > before
                )
    for job_id in (trains, sleeps):
        harness.cancel(job_id, force=True)
    for job_id in (trains, sleeps):
        assert harness.wait(job_id).state == "cancelled"
        tried = [(one.worker, one.exit_kind) for one in harness.attempts(job_id)]
        assert len(tried) == 1, tried
        steps = harness.steps(job_id)
        assert steps == list(range(len(steps)))


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_job_whose_message_is_lost_is_found_by_a_worker_whose_clock_is_behind(
    any_harness: Harness, clocks: Clocks
):
    harness = any_harness
    start(harness, clocks, w1=-HOUR_S)
    job_id = harness.submit(train_spec(harness.dataset()), ring=False)
    assert harness.wait(job_id).state == "succeeded"
