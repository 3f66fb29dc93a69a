"""Processes by a name that is never reused: pid, start time, boot. Signals go only to those."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

KILL = signal.SIGKILL
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Identity:
    """One process of this boot; a recycled pid is another identity."""

    pid: int
    started: str


def identify(pid: int) -> Identity | None:
    """The process that has a pid now. None: there is none, or it has ended."""
    started = _started(pid)
    return None if started is None else Identity(pid, started)


def alive(process: Identity) -> bool:
    """Whether this very process still runs; one that waits to be reaped does not."""
    return _started(process.pid) == process.started


def signal_group(process: Identity, number: signal.Signals) -> bool:
    """Signal the process group that a process leads. False: it is gone, nobody was signalled."""
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
    members = [pid for pid in psutil.pids() if _session(pid) == leader.pid]
    found = [process for pid in members if (process := identify(pid)) is not None]
    is_ours = _started(leader.pid, dead=True) in (None, leader.started)
    return found if is_ours else []


def kill(process: Identity) -> None:
    """Kill this very process, through a handle that a recycled pid cannot have."""
    opened = getattr(os, "pidfd_open", None)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if opened is None:
            if alive(process):
                os.kill(process.pid, signal.SIGKILL)
            return
        handle = opened(process.pid)
        try:
            if alive(process):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def wait_gone(process: Identity, timeout_s: float) -> bool:
    """Wait for a process that is not our child to end."""
    deadline = time.monotonic() + timeout_s
    while alive(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def boot_id() -> str:
    """What differs after the machine has started again."""
    path = _PROC / "sys/kernel/random/boot_id"
    return path.read_text().strip() if path.exists() else str(int(psutil.boot_time()))


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _started(pid: int, *, dead: bool = False) -> str | None:
    """When a process started; with ``dead`` also one that waits to be reaped."""
    if not _PROC.joinpath("self").exists():
        return _started_elsewhere(pid, dead=dead)
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rsplit(")", 1)[1].split()  # the name before it may hold anything
    return None if fields[0] in ("Z", "X") and not dead else fields[19]


def _started_elsewhere(pid: int, *, dead: bool) -> str | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE and not dead:
            return None
        return repr(process.create_time())
    except psutil.NoSuchProcess:
        return None
