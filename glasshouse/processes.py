"""Processes, identified by pid, boot and start time, so that a signal never reaches a reused pid.

Unlike ``psutil.Process``, these identities can be written to a file and read by a later process.
"""

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KILL = signal.SIGKILL
SHOW_STACKS = signal.SIGUSR1
"""Makes a training process append the Python stacks of its threads to its file of stacks."""
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Identity:
    """One process; a reused pid is another identity."""

    pid: int
    started: str
    """The id of the boot and the start time in the kernel's ticks since it; "": unknown."""

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the machine has not been rebooted since."""
        return self.started.startswith(f"{_boot_id()}:")


def identify(pid: int) -> Identity | None:
    """The process that has this pid now; None if there is none."""
    started = _started(pid)
    return None if started is None else Identity(pid, started)


def alive(process: Identity) -> bool:
    """Whether this process still runs. A zombie does not."""
    return _started(process.pid) == process.started


def signal_group(process: Identity, number: signal.Signals) -> bool:
    """Signal the process group led by a process. Returns False if the process is gone."""
    if not alive(process):
        return False
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_orphans(leader: Identity, timeout_s: float = 10.0) -> bool:
    """Kill what an ended leader left behind in its session; whether nothing of it is left.

    A number is not given to a new process while a session has it, so these are still ours
    unless another process has the leader's number by now.
    """
    deadline = time.monotonic() + timeout_s
    while left := session_of(leader):
        for process in left:
            kill(process)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def session_of(leader: Identity) -> list[Identity]:
    """The processes that run in the session that a process leads, itself included."""
    members = [pid for pid in _pids() if _session(pid) == leader.pid]
    found = [process for pid in members if (process := identify(pid)) is not None]
    is_ours = _started(leader.pid, dead=True) in (None, leader.started)
    return found if is_ours else []


def kill(process: Identity, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal this very process, through a handle that a reused pid cannot have."""
    opened = getattr(os, "pidfd_open", None)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if opened is None:
            if alive(process):
                os.kill(process.pid, number)
            return
        handle = opened(process.pid)
        try:
            if alive(process):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def end(process: Identity, timeout_s: float) -> bool:
    """Terminate the process group of a process, and kill it after a timeout. True: it is gone."""
    signal_group(process, signal.SIGTERM)
    if wait_gone(process, timeout_s):
        return True
    signal_group(process, signal.SIGKILL)
    return wait_gone(process, 5)


def wait_gone(process: Identity, timeout_s: float) -> bool:
    """Wait for a process that is not our child to end."""
    deadline = time.monotonic() + timeout_s
    while alive(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


@functools.cache
def _boot_id() -> str:
    """An id that changes when the machine is rebooted."""
    path = _PROC / "sys/kernel/random/boot_id"
    return path.read_text().strip() if path.exists() else str(int(_psutil().boot_time()))


def _pids() -> Iterable[int]:
    if not _PROC.joinpath("self").exists():
        return _psutil().pids()
    return (int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdecimal())


def _started(pid: int, *, dead: bool = False) -> str | None:
    """When a process started; with ``dead``, also for a zombie."""
    if not _PROC.joinpath("self").exists():
        return _started_elsewhere(pid, dead=dead)
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rsplit(")", 1)[1].split()  # the name before it may hold anything
    return None if fields[0] in ("Z", "X") and not dead else f"{_boot_id()}:{fields[19]}"


def _started_elsewhere(pid: int, *, dead: bool) -> str | None:
    psutil = _psutil()
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE and not dead:
            return None
        return f"{_boot_id()}:{process.create_time()!r}"
    except psutil.NoSuchProcess:
        return None


def _psutil() -> Any:
    import psutil  # noqa: PLC0415 (not part of an installation of the client alone)

    return psutil
