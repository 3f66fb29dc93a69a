"""Which of several processes decides what the end of all means, and when the others are ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest

from glasshouse import processes
from glasshouse.processes import Identity
from worker.processes import ranks as module
from worker.processes.rank import Exit, Rank
from worker.processes.ranks import Ranks

SUCCEEDED = {"type": "end", "state": "succeeded", "error": None}
PEER = {"type": "end", "state": "failed", "error": {"code": "peer_lost"}}
NAN = {"type": "end", "state": "failed", "error": {"code": "non_finite"}}
OK, KILLED, CRASHED = Exit(code=0), Exit(signal=9), Exit(signal=11)


def ended(*found: tuple[Exit, dict[str, Any] | None]) -> Ranks:
    """Processes that have ended, in the order of their ranks."""
    ranks = [Rank(Identity(0, ""), os.open(os.devnull, os.O_WRONLY)) for _ in found]
    whole = Ranks(ranks, lambda rank: found[rank][1])
    for rank, (exit_, _) in zip(ranks, found, strict=True):
        rank.ended(exit_)
    assert whole.wait(0) is not None
    whole.close()
    return whole


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        ([(OK, SUCCEEDED), (OK, SUCCEEDED)], 0),
        ([(OK, PEER), (KILLED, None)], 1),
        ([(CRASHED, None), (OK, PEER)], 0),
        ([(OK, PEER), (OK, NAN), (OK, PEER)], 1),
        ([(OK, NAN), (OK, NAN)], 0),
        ([(OK, NAN), (CRASHED, None)], 1),  # what died without a word may be why
        ([(OK, PEER), (OK, PEER)], 0),
        ([(OK, SUCCEEDED), (CRASHED, None)], 1),
    ],
)
def test_the_first_that_failed_by_itself_is_the_cause(found: Any, cause: int):
    whole = ended(*found)
    assert whole.cause.rank == cause
    assert whole.cause.exit == found[cause][0]


def test_a_process_that_this_worker_has_ended_decides_nothing():
    """Process 0 has succeeded; another was slow to end, and got a signal."""
    ranks = [Rank(Identity(0, ""), os.open(os.devnull, os.O_WRONLY)) for _ in range(2)]
    whole = Ranks(ranks, [SUCCEEDED, None].__getitem__)
    ranks[0].ended(OK)
    assert whole.wait(0) is None
    ranks[1].ask(force=True)
    ranks[1].ended(Exit(signal=signal.SIGTERM))
    assert whole.wait(0) == OK
    assert whole.cause.rank == 0
    whole.close()


@pytest.fixture
def sleeper() -> Generator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    process = subprocess.Popen(command, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def running(sleeper: "subprocess.Popen[bytes]") -> Rank:
    found = processes.identify(sleeper.pid)
    assert found is not None
    return Rank(found, os.open(os.devnull, os.O_WRONLY))


@pytest.mark.parametrize(("end", "ends"), [(NAN, True), (SUCCEEDED, False)])
def test_the_others_are_ended_after_one_has_failed(
    end: dict[str, Any], ends: bool, sleeper: Any, monkeypatch: pytest.MonkeyPatch
):
    """A process that has done its part early ends nobody: process 0 may still save."""
    monkeypatch.setattr(module, "PEERS_S", 0.0)
    other = Rank(Identity(0, ""), os.open(os.devnull, os.O_WRONLY))
    whole = Ranks([running(sleeper), other], lambda _: end)
    other.ended(OK)
    assert whole.wait(0) is None
    assert whole.wait(0) is None
    if ends:
        assert sleeper.wait(20) == -signal.SIGTERM
    else:
        assert sleeper.poll() is None
    whole.close()
