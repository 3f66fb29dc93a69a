"""Processes by a name that is never reused: pid, start time, boot. Signals go only to those."""

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


def kill_orphans(leader: Identity) -> None:
    """Kill what a group's ended leader left behind.

    A pid is not given to a new process while a group of that number has members, so the group
    is still the one that was ours unless another process has the pid by now.
    """
    if psutil.pid_exists(leader.pid):
        return
    try:
        os.killpg(leader.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


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


def oom_kills() -> int | None:
    """How often the kernel has killed for memory in our control group; None: it does not say."""
    try:
        group = (_PROC / "self/cgroup").read_text().strip().rsplit(":", 1)[-1]
        text = Path("/sys/fs/cgroup", group.lstrip("/"), "memory.events").read_text()
    except OSError:
        return None
    counts = dict(line.split() for line in text.splitlines())
    return int(counts["oom_kill"]) if "oom_kill" in counts else None


def _started(pid: int) -> str | None:
    if not _PROC.joinpath("self").exists():
        return _started_elsewhere(pid)
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rsplit(")", 1)[1].split()  # the name before it may hold anything
    return None if fields[0] in ("Z", "X") else fields[19]


def _started_elsewhere(pid: int) -> str | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return repr(process.create_time())
    except psutil.NoSuchProcess:
        return None
