"""``python -m engine job.json``: train or infer in a terminal, with no service.

The file is a plain job spec whose datasets are ``digits``, a dataset directory or a data file; or
the ``job.json`` that a worker writes. Progress goes to standard error, final metrics to standard
output. ``--resume out/checkpoints/step-40`` resumes from a checkpoint, bit for bit.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from engine.checkpoint.checkpoint import read_state
from engine.checkpoint.retention import CheckpointRetention
from engine.core.device import visible
from engine.core.problems import SpecProblems
from engine.core.spool import SpoolWriter
from engine.datasets import formats
from engine.plan.plan import parse_spec, plan
from engine.process import rank
from engine.process.hardening import check_torch
from engine.process.rank import Assignment
from engine.training.report import Outputs
from glasshouse import jsonio
from glasshouse.errors import RunFailure
from glasshouse.events import is_upkeep
from glasshouse.spec import KINDS, Checkpoint, Devices, DiagnoseJob, TrainJob, parse_trained
from glasshouse.spec.data import sources_in
from glasshouse.spec.error_messages import problems_in
from glasshouse.spec.labels import text_labels, with_values
from glasshouse.unpickling import seal_pickle

_TELL_S = 0.5
_NO_PROCESSES = "the service starts several processes; here there is one: remove parallel"
_ONE_PROCESS = "halve_batch takes a new process, which the service starts; here choose fail"


class SpecRefused(Exception):
    """The job cannot be run; the message gives the reasons, one line per problem."""


class Interrupt:
    """Stops training at the next step on the first Ctrl-C, ends the process on the second."""

    def __init__(self) -> None:
        self.cancel_requested = False
        self.ends_as = "cancelled"
        self.wanted = None
        self.threads = None
        self.models = None
        self.listen = None
        self.orders: deque[dict[str, Any]] = deque()
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, _signal: int, _frame: Any) -> None:
        self.cancel_requested = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Console:
    """Writes records to the spool and prints some of them."""

    def __init__(self, spool: SpoolWriter, out_dir: Path, keeping: CheckpointRetention) -> None:
        self._spool = spool
        self._out_dir = out_dir
        self._keeping = keeping
        self._told_at = 0.0
        self.final: dict[str, Any] = {}
        self.checkpoint: str | None = None

    def emit(self, record: dict[str, Any]) -> None:
        """Write one record."""
        self._spool.append(record)
        kind = record["type"]
        if kind == "metrics":
            self._metrics(record)
        elif kind == "checkpoint":
            self._keep(record)
            say(f"step {record['step']:>6}  checkpoint {record['dir']}")
        elif kind == "artifact":
            say(f"wrote {record['file']} ({record['size_bytes']} bytes)")
        elif kind == "finding":
            say(f"step {record['step']:>6}  {record['severity']}: {record['message']}")
        elif kind == "result" and "verdict" in record["result"]:
            say(record["result"]["verdict"])
        elif kind == "result" and "metrics" in record["result"]:
            metrics = record["result"]["metrics"].items()
            say("  ".join(f"{name} {value:.4g}" for name, value in metrics))
        elif kind == "dropped":
            say(f"dropped {record['count']}: {record['what']}")

    def _keep(self, record: Mapping[str, Any]) -> None:
        """Delete the checkpoints that the newest one supersedes, as the worker does."""
        self.checkpoint = record["dir"]
        for name in self._keeping.superseded(record["dir"], record["metrics"]):
            shutil.rmtree(self._out_dir / name, ignore_errors=True)

    def _metrics(self, record: Mapping[str, Any]) -> None:
        if all(is_upkeep(name) for name in record["values"]):
            return
        self.final.update(record["values"])
        is_evaluation = any(name.startswith("validation/") for name in record["values"])
        if is_evaluation or time.monotonic() - self._told_at >= _TELL_S:
            self._told_at = time.monotonic()
            figures = "  ".join(f"{name} {value:.4g}" for name, value in record["values"].items())
            say(f"step {record['step']:>6}  epoch {record['epoch']:>3}  {figures}")


def say(text: str) -> None:
    """Print a line for the user."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _ingest(dataset: str, out: Path) -> Path:
    """Return the dataset directory of a name or path; a file is read by the reader process."""
    path = Path(dataset)
    if (path / "meta.json").is_file():
        return path
    command = [sys.executable, "-m", "engine.datasets.ingest", "--out", str(out)]
    if path.is_file():
        form = formats.inferred(path.name)
        if form is None:
            known = ", ".join(
                suffix for one in formats.formats().values() for suffix in one.suffixes
            )
            raise SpecRefused(f"{dataset}: the format is not known by its name; known: {known}")
        command += ["--format", form, "--source", str(path)]
    else:
        command += ["--builtin", dataset]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a list
    try:
        answer = json.loads(finished.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise SpecRefused(f"{dataset} could not be read:\n{finished.stderr[-2000:]}") from None
    if not answer["ok"]:
        raise SpecRefused(f"{dataset}: {answer['problem']['detail']}")
    return out


def _datasets(spec: Mapping[str, Any], scratch: Path) -> dict[str, dict[str, str]]:
    names = {item["dataset"] for item in sources_in(spec)}
    found: dict[str, dict[str, str]] = {}
    for number, name in enumerate(sorted(names)):
        directory = _ingest(name, scratch / f"dataset-{number}")
        found[name] = {"dir": str(directory.resolve())}
    return found


def prepare(spec: dict[str, Any], scratch: Path, checkpoint: Path | None) -> dict[str, Any]:
    """Plan a plain spec and convert it to the ``job.json`` that a worker would write.

    Raises:
        SpecRefused: the spec or its data cannot be used.
    """
    begins = spec.get("init")
    if checkpoint is None and isinstance(begins, Mapping) and "checkpoint" in begins:
        checkpoint = Path(str(begins["checkpoint"]))
    trained_by = None if checkpoint is None else read_state(checkpoint)["spec"]
    datasets = _datasets(spec, scratch)
    metas = {
        name: jsonio.loads((Path(item["dir"]) / "meta.json").read_bytes())
        for name, item in datasets.items()
    }
    try:
        parsed = parse_spec(spec)
        if isinstance(parsed, TrainJob):
            _add_labels(parsed, metas, datasets)
        trained = None if trained_by is None else parse_trained(json.dumps(trained_by))
        found = plan(parsed, metas, trained)
    except SpecProblems as error:
        raise SpecRefused("\n".join(f"{p.pointer}: {p.detail}" for p in error.problems)) from None
    except pydantic.ValidationError as error:
        told = problems_in(error.errors(include_url=False), spec, *KINDS)
        raise SpecRefused("\n".join(f"{p.pointer}: {p.detail}" for p in told)) from None
    if isinstance(parsed, TrainJob) and parsed.guards.memory.on_oom != "fail":
        raise SpecRefused(f"/guards/memory/on_oom: {_ONE_PROCESS}")
    if isinstance(parsed, TrainJob | DiagnoseJob) and parsed.processes > 1:
        raise SpecRefused(f"/parallel/processes: {_NO_PROCESSES}")
    for warning in found["warnings"]:
        say(f"warning: {warning['pointer']}: {warning['detail']}")
    return {
        "job": "job",
        "attempt": 1,
        "spec": found["spec"],
        "datasets": datasets,
        "device": _device(parsed.devices),
        "flops": found["flops"],
        "checkpoint": None if checkpoint is None else {"dir": str(checkpoint.resolve())},
        "trained_by": trained_by,
    }


def _add_labels(
    spec: TrainJob, metas: dict[str, Any], datasets: Mapping[str, Mapping[str, str]]
) -> None:
    """Add the texts of label columns to the descriptions of datasets."""
    for name, meta in metas.items():
        labels = text_labels(spec.data.fields, meta["columns"])
        if labels:
            stats = jsonio.loads((Path(datasets[name]["dir"]) / "stats.json").read_bytes())
            meta["columns"] = with_values(meta["columns"], stats, labels)


def _device(wanted: Devices) -> dict[str, Any]:
    """Return the device of this machine that the spec asks for, by the service's rules.

    Raises:
        SpecRefused: the spec names a worker, which does not exist here.
    """
    if wanted.worker is not None:
        raise SpecRefused("/devices/worker: there are no workers without the service; leave it out")
    if wanted.ids is not None:  # read when CUDA is initialized, which has not happened yet
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, wanted.ids))
    kinds = {one.type for one in visible()} if wanted.type == "auto" else {wanted.type}
    if "cuda" in kinds:
        return {"type": "cuda", "threads": wanted.threads}
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {"type": "cpu", "threads": wanted.threads or num_cores}


