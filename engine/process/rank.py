"""Rank: the process that runs one attempt of one job, from ``job.json`` to the ``end`` record."""

import gc
import json
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import checkpoint
from engine.checkpoint.checkpoint import Saved
from engine.core.device import named
from engine.core.problems import SpecProblems
from engine.core.spool import SpoolWriter, now
from engine.core.timing import Work
from engine.data.batches.batching import bucket_field, widest_rows
from engine.data.batches.rows import Rows
from engine.data.columns.table import Table
from engine.diagnose.diagnose import TIMEOUT, Diagnosis
from engine.distributed import group as groups
from engine.distributed.group import ALONE, Group, connect
from engine.distributed.waiting import snapshot
from engine.evaluation import evaluate
from engine.inference import infer
from engine.inference.rows import Inputs
from engine.network.placement import Placement
from engine.probes.watched.requested import RequestedProbes
from engine.serving import serve
from engine.serving.live_predictions import LivePredictions
from engine.training.control import Decisions, RunControl
from engine.training.failures import cause_of, classify
from engine.training.loop import End, train
from engine.training.memory import guard_memory
from engine.training.report import Outputs
from engine.training.start import Start
from engine.training.training_rows import EndedEarly, Gathering
from glasshouse import jsonio
from glasshouse.errors import CheckpointDamaged, RunFailure, SpecFailed
from glasshouse.failpoints import failpoint
from glasshouse.processes import SHOW_STACKS
from glasshouse.spec import (
    AnyJob,
    DiagnoseJob,
    EvaluateJob,
    InferJob,
    ServeJob,
    Trained,
    TrainJob,
    parse_job,
    parse_trained,
)
from glasshouse.spec.parallel import num_processes

_UNFORESEEN = frozenset({"internal", "device", "storage"})
"""Categories of failures whose traceback goes to the log."""
_COLLECT_AFTER = (20_000, 10, 10)
PARENT_GONE = 75
"""Exit code of a rank whose lifeline was closed."""


class Lifeline:
    """Receives commands from the supervisor; ends this process when the pipe closes."""

    def __init__(self, descriptor: int | None, job_dir: Path) -> None:
        self.cancel_requested = False
        self.ends_as = "cancelled"
        self.wanted: RequestedProbes | None = None
        self.threads: int | None = None
        self.models: Sequence[Mapping[str, Any]] | None = None
        self.listen: Mapping[str, Any] | None = None
        self.orders: deque[dict[str, Any]] = deque()
        self._job_dir = job_dir
        if descriptor is not None:
            thread = threading.Thread(
                target=self._listen, args=(descriptor,), name="lifeline", daemon=True
            )
            thread.start()

    def _listen(self, descriptor: int) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SHOW_STACKS})
        with os.fdopen(descriptor, "rb") as pipe:
            for line in pipe:
                try:
                    command = json.loads(line)
                except ValueError:
                    continue
                try:
                    self._hear(command)
                except (OSError, KeyError, TypeError, ValueError, AttributeError):
                    traceback.print_exc()
        os._exit(PARENT_GONE)

    def _hear(self, command: dict[str, Any]) -> None:
        match command.get("do"):
            case "cancel":
                self._end("cancelled")
            case "stop":
                self._end(str(command["as"]))
            case "threads":
                self.threads = int(command["threads"])
            case "probes":
                self.wanted = RequestedProbes.read(self._read(command))
            case "commands":
                self.orders.extend(self._read(command))
            case "models":
                self.models = self._read(command)
            case "listen":
                self.listen = {"job": str(command["job"]), "at": dict(command["at"])}
            case "report":
                self._report(str(command["file"]))
            case _:
                pass  # from a newer supervisor

    def _end(self, state: str) -> None:
        self.ends_as = state  # set before the cancel request; a cancellation overrides a pause
        self.cancel_requested = True

    def _report(self, name: str) -> None:
        """Write what this process waits for; the file appears when it is whole."""
        path = self._job_dir / Path(name).name
        new = path.with_suffix(".new")
        new.write_text(jsonio.dumps(snapshot()))
        new.replace(path)

    def _read(self, command: dict[str, Any]) -> Any:
        """Read a list of probes from its file: it may be too long for the pipe."""
        return jsonio.loads((self._job_dir / Path(command["file"]).name).read_bytes())


