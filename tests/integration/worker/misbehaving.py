"""A fork server whose ranks misbehave as the labels of their jobs say; else it is the real one.

Labels: ``misbehave`` names one of `WAYS`, ``at`` the step after which, or ``start``, ``evaluate``,
``save`` or a failpoint; ``attempts``: only the first so many attempts do; ``rank``: only this
process does. ``reached``: a file to make then.
"""

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glasshouse import failpoints


def crash() -> None:
    ctypes.string_at(0)


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(100_000)


def be_unresponsive() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100_000)


def print_for_ever() -> None:
    line = "all work and no play " * 50 + "\n"
    while True:
        sys.stdout.write(line)
        sys.stderr.write(line)


def leave_children() -> None:
    """Processes of its session: one of its group, one of another group."""
    for options in ({}, {"process_group": 0}):
        subprocess.Popen(["sleep", "100000"], **options)


def ask_for_memory() -> None:
    import torch

    torch.empty(2**60, dtype=torch.uint8)


def fill_the_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def lose_the_device() -> None:
    raise RuntimeError("CUDA error: unspecified launch failure")


WAYS: dict[str, Callable[[], Any]] = {
    "crash": crash,
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hold-the-gil": hold_the_gil,
    "be-unresponsive": be_unresponsive,
    "print": print_for_ever,
    "leave-children": leave_children,
    "ask-for-memory": ask_for_memory,
    "fill-the-disk": fill_the_disk,
    "lose-the-device": lose_the_device,
    "sleep": lambda: time.sleep(100_000),
    "doze": lambda: time.sleep(2),
    "pause": lambda: time.sleep(0.3),
}


class Misbehaviour:
    """What the labels of one job say."""

    def __init__(self, job_dir: Path) -> None:
        job = json.loads((job_dir / "job.json").read_text())
        labels = job.get("spec", {}).get("labels") or {}
        self._way = labels.get("misbehave")
        self._at = labels.get("at", "start")
        self._reached = labels.get("reached")
        if "rank" in labels and int(labels["rank"]) != (job.get("group") or {}).get("rank"):
            self._way = None
        if job.get("attempt", 1) > int(labels.get("attempts", 10**9)):
            self._way = None

    def come_to(self, place: str) -> None:
        if self._way is None or place != self._at:
            return
        way, self._way = self._way, None  # once a life
        if self._reached is not None:
            Path(self._reached).touch()
        WAYS[way]()


def come_to(place: str) -> None:
    """Come to a place; a rank does, once it knows what it is to do there."""
    if misbehaviour is not None:
        misbehaviour.come_to(place)


misbehaviour: Misbehaviour | None = None

if __name__ == "__main__":
    failpoints.failpoint = come_to  # before anybody takes it
    from engine.process import fork_server, rank
    from engine.training.report import Reporter

    def after(name: str, place: Callable[..., str]) -> None:
        """Come to a place whenever a method of the reporter has done its work."""
        real = getattr(Reporter, name)

        def act(self: Reporter, *args: Any, **options: Any) -> Any:
            result = real(self, *args, **options)
            come_to(place(*args))
            return result

        setattr(Reporter, name, act)

    def main(job_dir: Path, control_fd: int | None = None) -> int:
        global misbehaviour  # noqa: PLW0603
        misbehaviour = Misbehaviour(job_dir)
        misbehaviour.come_to("start")
        return real_main(job_dir, control_fd)

    after("step", lambda step, *_: str(step))
    after("evaluate", lambda *_: "evaluate")
    after("save", lambda *_: "save")
    real_main, rank.main = rank.main, main
    fork_server.main()
