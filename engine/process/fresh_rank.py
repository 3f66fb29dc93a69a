"""A rank with an interpreter of its own, for accelerators: ``fresh_rank JOB_DIR LIFELINE STACKS``.

A fork of the fork server cannot use a GPU: torch has counted the devices there, none, and its
autograd engine has started without threads for them (torch counts once for a process and its
forks), and the driver does not support a fork after it was initialized. So `fork_server` replaces
such a fork by this program, which keeps its process, session, files and environment. It starts some
seconds later than a fork, as long as importing torch takes.
"""

import faulthandler
import os
import sys
import traceback
from pathlib import Path

from engine.process import rank
from engine.process.hardening import check_torch
from glasshouse.processes import SHOW_STACKS
from glasshouse.unpickling import seal_pickle


def main(job_dir: str, lifeline: str, stacks: str) -> int:
    """Run a rank; return its exit code. ``lifeline``: the descriptor."""
    os.set_inheritable(int(lifeline), False)
    file = os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(SHOW_STACKS, file, all_threads=True)
    check_torch()
    seal_pickle()
    return rank.main(Path(job_dir), int(lifeline))


if __name__ == "__main__":
    code = 70
    try:
        code = main(*sys.argv[1:])
    except BaseException as error:
        traceback.print_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # as a fork ends: nothing that still runs is waited for