@dataclass(frozen=True)
class Assignment:
    """The contents of ``job.json``."""

    spec: AnyJob
    tables: dict[str, Path]
    device: torch.device
    num_threads: int | None
    checkpoint: Path | None
    trained_by: Trained | None
    watched: RequestedProbes | None = None
    """The current probes; None: those of the spec."""
    orders: tuple[dict[str, Any], ...] = ()
    """Commands: first those to be applied again, then those that are waiting."""
    ring: str | None = None
    """The ring from which the worker takes whole tensors."""
    flops: float | None = None
    """Planned operations of one batch's forward pass."""
    peak_flops: float | None = None
    """Peak operations per second of the devices."""
    resume: tuple[Path, int] | None = None
    """The directory of the checkpoint to resume from and the updates done, which is also the first
    step to run; None: start from the beginning."""
    parts: int = 1
    """Each batch runs in this many micro-batches, because memory ran out before."""
    models: tuple[Mapping[str, Any], ...] = ()
    """Of a serve job: the versions that its references name, and their files."""
    listen: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of a serve job: where to listen."""
    stored: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Of an inference: the files that earlier attempts have stored, by name."""
    rank: int = 0
    """The number of this process among those that train together."""
    size: int = 1
    """The number of these processes."""
    store: Path | None = None
    """The file through which they find each other."""

    @staticmethod
    def read(path: Path) -> "Assignment":
        """Read ``job.json``.

        Raises:
            SpecFailed: it is not an assignment.
        """
        try:
            raw = jsonio.loads(path.read_bytes())
            trained_by, resume = raw.get("trained_by"), raw.get("resume")
            return Assignment(
                spec=parse_job(json.dumps(raw["spec"])),
                tables={name: Path(item["dir"]) for name, item in raw["datasets"].items()},
                device=named(raw["device"]["type"]),
                num_threads=raw["device"].get("threads"),
                checkpoint=Path(raw["checkpoint"]["dir"]) if raw.get("checkpoint") else None,
                trained_by=trained_by and parse_trained(json.dumps(trained_by)),
                watched=RequestedProbes.read(raw["probes"]) if raw.get("probes") else None,
                orders=tuple(raw.get("commands") or ()),
                ring=raw.get("ring"),
                flops=raw.get("flops"),
                peak_flops=raw["device"].get("peak_flops"),
                resume=(Path(resume["dir"]), int(resume["step"])) if resume is not None else None,
                parts=int(raw.get("parts") or 1),
                models=tuple(raw.get("models") or ()),
                listen=raw.get("listen") or {},
                stored={name: Path(path) for name, path in (raw.get("stored") or {}).items()},
                **_place_in_group(raw.get("group")),
            )
        except (KeyError, TypeError, ValueError) as cause:
            raise SpecFailed(f"job.json cannot be read: {cause}") from cause

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of a training job; only layers that are placed use another than `device`.

        Raises:
            DeviceFailed: this process does not see all of them.
        """
        placement = (
            Placement.of(self.spec, self.device) if isinstance(self.spec, TrainJob) else None
        )
        return (self.device,) if placement is None else placement.devices

    def join(self, timeout: timedelta = groups.TIMEOUT) -> Group:
        """Join the other processes. ``timeout``: the longest that a message may wait.

        Raises:
            SpecFailed: it is not known where they are.
        """
        if self.size == 1:
            return ALONE
        if self.store is None:
            raise SpecFailed("The job has several processes and was handed no store.")
        return connect(self.rank, self.size, self.store, timeout, self.device)

    def table(self, dataset: str) -> Table:
        """Return the dataset's stored table."""
        if dataset not in self.tables:
            raise SpecFailed(f"The job names the dataset {dataset!r}, which was not handed to it.")
        return Table(self.tables[dataset])

    def gathering(self, spec: TrainJob, control: RunControl, out: Outputs) -> Gathering:
        """Return what creates the rows of a training job."""
        sources = [*spec.data.sources, *spec.data.validations.values()]
        tables = {source.dataset: self.table(source.dataset) for source in sources}
        first = 0 if self.resume is None else self.resume[1]
        return Gathering(spec, tables, self.device, control, out, first)


def _place_in_group(group: Any) -> dict[str, Any]:
    if group is None:
        return {}
    rank, size, store = int(group["rank"]), int(group["size"]), Path(group["store"])
    return {"rank": rank, "size": size, "store": store}


