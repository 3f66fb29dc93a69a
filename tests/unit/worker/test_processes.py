import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from glasshouse import processes
from glasshouse.processes import Identity
from worker.processes.rank import Rank


@pytest.fixture
def sleeper() -> Generator[subprocess.Popen[bytes]]:
    """A process of its own group that ends by SIGTERM."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=-1, start_new_session=True
    ) as it:
        yield it
        it.kill()


def identity(process: subprocess.Popen[bytes]) -> Identity:
    found = processes.identify(process.pid)
    assert found is not None
    return found


def test_a_process_is_alive_until_it_ends_even_before_it_is_reaped(
    sleeper: subprocess.Popen[bytes],
):
    found = identity(sleeper)
    assert processes.alive(found)
    sleeper.kill()
    assert processes.wait_gone(found, 60)
    assert sleeper.returncode is None


def test_a_reused_pid_gets_no_signal(sleeper: subprocess.Popen[bytes]):
    earlier = Identity(sleeper.pid, "1")
    assert processes.end(earlier, 0)  # it was gone before, and nobody is signaled
    assert not processes.signal_group(earlier, signal.SIGKILL)
    assert processes.alive(identity(sleeper))


def test_a_pid_that_was_really_reused_gets_no_signal():
    """Set the next process id in the kernel; skip the test where that is not permitted."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    with subprocess.Popen(["cat"], stdin=-1, start_new_session=True) as first:
        leader = identity(first)
    for _ in range(50):
        time.sleep(0.05)  # the kernel tells start times in hundredths of a second
        try:
            last.write_text(str(leader.pid - 1))
        except OSError:
            pytest.skip("the next pid cannot be chosen here")
        second = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        try:
            if second.pid == leader.pid:
                assert not processes.alive(leader)
                assert not processes.signal_group(leader, signal.SIGKILL)
                assert processes.session_of(leader) == []
                assert processes.kill_orphans(leader)
                processes.kill(leader)
                assert second.poll() is None
                return
        finally:
            second.kill()
            second.wait()
    pytest.skip("somebody else was always faster")


def test_a_verified_process_gets_its_signal(sleeper: subprocess.Popen[bytes]):
    assert processes.signal_group(identity(sleeper), signal.SIGTERM)
    assert sleeper.wait(60) == -signal.SIGTERM


def test_a_rank_is_asked_then_signalled_then_killed(sleeper: subprocess.Popen[bytes]):
    read_end, write_end = os.pipe()
    rank = Rank(identity(sleeper), write_end)
    os.kill(sleeper.pid, signal.SIGSTOP)  # SIGTERM does not reach it
    began = time.monotonic()
    rank.press(grace_s=0.2, kill_s=0.2)
    assert not rank.is_signalled
    rank.ask()
    assert os.read(read_end, 100) == b'{"do":"cancel"}\n'
    while sleeper.poll() is None:
        rank.press(grace_s=0.2, kill_s=0.2)
        assert time.monotonic() < began + 60
    assert sleeper.returncode == -signal.SIGKILL
    assert time.monotonic() - began >= 0.4
    rank.close()
    rank.tell({"do": "cancel"})  # to nobody
    os.close(read_end)


def test_force_does_not_wait(sleeper: subprocess.Popen[bytes]):
    read_end, write_end = os.pipe()
    rank = Rank(identity(sleeper), write_end)
    rank.ask(force=True)
    assert sleeper.wait(60) == -signal.SIGTERM
    rank.close()
    os.close(read_end)
