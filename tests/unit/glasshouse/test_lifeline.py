import os
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


def test_a_process_that_hangs_ends_after_its_parent_and_says_where_it_stood():
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
