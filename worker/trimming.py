"""The spool of a long job takes no more disk than what waits in it: what is stored is given back.

Its offsets stay what they are: on Linux the beginning of the file becomes a hole. Where the system
or the file system cannot do that, the file keeps all it ever had.
"""

import ctypes
import os
import sys
from pathlib import Path

TRIM_BYTES = 16 * 1024**2
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class Trim:
    """Gives back what one spool no longer needs, in large pieces."""

    def __init__(self, spool: Path, *, every_bytes: int = TRIM_BYTES) -> None:
        self._spool = spool
        self._every_bytes = every_bytes
        self._done = 0

    def upto(self, offset: int) -> None:
        """Everything before this byte is stored."""
        if offset - self._done >= self._every_bytes and punch(self._spool, offset):
            self._done = offset


def punch(path: Path, size: int) -> bool:
    """Give back the first bytes of a file, whose length stays; whether the system can do that."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return libc.fallocate(handle, _KEEP_SIZE | _PUNCH_HOLE, 0, size) == 0
    finally:
        os.close(handle)
