"""Ring: memory that a rank copies whole tensors into, and another process reads them from.

One mapping of fixed size. Its first page holds the consumer's position, which the producer reads
from memory without a call. A position counts bytes from the beginning and only grows; its offset in
the ring is its remainder. A tensor never wraps: one that does not fit before the end starts at the
next lap. Pure Python: the consumer has no torch.
"""

import contextlib
import ctypes
import mmap
import os
import sys
from pathlib import Path

PAGE_BYTES = 4096
HEADER_BYTES = PAGE_BYTES
NUM_BYTES = 256 * 2**20
"""Size of a ring where memory is plentiful; also the most that a spec may keep of one step."""
_SHARE = 8
_LEAST_BYTES = 4 * 2**20


class Ring:
    """One process's view of a ring."""

    def __init__(
        self, memory: mmap.mmap, *, name: str | None = None, handle: int | None = None
    ) -> None:
        self.memory = memory
        """The whole mapping; tensors start after its first ``HEADER_BYTES``."""
        self._handle = handle
        self._position = ctypes.c_uint64.from_buffer(memory, 0)
        self.num_bytes = len(memory) - HEADER_BYTES
        self.name = name
        """The path by which another process opens it."""

    @staticmethod
    def private(num_bytes: int) -> "Ring":
        """Create a ring for two threads of one process."""
        return Ring(mmap.mmap(-1, HEADER_BYTES + num_bytes))

    @staticmethod
    def shared(num_bytes: int) -> "Ring":
        """Create a ring that other processes of the same user can open while this one lives.

        It is anonymous memory: nothing is written to a disk, and nothing remains when all processes
        that have it are killed. Pages are allocated when they are touched.

        Raises:
            OSError: this system has no such memory.
        """
        if sys.platform != "linux":
            raise OSError("memory without a name can be shared on Linux only")
        handle = os.memfd_create("captures", os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, HEADER_BYTES + num_bytes)
            memory = mmap.mmap(handle, HEADER_BYTES + num_bytes)
        except BaseException:
            os.close(handle)
            raise
        return Ring(memory, name=f"/proc/{os.getpid()}/fd/{handle}", handle=handle)

    @staticmethod
    def open(name: str | Path) -> "Ring":
        """Open the ring that another process shares.

        Raises:
            OSError: it cannot be opened.
        """
        handle = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            return Ring(mmap.mmap(handle, 0), name=str(name))
        finally:
            os.close(handle)

    @property
    def released(self) -> int:
        """The position up to which the consumer is done."""
        return self._position.value

    def release(self, position: int) -> None:
        """Let the producer overwrite everything before a position. Positions only grow."""
        self._position.value = max(position, self._position.value)

    def place(self, position: int) -> int:
        """Return the offset of a position in the mapping."""
        return HEADER_BYTES + position % self.num_bytes

    def has(self, position: int, size: int) -> bool:
        """Return whether bytes at a position are contiguous: they end before the ring's end."""
        return position >= 0 and 0 <= size <= self.num_bytes - position % self.num_bytes

    def read(self, position: int, size: int) -> memoryview:
        """Return the bytes at a position.

        Raises:
            ValueError: they would extend past the ring's end.
        """
        if not self.has(position, size):
            raise ValueError(f"{size} bytes at {position} are not in the ring")
        begin = self.place(position)
        return memoryview(self.memory)[begin : begin + size]

    def close(self) -> None:
        """Release the mapping; the memory is freed with its last user.

        This does not wait for the garbage collector to find this object, which may hold much memory
        for long. A thread that still reads from it, as on a disk that hangs, keeps it until it is
        done.
        """
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        self._position = ctypes.c_uint64(self._position.value)  # a view would keep it open
        with contextlib.suppress(BufferError):
            self.memory.close()


class Producer:
    """Hands out room in a ring, in order."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._tail = ring.released
        self.head = self._tail
        """The position after everything that was handed out."""

    def reserve(self, size: int, align: int = 1) -> int | None:
        """Return the position of ``size`` free bytes; None if there is no room now."""
        num_bytes = self.ring.num_bytes
        self._tail = max(self._tail, self.ring.released)
        if size > num_bytes:
            return None
        if self._tail == self.head:  # nothing is waiting: start over, where the pages are warm
            start = self._tail = self.head = -(-self.head // num_bytes) * num_bytes
        else:
            start = -(-self.head // align) * align
        if start % num_bytes + size > num_bytes:
            start = -(-start // num_bytes) * num_bytes
        if start + size - self._tail > num_bytes:
            return None
        self.head = start + size
        return start

    def take_back(self, position: int) -> None:
        """Return the newest room, which was not used."""
        self.head = position


def default_num_bytes(most: int = NUM_BYTES) -> int:
    """Return the size of a ring on this machine: at most an eighth of the free memory."""
    free = _available_bytes()
    share = most if free is None else max(_LEAST_BYTES, free // _SHARE)
    return max(PAGE_BYTES, min(most, share) // PAGE_BYTES * PAGE_BYTES)


def _available_bytes() -> int | None:
    """Return the memory that is free or can be reclaimed; None: the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvail")) * 1024
    except (OSError, ValueError, IndexError, StopIteration):
        return None