def run(job: Assignment, *, control: RunControl, out: Outputs) -> End:
    """Run an assignment to its end."""
    if job.num_threads is not None:
        torch.set_num_threads(job.num_threads)
    # Watched and unwatched steps must take the same path: torch uses its attention fast path only
    # without hooks.
    torch.backends.mha.set_fastpath_enabled(False)
    if isinstance(job.spec, ServeJob):
        torch.set_float32_matmul_precision("highest")
        out.flush()
        return serve.run(job.spec, job.models, job.listen, job.device, control=control, out=out)
    if not isinstance(job.spec, TrainJob):
        state = _without_training(job, job.spec, control, out)
        return End(control.ends_as if state == "cancelled" else state)
    spec = job.spec
    be_deterministic(spec.deterministic)
    torch.set_float32_matmul_precision(spec.matmul_precision)
    guard_memory(spec.guards.memory, *job.devices)
    is_staged = "pipeline" in spec.parallel.axes
    group = replace(job.join(), num_peers=spec.parallel.num_peers, is_staged=is_staged)
    out = out if group.is_first else Outputs(out.directory, _ignore)
    out.ring = job.ring
    decided = control if group.is_alone else Decisions(control, group)
    if job.orders:
        decided.orders.extendleft(reversed(job.orders))
    out.flush()

    start = _start(job, spec)
    known = None if start is None else start.prepared(spec.data)
    gathering = job.gathering(spec, control, out)
    training: Rows | None = None
    judged: dict[str, Rows] = {}
    try:
        training = gathering.training(known)
        for prefix, source in spec.data.validations.items() if spec.evaluate else ():
            judged[prefix] = gathering.judging(source, training.prepared)
        flops = None if job.flops is None else job.flops / _planned(spec, training)
        with _predicting(job, spec, group, out) as predictions:
            return train(
                spec,
                training,
                judged,
                control=decided,
                out=out,
                watched=job.watched,
                work=Work(flops, job.peak_flops),
                start=start,
                parts=job.parts,
                group=group,
                predictions=predictions,
            )
    except EndedEarly:
        return End(control.ends_as)
    finally:
        for rows in (training, *judged.values()):
            if rows is not None:
                rows.close()


@contextmanager
def _predicting(
    job: Assignment, spec: TrainJob, group: Group, out: Outputs
) -> Generator[LivePredictions | None]:
    """Return what answers requests for predictions; None: another process does, or none can."""
    if not group.is_first or spec.parallel.why_no_predictions is not None:
        yield None
        return
    with closing(LivePredictions(spec, job.device, out)) as predictions:
        yield predictions


def _without_training(
    job: Assignment,
    spec: InferJob | EvaluateJob | DiagnoseJob,
    control: RunControl,
    out: Outputs,
) -> str:
    if isinstance(spec, DiagnoseJob):
        return _diagnosed(job, spec, control, out)
    if isinstance(spec, EvaluateJob):
        return _evaluated(job, spec, control, out)
    torch.set_float32_matmul_precision("highest")
    if job.checkpoint is None:
        raise SpecFailed("The inference job was handed no checkpoint.")
    table = None if spec.data is None else job.table(spec.data.dataset)
    return infer.run(
        spec,
        job.trained_by,
        Inputs(job.checkpoint, table, job.device),
        control=control,
        out=out if job.rank == 0 else Outputs(out.directory, _ignore),
        group=job.join(),
        stored=job.stored,
    )


def _evaluated(job: Assignment, spec: EvaluateJob, control: RunControl, out: Outputs) -> str:
    if job.checkpoint is None or not isinstance(job.trained_by, TrainJob):
        raise SpecFailed("The evaluation was handed no checkpoint of a training job.")
    be_deterministic(job.trained_by.deterministic)
    torch.set_float32_matmul_precision(job.trained_by.matmul_precision)
    inputs = Inputs(job.checkpoint, job.table(spec.data.dataset), job.device)
    return evaluate.run(spec, job.trained_by, inputs, control=control, out=out)


def _diagnosed(job: Assignment, spec: DiagnoseJob, control: RunControl, out: Outputs) -> str:
    out.flush()
    is_first = job.rank == 0
    out = out if is_first else Outputs(out.directory, _ignore)
    diagnosis = Diagnosis(spec, job.device, control=control, out=out, is_first=is_first)
    return diagnosis.run(lambda: job.join(TIMEOUT))


