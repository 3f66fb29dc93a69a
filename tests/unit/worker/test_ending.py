import subprocess
import sys

PROGRAM = """
import signal
from worker.app import ShutdownSignals

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

ending = ShutdownSignals()
{early}
ending.listen(lambda: print("stop"), lambda: print("hurry"))
print("still running")
"""


def run(early: str) -> str:
    program = [sys.executable, "-c", PROGRAM.format(early=early)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == ""
    return ended.stdout


def test_a_signal_before_somebody_listens_is_kept():
    assert run("signal.raise_signal(signal.SIGTERM)") == "stop\nstill running\n"


def test_a_second_interrupt_and_a_quit_are_a_hurry_then_too():
    twice = "signal.raise_signal(signal.SIGINT); signal.raise_signal(signal.SIGINT)"
    assert run(twice) == "stop\nhurry\nstill running\n"
    assert run("signal.raise_signal(signal.SIGQUIT)") == "hurry\nstill running\n"


def test_a_signal_in_a_finalizer_raises_nothing_and_is_kept():
    """Python drops what is raised there, and what was to be released after it never is."""
    assert run("Finalized()") == "stop\nstill running\n"


def test_without_a_signal_nothing_is_stopped():
    assert run("") == "still running\n"
