"""Saving while training goes on: the step pays for a copy in memory, a thread writes the files.

There is one slot. Who must save while it is taken waits; who would only like to, does not save. A
checkpoint is told of once it is durable, and an error while saving ends no training.
"""

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from engine import checkpoint
from engine.snapshot import Parts, Snapshot, take
from engine.spool import now
from glasshouse.failpoints import failpoint
from glasshouse.spec import TrainJob

Emit = Callable[[dict[str, Any]], None]
FREE_SAVES = 10
"""Nobody asked how often to save: so many are made at the ends of epochs however short …"""
MAX_FRACTION = 0.05
"""… and more while writing them takes at most this part of the time."""


class Saver:
    """Makes a job's checkpoints, one at a time."""

    def __init__(
        self,
        job: TrainJob,
        directory: Path,
        emit: Emit,
        flush: Callable[[], None],
    ) -> None:
        """``directory`` is that of the job."""
        self.parts: Parts = {}
        """All that is saved."""
        self._job = job
        self._when = job.checkpoint
        self._directory = directory
        self._emit = emit
        self._flush = flush
        self._thread: threading.Thread | None = None
        self._started = self._saved_at = time.monotonic()
        self._num_saves = 0
        self._spent_s = 0.0
        self._names: set[str] = set()
        checkpoint.clear_leftovers(directory / "checkpoints")

    def follow(self, job: TrainJob) -> None:
        """Take a job whose settings changed; what is saved says what it was made with."""
        self._job, self._when = job, job.checkpoint
        self.__dict__.pop("_run", None)

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wants(self, *, due: bool) -> bool:
        """Whether to save at this step boundary: it is ``due`` by steps or epochs, or by time."""
        if due and (self._when.every_epochs or self._when.every_steps or self._is_cheap):
            return True
        every_s = self._when.every_s
        if every_s is None or time.monotonic() - self._saved_at < every_s:
            return False
        return not self.is_busy

    @property
    def _is_cheap(self) -> bool:
        """Whether an end of an epoch that nobody has named may be saved."""
        if self._num_saves < FREE_SAVES:
            return True
        elapsed_s = time.monotonic() - self._started
        return not self.is_busy and self._spent_s <= MAX_FRACTION * elapsed_s

    def save(
        self,
        position: Mapping[str, int],
        metrics: Mapping[str, float],
        *,
        final: bool = False,
        wait: bool = False,
    ) -> None:
        """Save everything as it is now; it is written behind training's back.

        With ``wait`` it is durable when this returns, or raises what prevented that.
        """
        self.wait()
        self._saved_at = time.monotonic()
        self._num_saves += 1
        try:
            about = {**position, "final": final, "metrics": dict(metrics), **self._run}
            snapshot = take(self.parts, about)
        except Exception as error:
            if wait:
                raise
            self._failed(error)
            return
        if wait:
            self._write(snapshot)
            return
        self._thread = threading.Thread(
            target=self._try_to_write, args=(snapshot,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @cached_property
    def _run(self) -> dict[str, Any]:
        """What makes the numbers what they are, beside the parts."""
        spec = self._job.model_dump(mode="json")
        return {"torch": torch.__version__, "threads": torch.get_num_threads(), "spec": spec}

    def _try_to_write(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
        except Exception as error:
            self._failed(error)

    def _write(self, snapshot: Snapshot) -> None:
        started = time.monotonic()
        about = snapshot.about
        snapshot.about = {**about, "device": snapshot.device}
        name = self._name(int(about["step"]))
        try:
            files = checkpoint.write(self._directory / name, snapshot)
        finally:
            self._spent_s += time.monotonic() - started
        failpoint("checkpoint.durable")
        self._names.add(name)
        self._emit(
            {
                "type": "checkpoint",
                "at": now(),
                "step": about["step"],
                "epoch": about["epoch"],
                "dir": name,
                "files": files,
                "size_bytes": sum(item["size_bytes"] for item in files.values()),
                "final": about["final"],
                "metrics": about["metrics"],
            }
        )
        self._flush()

    def _name(self, step: int) -> str:
        """A name that this run has not told of yet: its directory may be on its way elsewhere."""
        name = whole = f"checkpoints/step-{step}"
        number = 1
        while name in self._names:
            number += 1
            name = f"{whole}-{number}"
        return name

    def _failed(self, error: Exception) -> None:
        """Training goes on, and so do the checkpoints that are there."""
        what = f"checkpoint: {type(error).__name__}: {error}"[:500]
        self._emit({"type": "dropped", "at": now(), "what": what, "count": 1})
        traceback.print_exception(error)
