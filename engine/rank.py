"""A rank: the process that runs one attempt of one job, from ``job.json`` to the ``end`` record."""

import gc
import json
import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine import infer
from engine.data import Rows, Table, load
from engine.failures import classify
from engine.probes.watched.wanted import Wanted
from engine.problems import SpecProblems
from engine.report import Control, Outputs
from engine.spool import SpoolWriter, now
from engine.timing import Work
from engine.train import train
from glasshouse import jsonio
from glasshouse.errors import RunFailure, SpecFailed
from glasshouse.spec import Field, InferJob, Source, TrainJob, parse_job

_COLLECT_AFTER = (20_000, 10, 10)
PARENT_GONE = 75
"""Exit code of a rank whose lifeline was cut."""


class Lifeline:
    """Commands from the supervisor; when its end of the pipe closes, this process ends."""

    def __init__(self, descriptor: int | None, job_dir: Path) -> None:
        self.cancel_requested = False
        self.wanted: Wanted | None = None
        self._job_dir = job_dir
        if descriptor is not None:
            thread = threading.Thread(
                target=self._listen, args=(descriptor,), name="lifeline", daemon=True
            )
            thread.start()

    def _listen(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as pipe:
            for line in pipe:
                try:
                    command = json.loads(line)
                except ValueError:
                    continue
                if command.get("do") == "cancel":
                    self.cancel_requested = True
                elif command.get("do") == "probes":
                    self._read_wanted(command)
        os._exit(PARENT_GONE)

    def _read_wanted(self, command: dict[str, Any]) -> None:
        """A list may be long, so that the pipe carries the name of its file."""
        try:
            name = Path(command["file"]).name
            self.wanted = Wanted.read(jsonio.loads((self._job_dir / name).read_bytes()))
        except (OSError, KeyError, TypeError, ValueError):
            traceback.print_exc()


@dataclass(frozen=True)
class Assignment:
    """What ``job.json`` says."""

    spec: TrainJob | InferJob
    tables: dict[str, Path]
    device: torch.device
    num_threads: int | None
    checkpoint: Path | None
    trained_by: TrainJob | None
    watched: Wanted | None = None
    """The probes of now; None: those of the spec."""
    ring: str | None = None
    """The ring that the worker empties of whole tensors."""
    flops: float | None = None
    """Operations of one batch's forward pass, as planned."""
    peak_flops: float | None = None
    """Operations a second that the devices are capable of."""

    @staticmethod
    def read(path: Path) -> "Assignment":
        """Read ``job.json``.

        Raises:
            SpecFailed: it is not an assignment.
        """
        try:
            raw = jsonio.loads(path.read_bytes())
            trained_by = raw.get("trained_by")
            parsed = None if trained_by is None else parse_job(json.dumps(trained_by))
            return Assignment(
                spec=parse_job(json.dumps(raw["spec"])),
                tables={name: Path(item["dir"]) for name, item in raw["datasets"].items()},
                device=torch.device("cuda", 0)
                if raw["device"]["type"] == "cuda"
                else torch.device("cpu"),
                num_threads=raw["device"].get("threads"),
                checkpoint=Path(raw["checkpoint"]["dir"]) if raw.get("checkpoint") else None,
                trained_by=parsed if isinstance(parsed, TrainJob) else None,
                watched=Wanted.read(raw["probes"]) if raw.get("probes") else None,
                ring=raw.get("ring"),
                flops=raw.get("flops"),
                peak_flops=raw["device"].get("peak_flops"),
            )
        except (KeyError, TypeError, ValueError) as cause:
            raise SpecFailed(f"job.json cannot be read: {cause}") from cause

    def table(self, dataset: str) -> Table:
        """The dataset's directory."""
        if dataset not in self.tables:
            raise SpecFailed(f"The job names the dataset {dataset!r}, which was not handed to it.")
        return Table(self.tables[dataset])


def run(job: Assignment, *, control: Control, out: Outputs) -> str:
    """Run an assignment to its end; returns ``succeeded`` or ``cancelled``."""
    if job.num_threads is not None:
        torch.set_num_threads(job.num_threads)
    # One path, watched or not: torch's shortcut for attention is taken only where nobody hooks in.
    torch.backends.mha.set_fastpath_enabled(False)
    if isinstance(job.spec, InferJob):
        inputs = _infer_inputs(job, job.spec)
        return infer.run(job.spec, job.trained_by, inputs, control=control, out=out)
    spec = job.spec
    out.ring = job.ring
    out.flush()

    def rows(source: Source) -> Rows:
        fields: dict[str, Field] = {name: spec.data.fields[name] for name in _fields_read(spec)}
        table = job.table(source.dataset)
        return load(source, fields, table, seed=spec.seed, device=job.device)

    training = rows(spec.data.train)
    judged = rows(spec.data.validation) if spec.data.validation and spec.evaluate else None
    planned = min(spec.data.batch_size, training.num_rows)
    work = Work(None if job.flops is None else job.flops / planned, job.peak_flops)
    ending = train(spec, training, judged, control=control, out=out, watched=job.watched, work=work)
    return "cancelled" if ending.cancelled else "succeeded"


def _fields_read(spec: TrainJob) -> list[str]:
    """The fields that a layer, the loss or a metric reads."""
    read = {name for layer in spec.network.layers for name in layer.inputs or ()}
    read |= {*spec.loss.inputs} | {name for metric in spec.metrics for name in metric.sources}
    return [name for name in spec.data.fields if name in read]


def _infer_inputs(job: Assignment, spec: InferJob) -> infer.Inputs:
    if job.checkpoint is None:
        raise SpecFailed("The inference job was handed no checkpoint.")
    table = None if spec.data is None else job.table(spec.data.dataset)
    return infer.Inputs(job.checkpoint, table, job.device)


def main(job_dir: Path, control_fd: int | None = None) -> int:
    """Run ``job.json`` of a directory, writing its spool; returns the exit code.

    0: an ``end`` record was written, whatever it says. Anything else is for the worker to name.
    """
    calm_collector()
    spool = SpoolWriter(job_dir / "spool")
    control = Lifeline(control_fd, job_dir)
    out = Outputs(job_dir, spool.append, spool.settle, spool.flush)
    state, failure = attempt(
        lambda: run(Assignment.read(job_dir / "job.json"), control=control, out=out)
    )
    error = None if failure is None else failure.as_dict()
    spool.append({"type": "end", "at": now(), "state": state, "error": error})
    spool.close()
    return 0


def calm_collector() -> None:
    """Have the garbage collector look less often, and not through what the imports made.

    A watched step makes thousands of small objects that live until its end, and none of them in a
    cycle: at Python's own pace the collector took a third of the time of looking.
    """
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def attempt(work: Callable[[], str]) -> tuple[str, RunFailure | None]:
    """Run a job; whatever it raises becomes a named failure, its traceback on standard error."""
    try:
        return work(), None
    except (Exception, SpecProblems) as error:
        traceback.print_exc()
        return "failed", classify(error)
