"""A fork server whose ranks misbehave as the labels of their jobs say; else it is the real one.

Labels: ``misbehave`` names one of `WAYS`, ``at`` the step after which, or ``start``, ``evaluate``,
``save``, one of `PHASES` or a failpoint; ``hit``: the how manieth time (1), or ``each``;
``attempts``: only the first so many attempts do; ``rank``: only this process does. ``reached``: a
file to make then.
"""

import ctypes
import errno
import functools
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
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "be-slow": lambda: time.sleep(0.05),
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


PHASES = ("forward", "collective", "checkpoint", "evaluation", "end")
"""Where all processes come: before the forward pass, before gradients are sent, before a checkpoint
and an evaluation, and after training. Process 0 alone writes checkpoints. In a pipeline a process
also comes to ``stage``: before each forward pass of a micro-batch."""


class Misbehaviour:
    """What the labels of one job say."""

    def __init__(self, job_dir: Path) -> None:
        job = json.loads((job_dir / "job.json").read_text())
        labels = job.get("spec", {}).get("labels") or {}
        parallel = job.get("spec", {}).get("parallel") or {}
        self.is_pipeline = parallel.get("strategy") == "pipeline"
        self.serves = job.get("spec", {}).get("kind") == "serve"
        self._way = labels.get("misbehave")
        self._at = labels.get("at", "start")
        self._reached = labels.get("reached")
        self._hit = labels.get("hit", "1")
        self._num_hits = 0
        if "rank" in labels and int(labels["rank"]) != (job.get("group") or {}).get("rank"):
            self._way = None
        if job.get("attempt", 1) > int(labels.get("attempts", 10**9)):
            self._way = None

    def come_to(self, place: str) -> None:
        if self._way is None or place != self._at:
            return
        self._num_hits += 1
        if self._hit not in ("each", str(self._num_hits)):
            return
        way = self._way
        if self._hit != "each":
            self._way = None  # once a life
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
    from engine.distributed.data_parallel import Exchange
    from engine.learner.learner import Learner
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

    def before(owner: type, name: str, phase: str) -> None:
        """Come to a phase whenever a method is called."""
        real = getattr(owner, name)

        @functools.wraps(real)  # torch checks the signature of what sums gradients
        def act(*args: Any, **options: Any) -> Any:
            come_to(phase)
            return real(*args, **options)

        setattr(owner, name, act)

    def in_pipelines() -> None:
        """Come to the phases of a pipeline, whose passes are others; the import takes a while."""
        from engine.learner.pipelined import Pipelined
        from engine.training.passes import Passes

        before(Passes, "_through_stages", "forward")
        before(Pipelined, "run_stage", "stage")
        before(Pipelined, "_sum_gradients", "collective")

    def in_replicas() -> None:
        """Come to ``load`` before a version is loaded, to ``compute`` before each batch, to
        ``drain`` before a replica closes, and to ``stop`` when it takes no more requests."""
        from engine.serving.listener import Listener
        from engine.serving.serve import _Replica  # pyright: ignore[reportPrivateUsage]
        from engine.serving.served_models import ServedVersion

        before(_Replica, "_load", "load")
        before(_Replica, "drain", "drain")
        before(Listener, "stop", "stop")
        real = ServedVersion.compute

        def compute(self: ServedVersion, requests: Any, sample: Any = None) -> Any:
            come_to("compute")
            return real(self, requests, sample)

        ServedVersion.compute = compute

    def main(job_dir: Path, control_fd: int | None = None) -> int:
        global misbehaviour  # noqa: PLW0603
        misbehaviour = Misbehaviour(job_dir)
        if misbehaviour.serves:
            in_replicas()
        if misbehaviour.is_pipeline:
            in_pipelines()
        misbehaviour.come_to("start")
        return real_main(job_dir, control_fd)

    after("step", lambda step, *_: str(step))
    after("evaluate", lambda *_: "evaluate")
    after("save", lambda *_: "save")
    methods = ((Learner, "forward"), (Exchange, "sum"))
    methods += ((Reporter, "keep"), (Reporter, "evaluate"), (Reporter, "finish"))
    for (owner, name), phase in zip(methods, PHASES, strict=True):
        before(owner, name, phase)
    real_main, rank.main = rank.main, main
    fork_server.main()
