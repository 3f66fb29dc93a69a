"""The lifeline of a process: a pipe that ends when whoever started it is gone."""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable

VARIABLE = "GLASSHOUSE_LIFELINE_FD"
"""The number of the pipe's read end, for a process that is to end with the one that started it."""


def follow_lifeline(end: Callable[[], None], *, within_s: float) -> None:
    """Call ``end``, from a thread of its own, once the other end of the lifeline is gone.

    Whatever then holds the process up for ``within_s`` seconds, it does not outlive its parent for
    longer (`end_within`). Without a lifeline nothing is followed.
    """
    handle = os.environ.pop(VARIABLE, None)
    if handle is None:
        return
    os.set_inheritable(int(handle), False)

    def watch() -> None:
        while os.read(int(handle), 4096):
            pass
        end_within(within_s)
        end()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def end_within(seconds: float) -> None:
    """A process that still runs then is ended with status 1; where its threads stood is on stderr.

    The watch is kept outside of Python, so neither a lock nor the interpreter's own end stops it.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
