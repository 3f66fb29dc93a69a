import os
import select
import subprocess
import sys

PROGRAM = """
import os, threading
from glasshouse.lifeline import follow_lifeline

def hangs():
    lock = threading.Lock()
    lock.acquire()
    print(os.environ.get("GLASSHOUSE_LIFELINE_FD"), flush=True)
    lock.acquire()

follow_lifeline(lambda: print("end", flush=True), within_s=0.5)
hangs()
"""


def test_a_process_that_hangs_exits_after_its_parent_and_reports_its_stack():
    kept, given = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"GLASSHOUSE_LIFELINE_FD": str(kept)},
        pass_fds=[kept],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(kept)
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"  # no child of its own follows it by accident
        assert process.poll() is None
        os.close(given)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "end\n")
    assert "in hangs" in err


def test_a_process_with_a_start_pipe_waits_until_its_parent_closes_it():
    kept, given = os.pipe()
    program = "import glasshouse.lifeline as l; print(1, flush=True); l.await_start(); print(2)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"GLASSHOUSE_START_FD": str(kept)},
        pass_fds=[kept],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(kept)
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        assert not select.select([process.stdout], [], [], 0.2)[0]
        os.close(given)
        assert process.communicate(timeout=60)[0] == "2\n"
