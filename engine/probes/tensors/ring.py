"""The ring: memory that a rank copies whole tensors into, and another process reads them from.

One mapping of fixed size. Its first page holds the consumer's position, which the producer reads
from memory: no call is made to learn how far the other side is. A position counts bytes since the
beginning and only grows; its place in the ring is its remainder. A tensor never wraps: one that
does not fit before the end starts at the next lap. Pure Python: the consumer has no torch.
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
"""What a ring holds where memory is plentiful; the most that a spec may keep of one step."""
_SHARE = 8
_LEAST_BYTES = 4 * 2**20


class Ring:
    """One side's view of a ring."""

    def __init__(
        self, memory: mmap.mmap, *, name: str | None = None, handle: int | None = None
    ) -> None:
        self._memory = memory
        self._handle = handle
        self._position = ctypes.c_uint64.from_buffer(memory, 0)
        self.num_bytes = len(memory) - HEADER_BYTES
        self.name = name
        """The path by which another process opens it."""

    @staticmethod
    def private(num_bytes: int) -> "Ring":
        """A ring for two threads of one process."""
        return Ring(mmap.mmap(-1, HEADER_BYTES + num_bytes))

    @staticmethod
    def shared(num_bytes: int) -> "Ring":
        """A ring that other processes of the same user can open while this one lives.

        It is memory without a name, so that nothing of it is written to a disk, and nothing stays
        behind when every process that has it is killed. Pages exist once they are touched.

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
        """The ring that another process shares.

        Raises:
            OSError: it cannot be opened.
        """
        handle = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            return Ring(mmap.mmap(handle, 0), name=str(name))
        finally:
            os.close(handle)

    @property
    def memory(self) -> mmap.mmap:
        """The whole mapping; tensors lie behind its first ``HEADER_BYTES``."""
        return self._memory

    @property
    def released(self) -> int:
        """The position up to which the consumer needs nothing any more."""
        return self._position.value

    def release(self, position: int) -> None:
        """Let the producer write over everything before a position. Positions only grow."""
        self._position.value = max(position, self._position.value)

    def place(self, position: int) -> int:
        """Where in the mapping a position lies."""
        return HEADER_BYTES + position % self.num_bytes

    def has(self, position: int, size: int) -> bool:
        """Whether bytes at a position lie one behind the other, before the ring's end."""
        return position >= 0 and 0 <= size <= self.num_bytes - position % self.num_bytes

    def read(self, position: int, size: int) -> memoryview:
        """The bytes at a position.

        Raises:
            ValueError: they would reach over the ring's end.
        """
        if not self.has(position, size):
            raise ValueError(f"{size} bytes at {position} are not in the ring")
        begin = self.place(position)
        return memoryview(self._memory)[begin : begin + size]

    def close(self) -> None:
        """Have nothing to do with it any more; the memory goes with the last that has it.

        It does not wait for the collector to find this object, which may hold much for long.
        Somebody who still reads from it, as a thread on a disk that hangs, keeps it until then.
        """
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        self._position = ctypes.c_uint64(self._position.value)  # of its own: a view keeps it open
        with contextlib.suppress(BufferError):
            self._memory.close()


class Producer:
    """Hands out room in a ring, in order."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._tail = ring.released
        self.head = self._tail
        """The position behind everything that was handed out."""

    def reserve(self, size: int, align: int = 1) -> int | None:
        """The position of so many bytes that nobody else uses; None: there is no room now."""
        num_bytes = self._ring.num_bytes
        self._tail = max(self._tail, self._ring.released)
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
        """Give the newest room back, which was not used."""
        self.head = position


def default_num_bytes(most: int = NUM_BYTES) -> int:
    """How large a ring may be here: no more than an eighth of the memory that is free."""
    free = _available_bytes()
    share = most if free is None else max(_LEAST_BYTES, free // _SHARE)
    return max(PAGE_BYTES, min(most, share) // PAGE_BYTES * PAGE_BYTES)


def _available_bytes() -> int | None:
    """Memory that is free, or would be as soon as it is wanted; None: this system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvail")) * 1024
    except (OSError, ValueError, IndexError, StopIteration):
        return None
