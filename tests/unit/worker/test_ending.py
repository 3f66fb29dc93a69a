import subprocess
import sys

PROGRAM = """
import signal
from worker.signals import Ending

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

ending = Ending()
{swallow}
ending.listen(lambda: print("stop"), lambda: print("hurry"))
print("goes on")
"""


def run(swallow: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", PROGRAM.format(swallow=swallow)]
    return subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)


def test_a_signal_during_the_start_ends_it():
    ended = run("signal.raise_signal(signal.SIGTERM)")
    assert (ended.returncode, ended.stdout) == (0, "")


def test_a_signal_that_came_in_a_finalizer_is_not_lost():
    ended = run("Finalized()")
    assert "SystemExit" in ended.stderr  # dropped, as Python does there
    assert (ended.returncode, ended.stdout) == (0, "stop\ngoes on\n")


def test_without_a_signal_nothing_is_stopped():
    assert run("").stdout == "goes on\n"
