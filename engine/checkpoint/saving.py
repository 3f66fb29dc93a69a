"""Save checkpoints while training continues: the step waits for a copy only, a thread writes files.

One checkpoint is written at a time. A save that the spec asks for waits for the previous one. A
save by default is limited to a fraction of the time. The best state that it skips is held in memory
and written before the next checkpoint. A checkpoint is reported once it is durable. An error while
saving does not end training.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from engine.checkpoint import checkpoint
from engine.checkpoint.shared_writing import Agreed, SharedWriter
from engine.core.snapshot import Parts, Snapshot, Staging, take
from engine.core.spool import Emit, now, report_dropped
from glasshouse.failpoints import failpoint
from glasshouse.spec import TrainJob

MAX_FRACTION = 0.05
"""The most that default checkpoints may take of the elapsed time, copying and writing together …"""
MAX_SAVED_FRACTION = 0.025
"""… and the most for saves. The rest is for copies of the best state, held until written."""
FREE_SAVES = 10
FREE_BYTES = 2**20
"""The number of saves at ends of epochs that are always made if they are at most this large."""
_WRITTEN_PER_S, _COPIED_PER_S = 100e6, 2e9
"""Bytes per second, assumed until measured: less than most disks and hosts reach."""


class _Taken(NamedTuple):
    """A snapshot that is not written yet."""

    snapshot: Snapshot
    staging: Staging
    copy_s: float
    """How long the copy took."""
    agreed: Agreed | None
    """What the processes have agreed on, if each has a part of the state."""


class Saver:
    """Saves a job's checkpoints, one at a time."""

    def __init__(
        self,
        job: TrainJob,
        directory: Path,
        emit: Emit,
        flush: Callable[[], None],
        together: SharedWriter | None = None,
    ) -> None:
        """``directory`` is that of the job.

        ``together``: the processes of the job, if each has a part of the state. Then all of them
        save and hold at the same boundaries, as process 0 chooses.
        """
        self.parts: Parts = {}
        """All parts to save."""
        self._job = job
        self._when = job.checkpoint
        self._directory = directory
        self._emit = emit
        self._flush = flush
        self._together = together
        self._thread: threading.Thread | None = None
        self._started = self._saved_at = time.monotonic()
        self._num_saves = 0
        self._spent_s = self._held_s = 0.0
        """Total time so far: of saves, and of copies that were held."""
        self._save_s: float | None = None
        self._copy_s: float | None = None
        """Time of the last one."""
        self._free: list[Staging] = []
        """Unused memory: at most two snapshots exist at once."""
        self._held: _Taken | None = None
        self.best: float | None = None
        """The best value of ``keep_best``'s metric in the evaluations so far."""
        self._best_at = -1
        """The updates done when that value was measured."""
        self._lost: int | None = None
        """The updates done at the best state, if it is neither saved nor held."""
        self._names: set[str] = set()
        checkpoint.clear_leftovers(directory / "checkpoints")

    def follow(self, job: TrainJob) -> None:
        """Use a job's changed settings; later checkpoints contain the new spec."""
        self._job, self._when = job, job.checkpoint
        self.__dict__.pop("_run", None)

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def judge(self, figures: Mapping[str, float], step: int) -> None:
        """Record the metrics of an evaluation after ``step`` updates."""
        best = self._when.keep_best
        value = math.nan if best is None else figures.get(best.metric, math.nan)
        if best is None or not math.isfinite(value):
            return
        sign = 1 if best.mode == "min" else -1
        if self.best is None or sign * value < sign * self.best:
            self.best, self._best_at = value, step

    def choose(self, step: int, *, due: bool) -> Literal["save", "hold"] | None:
        """Decide what to do at this step boundary; ``due``: a save is due by steps or epochs.

        ``step``: updates done. ``hold``: keep the state in memory, because it is the best.
        """
        is_named = self._when.is_named
        is_best = step == self._best_at
        if due and (is_named or self._is_free):
            return "save"
        if (due or is_best) and not is_named:
            if self._affords_save(alone=is_best or self._held is None):
                return "save"
            if is_best and self._affords_copy:
                return "hold"
            self._lost = step if is_best else self._lost
        return "save" if self.is_time else None

    @property
    def is_time(self) -> bool:
        """Whether ``every_s`` has passed since the last save, which is written."""
        every_s = self._when.every_s
        return (
            every_s is not None
            and time.monotonic() - self._saved_at >= every_s
            and not self.is_busy
        )

    @property
    def _is_free(self) -> bool:
        """Whether a default save is too small to count against the limit."""
        return self._num_saves < FREE_SAVES and self._num_bytes <= FREE_BYTES

    def _affords_save(self, *, alone: bool) -> bool:
        """Whether a default save, alone or with the held state, is within the limit."""
        known = self._num_bytes / _WRITTEN_PER_S if self._save_s is None else self._save_s
        needed_s = known if alone else 2 * known
        return not self.is_busy and self._spent_s + needed_s <= MAX_SAVED_FRACTION * self._elapsed_s

    @property
    def _affords_copy(self) -> bool:
        known = self._num_bytes / _COPIED_PER_S if self._copy_s is None else self._copy_s
        return self._spent_s + self._held_s + known <= MAX_FRACTION * self._elapsed_s

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started

    @cached_property
    def _num_bytes(self) -> int:
        values = (item for part in self.parts.values() for item in part.state().values())
        return sum(item.nbytes for item in values if isinstance(item, Tensor))

    def save(
        self,
        position: Mapping[str, int],
        metrics: Mapping[str, float],
        *,
        final: bool = False,
        wait: bool = False,
    ) -> None:
        """Copy the current state; a thread writes it while training continues.

        A held state is written first, unless this state is better. With ``wait`` the checkpoint is
        durable on return; if it cannot be written, the error is raised.
        """
        self.wait()
        del self._free[1:]  # a second one is rarely needed
        self._saved_at = time.monotonic()
        self._num_saves += 1
        if position["step"] == self._best_at:
            self._let_go()
            self._lost = None
        held, self._held = self._held, None
        try:
            taken = self._take(position, metrics, final=final, with_held=held is not None)
        except Exception as error:
            self._held = held
            if wait or self._together is not None:  # the other processes have copied theirs
                raise
            report_dropped(self._emit, "checkpoint", error)  # existing checkpoints stay
            return
        if held is not None and taken.agreed is not None and not taken.agreed.with_held:
            self._free.append(held.staging)
            held = None
        if wait:
            if held is not None:
                self._try_to_write([held])
            self._write(taken)
            self._report_lost()
            return
        waiting = [taken] if held is None else [held, taken]
        self._thread = threading.Thread(
            target=self._try_to_write, args=(waiting,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def hold(self, position: Mapping[str, int], metrics: Mapping[str, float]) -> None:
        """Hold a copy of the current state, instead of the one held before."""
        self._let_go()
        try:
            self._held = self._take(position, metrics, final=False, with_held=False)
        except Exception as error:
            if self._together is not None:
                raise
            self._lost = position["step"]
            report_dropped(self._emit, "checkpoint", error)
            return
        self._lost = None
        self._held_s += self._held.copy_s

    def _take(
        self,
        position: Mapping[str, int],
        metrics: Mapping[str, float],
        *,
        final: bool,
        with_held: bool,
    ) -> "_Taken":
        started = time.monotonic()
        about = {**position, "final": final, "metrics": dict(metrics), **self._run}
        staging = self._free.pop() if self._free else Staging()
        snapshot = take(self.parts, about, staging)
        agreed = None
        if self._together is not None:
            agreed = self._together.agree(snapshot, self.parts, with_held=with_held)
        self._copy_s = time.monotonic() - started
        return _Taken(snapshot, staging, self._copy_s, agreed)

    def _let_go(self) -> None:
        if self._held is not None:
            self._free.append(self._held.staging)
            self._held = None

    def _report_lost(self) -> None:
        """Report that the best state is in no checkpoint, if so."""
        best, self._lost, step = self._when.keep_best, None, self._lost
        if step is None or best is None:
            return
        detail = f"checkpoint of the best state: {best.metric} {self.best} after {step} steps;"
        detail += " a copy would have taken more than its share of the time: give"
        detail += " checkpoint.every_epochs or every_steps"
        self._emit({"type": "dropped", "at": now(), "what": detail, "count": 1})

    def wait(self) -> None:
        """Block until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @cached_property
    def _run(self) -> dict[str, Any]:
        """What determines the results in addition to the parts."""
        spec = self._job.model_dump(mode="json")
        return {"torch": torch.__version__, "threads": torch.get_num_threads(), "spec": spec}

    def _try_to_write(self, waiting: Sequence["_Taken"]) -> None:
        for taken in waiting:
            try:
                self._write(taken)
            except Exception as error:
                report_dropped(self._emit, "checkpoint", error)

    def _write(self, taken: "_Taken") -> None:
        started = time.monotonic()
        try:
            together, agreed = self._together, taken.agreed
            if together is None or agreed is None or together.group.is_first:
                self._write_and_report(taken)
            else:
                together.write_own(taken.snapshot, agreed)
        finally:
            self._free.append(taken.staging)
            self._save_s = taken.copy_s + time.monotonic() - started
            self._spent_s += self._save_s

    def _write_and_report(self, taken: "_Taken") -> None:
        snapshot = taken.snapshot
        about = snapshot.about
        snapshot.about = {**about, "device": snapshot.device}
        name = self._name(int(about["step"]))
        files = self._write_files(self._directory / name, taken)
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

    def _write_files(self, directory: Path, taken: "_Taken") -> dict[str, dict[str, Any]]:
        together, agreed = self._together, taken.agreed
        if together is None or agreed is None:
            return checkpoint.write(directory, taken.snapshot)
        try:
            write = partial(together.write, agreed)
            return checkpoint.write(directory, taken.snapshot, write)
        except BaseException:  # the others would wait for ever
            together.give_up(agreed)
            raise

    def _name(self, step: int) -> str:
        """Return a name not reported by this run yet: its directory may be in transfer."""
        name = whole = f"checkpoints/step-{step}"
        number = 1
        while name in self._names:
            number += 1
            name = f"{whole}-{number}"
        return name
