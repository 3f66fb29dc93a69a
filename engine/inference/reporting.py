"""Progress and files of a job that runs a trained network over rows."""

import time
from pathlib import Path
from typing import Any

from engine.core.spool import now
from engine.data.batches.rows import Rows
from engine.training.control import RunControl
from engine.training.report import Outputs

BAD_ROWS = "bad_rows.jsonl"
"""The file that lists rows that were dropped."""
_PROGRESS_S = 0.25


class Ended(Exception):
    """The job was asked to end."""


class Look:
    """Called with the number of rows just processed; raises `Ended` if the job was asked to end."""

    def __init__(self, control: RunControl) -> None:
        self._control = control

    def __call__(self, _num_rows: int) -> None:
        """Raise `Ended` if the job was asked to end."""
        if self._control.cancel_requested:
            raise Ended


class Progress:
    """Reports progress, at most four times a second."""

    def __init__(self, num_rows: int, batch_size: int, out: Outputs, before: int = 0) -> None:
        """``before``: the rows that earlier attempts have done."""
        self._num_rows, self._batch_size, self._out = num_rows, batch_size, out
        self._before = before
        self._began = self._reported_at = time.perf_counter()

    def reached(self, done: int) -> None:
        """Report the number of rows that are done, unless another report has just been made."""
        if time.perf_counter() - self._reported_at >= _PROGRESS_S:
            self.report(done)

    def report(self, done: int) -> None:
        """Report the number of rows that are done."""
        done = min(done, self._num_rows)
        self._reported_at = time.perf_counter()
        rate = (done - self._before) / max(1e-9, self._reported_at - self._began)
        record: dict[str, Any] = {"type": "progress", "at": now(), "epoch": 0, "samples": done}
        record |= {"step": -(-done // self._batch_size)}
        record |= {"num_steps": -(-self._num_rows // self._batch_size)}
        record |= {"samples_per_s": round(rate, 1)}
        left = self._num_rows - done
        self._out.emit(record | {"eta_s": round(left / rate, 1) if rate else None})
        self._out.settle()


def report_dropped_rows(rows: Rows, out: Outputs) -> None:
    """Report what was cut off or dropped while rows were read."""
    for what, count in rows.left_out.items():
        out.emit({"type": "dropped", "at": now(), "what": what, "count": count})


def report_file(path: Path, media_type: str, out: Outputs) -> None:
    """Report a file in the directory of artifacts, which the worker stores."""
    record = {"type": "artifact", "at": now(), "name": path.name, "media_type": media_type}
    out.emit(record | {"file": f"artifacts/{path.name}", "size_bytes": path.stat().st_size})


def report_bad_rows(directory: Path, out: Outputs) -> None:
    """Report the list of dropped rows if it has any."""
    if (directory / BAD_ROWS).stat().st_size:
        report_file(directory / BAD_ROWS, "application/jsonl", out)
