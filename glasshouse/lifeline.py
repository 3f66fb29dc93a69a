"""Pipes from a parent process: one that closes when it is gone, one that closes to start."""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable

VARIABLE = "GLASSHOUSE_LIFELINE_FD"
"""The file descriptor of the pipe's read end, for a process that must end with its parent."""

START_VARIABLE = "GLASSHOUSE_START_FD"
"""The file descriptor of a pipe's read end, for a process that is started before it may begin."""


def await_start() -> None:
    """Wait until the parent process closes its end of the start pipe, if it has passed one.

    A process that takes seconds to import its modules can so be started before what it needs, for
    example the migrated database, is there.
    """
    handle = os.environ.pop(START_VARIABLE, None)
    if handle is not None:
        with open(int(handle), "rb") as pipe:
            pipe.read()


def follow_lifeline(end: Callable[[], None], *, within_s: float) -> None:
    """Call ``end`` in a thread once the parent process is gone.

    The process is then killed after ``within_s`` seconds at the latest (`end_within`). Does
    nothing if there is no lifeline.
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
    """Exit with status 1 after this time and write the stacks of all threads to stderr.

    The timer runs outside of Python, so neither a lock nor interpreter shutdown stops it.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