def _ignore(_record: dict[str, Any]) -> None:
    """Process 0 reports for all."""


def be_deterministic(wanted: bool) -> None:
    """Make torch use operations with the same bits each time, and refuse others.

    cuBLAS reads its setting when CUDA is first used, which happens later.
    """
    if wanted:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(wanted)


def _planned(spec: TrainJob, rows: Rows) -> int:
    """Return the number of rows of the planned batch."""
    wanted = spec.data.bucket_by_length
    name = None if wanted is None else bucket_field(wanted, spec.data.fields)
    longest = None if name is None else rows.longest().get(name)
    return widest_rows(spec.data, rows.num_rows, longest)


def _start(job: Assignment, spec: TrainJob) -> Start | None:
    """Return what training begins with. The job's own checkpoint precedes that of its spec."""
    maps = not {"fsdp", "tensor"}.isdisjoint(spec.parallel.axes)
    if job.resume is not None:
        directory, step = job.resume
        start = Start(checkpoint.read(directory, maps=maps))
        if start.step != step:
            detail = f"The checkpoint is of step {start.step}, not of step {step}."
            raise CheckpointDamaged(detail)
    elif spec.init is None:
        return None
    elif job.checkpoint is None:
        raise SpecFailed("The job was handed no checkpoint to begin with.")
    else:
        start = Start(checkpoint.read(job.checkpoint, maps=maps), spec.init.load, spec.init.missing)
    if start.how != "model":
        _log_differences(start.saved, job.device, job.size)
    return start


def _log_differences(saved: Saved, device: torch.device, processes: int) -> None:
    """Log why the numbers may differ from those of an uninterrupted run."""
    here = {"device": device.type, "threads": torch.get_num_threads(), "torch": torch.__version__}
    before = {**saved.about, "processes": num_processes(saved.about["spec"])}
    for name, mine in {**here, "processes": processes}.items():
        if (theirs := before.get(name)) != mine:
            text = f"resumed with {name} {mine}, and the checkpoint was made with {theirs}: "
            sys.stderr.write(text + "the numbers agree up to rounding, not bit for bit\n")


def main(job_dir: Path, control_fd: int | None = None) -> int:
    """Run ``job.json`` of a directory and write its spool; return the exit code.

    0: an ``end`` record was written, whatever it says. The worker names the failure for any other
    code.
    """
    calm_collector()
    failpoint("rank.begin")
    carry_out(job_dir, control_fd)
    failpoint("rank.end")
    return 0


def carry_out(job_dir: Path, control_fd: int | None = None) -> None:
    """Run ``job.json`` of a directory and write its spool up to the ``end`` record."""
    spool = SpoolWriter(job_dir / "spool")
    control = Lifeline(control_fd, job_dir)
    out = Outputs(job_dir, spool.append, spool.settle, spool.flush)
    number = 0

    def work() -> End:
        nonlocal number
        job = Assignment.read(job_dir / "job.json")
        number = job.rank
        return run(job, control=control, out=out)

    end, failure = attempt(work)
    if failure is not None:
        failure.rank = number
    spool.append(end_record(end, failure))
    spool.close()


def end_record(end: End, failure: RunFailure | None) -> dict[str, Any]:
    """Return the rank's last record."""
    error = None if failure is None else failure.as_dict()
    record = {"type": "end", "at": now(), "state": end.state, "error": error}
    return record if end.reason is None else record | {"reason": end.reason}


def calm_collector() -> None:
    """Make the garbage collector run less often, and exclude the objects of the imports.

    A watched step creates thousands of small objects that live until its end; none is in a cycle.
    With Python's default settings the collector scans them and all objects of the imports again and
    again in a step: with 1,000 watched layers this took as long as the watching itself.
    """
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def attempt(work: Callable[[], End]) -> tuple[End, RunFailure | None]:
    """Run a job; any exception becomes a named failure.

    Standard error, which is the job's log, gets the traceback of an unforeseen failure. For a
    failure that has a name, such as NaN in the loss or a bad row, it gets the message only: our own
    call stack would not help the reader.
    """
    try:
        return work(), None
    except (Exception, SpecProblems) as error:
        failure = classify(error)
        if failure.category in _UNFORESEEN:
            traceback.print_exc()
        else:
            sys.stderr.write("".join(traceback.format_exception_only(cause_of(error))))
        return End("failed"), failure