def run(job: Path, out_dir: Path, checkpoint: Path | None, resume: Path | None = None) -> int:
    """Run a job file in this process; return the exit code."""
    raw: dict[str, Any] = jsonio.loads(job.read_bytes())
    out_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="engine-"))
    try:
        assignment = raw if "spec" in raw else prepare(raw, scratch, checkpoint)
        if resume is not None:
            assignment = assignment | {"resume": _position(resume)}
        if assignment is not raw:
            job = out_dir / "job.json"
            job.write_text(json.dumps(assignment))
        return _run_assignment(out_dir, job)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _position(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint to resume from as ``job.json`` names it."""
    step = read_state(checkpoint)["step"]
    return {"dir": str(checkpoint.resolve()), "step": step}


def _run_assignment(out_dir: Path, job: Path) -> int:
    (out_dir / "spool").unlink(missing_ok=True)
    spool = SpoolWriter(out_dir / "spool")
    console = Console(spool, out_dir, CheckpointRetention(_saving(job)))
    out = Outputs(out_dir, console.emit, spool.settle, spool.flush)
    control = Interrupt()
    end, failure = rank.attempt(lambda: rank.run(Assignment.read(job), control=control, out=out))
    spool.append(rank.end_record(end, failure))
    spool.close()
    if end.reason is not None:
        say(end.reason)
    if failure is not None:
        say(f"failed: {failure.detail}" + (f" (layer {failure.layer})" if failure.layer else ""))
    summary = {"state": end.state, "metrics": console.final, "out": str(out_dir)}
    sys.stdout.write(jsonio.dumps(summary) + "\n")
    return {"succeeded": 0, "cancelled": 7}.get(end.state, 3)


def _saving(job: Path) -> Checkpoint:
    """Return the checkpoint settings of the spec; an inference has a checkpoint id there."""
    said = jsonio.loads(job.read_bytes())["spec"].get("checkpoint")
    return Checkpoint.model_validate(said) if isinstance(said, dict) else Checkpoint()


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m engine", description=__doc__)
    parser.add_argument("job", type=Path, help="a job spec, or a worker's job.json")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where results go")
    parser.add_argument("--checkpoint", type=Path, help="for inference: a checkpoint's directory")
    parser.add_argument("--resume", type=Path, help="a checkpoint's directory to train on from")
    given = parser.parse_args()
    try:
        return run(given.job, given.out, given.checkpoint, given.resume)
    except (SpecRefused, RunFailure, OSError, ValueError) as error:
        say(f"refused: {error}")
        return 2


if __name__ == "__main__":
    check_torch()
    seal_pickle()
    sys.exit(main())
