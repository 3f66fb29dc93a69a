"""Creates the directory of an attempt before its rank starts, and removes it afterwards."""

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from glasshouse import jsonio
from glasshouse.errors import (
    CheckpointMissing,
    CheckpointNotFound,
    DataFailed,
    DatasetNotFound,
    DeviceFailed,
    DiskFull,
    JobNotFound,
    StorageFailed,
)
from glasshouse.failpoints import failpoint
from glasshouse.spec.data import sources_in
from models.database import Transaction
from models.fleet import workers
from models.jobs import attempts, checkpoints, commands, jobs
from models.jobs.leases import Claim
from models.observations import probes
from models.storage import datasets
from models.storage.artifacts import Artifacts
from models.tables import Checkpoint, Device, Job
from worker.attempt.captures import NO_SPACE

_log: Any = structlog.get_logger()
_TERA = {
    "NVIDIA H200": 66.9,
    "NVIDIA H100 80GB HBM3": 66.9,
    "NVIDIA H100 PCIe": 51.2,
    "NVIDIA A100-SXM4-40GB": 19.5,
    "NVIDIA A100-SXM4-80GB": 19.5,
    "NVIDIA A100-PCIE-40GB": 19.5,
    "NVIDIA A100 80GB PCIe": 19.5,
    "NVIDIA A40": 37.4,
    "NVIDIA A30": 10.3,
    "NVIDIA A10": 31.2,
    "NVIDIA L40S": 91.6,
    "NVIDIA L40": 90.5,
    "NVIDIA L4": 30.3,
    "NVIDIA GeForce RTX 4090": 82.6,
    "NVIDIA GeForce RTX 3090": 35.6,
    "Tesla T4": 8.1,
    "Tesla V100-SXM2-16GB": 15.7,
    "Tesla V100-SXM2-32GB": 15.7,
    "Tesla V100-PCIE-16GB": 14.0,
    "Tesla V100-PCIE-32GB": 14.0,
}
"""Peak TFLOP/s of CUDA devices from the data sheets, float32 without tensor cores."""


def describe(
    tx: Transaction, artifacts: Artifacts, claim: Claim, job: Job
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the content of ``job.json``, and additions to the rank's environment.

    Raises:
        DataFailed: something that the job reads is gone.
        DeviceFailed: its devices are gone.
    """
    spec = job.resolved
    held = workers.devices_of(tx, job)
    if not held:
        raise DeviceFailed("The job's devices are gone from the worker.")
    saved = _checkpoint(tx, spec)
    try:
        resume = _resume(tx, artifacts, claim)
        first = None if resume is None else resume["step"]
        return {
            "job": job.id,
            "attempt": claim.attempt,
            "spec": commands.spec_at(tx, job.id, spec, first),
            "datasets": {
                name: {"dir": str(artifacts.local(datasets.get(tx, name, None).key))}
                for name in sorted(_datasets(spec))
            },
            "device": _device(held, workers.info_of(tx, held[0].worker)),
            "flops": job.plan.get("flops"),
            "checkpoint": saved and {"dir": str(artifacts.local(saved.key))},
            "commands": commands.to_carry_out(tx, job.id, first),
            "probes": probes.wanted(tx, job.id) if job.kind == "train" else None,
            "resume": resume,
            "parts": 2 ** attempts.num_halved(tx, job.id),
            "init": _start(tx, artifacts, spec),
            "trained_by": saved and checkpoints.trained(tx, saved),
        }, {"CUDA_VISIBLE_DEVICES": _visible(held)}
    except (FileNotFoundError, DatasetNotFound, JobNotFound) as error:
        raise DataFailed(f"Something that the job reads is gone: {error}") from error


def prepare(directory: Path, description: dict[str, Any]) -> None:
    """Create an attempt's directory.

    Raises:
        StorageFailed: it cannot be written; DiskFull if the disk is full.
    """
    try:
        shutil.rmtree(directory, ignore_errors=True)
        failpoint("workplace.make")
        for part in (".", "logs", "captures", "checkpoints", "artifacts"):
            (directory / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "job.json").write_text(jsonio.dumps(description))
        failpoint("workplace.made")
    except OSError as error:
        raise unwritable(error) from error


def unwritable(error: OSError) -> StorageFailed:
    """Return the failure of a job whose worker cannot write; a full disk has its own."""
    failure = DiskFull if error.errno in NO_SPACE else StorageFailed
    reason = os.strerror(error.errno or 0)
    return failure(f"The worker cannot write its work directory: {reason}.")


def remove(directory: Path) -> None:
    """Remove an attempt's directory, and the job's if it is empty then."""
    failpoint("workplace.remove")
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.parent.rmdir()


def _datasets(spec: dict[str, Any]) -> set[str]:
    return {part["dataset"] for part in sources_in(spec)}


def _checkpoint(tx: Transaction, spec: dict[str, Any]) -> Checkpoint | None:
    """Return the checkpoint that inference runs or that training starts from, if any."""
    try:
        if spec["kind"] != "infer":
            begins = spec.get("init")
            return None if begins is None else checkpoints.get(tx, begins["checkpoint"], None)
        if spec.get("checkpoint"):
            return checkpoints.get(tx, spec["checkpoint"], None)
        return checkpoints.newest(tx, jobs.get(tx, spec["job"], None))
    except (CheckpointNotFound, CheckpointMissing, JobNotFound) as error:
        raise DataFailed(str(error)) from error


def _start(tx: Transaction, artifacts: Artifacts, spec: dict[str, Any]) -> dict[str, Any] | None:
    """Return the spec's initial weights; None if they are drawn from the seed."""
    init: dict[str, Any] | None = spec.get("init")
    if init is None:
        return None
    try:
        saved = checkpoints.get(tx, init["checkpoint"], None)
    except CheckpointNotFound as error:
        raise DataFailed(f"Something that the job reads is gone: {error}") from error
    return {"dir": str(artifacts.local(saved.key)), "load": init["load"]}


def _resume(tx: Transaction, artifacts: Artifacts, claim: Claim) -> dict[str, Any] | None:
    """Return the checkpoint to resume from and its step; None: from scratch."""
    start = attempts.start_of(tx, claim)
    if start is None:
        return None
    return {"dir": str(artifacts.local(start.key)), "step": start.step}


def _device(held: list[Device], info: dict[str, Any]) -> dict[str, Any]:
    cores = sum(device.kind == "cpu" for device in held)
    peak = peak_flops(held, info)
    return {"type": held[0].kind, "threads": max(1, cores), "peak_flops": peak}


def _visible(held: list[Device]) -> str:
    return ",".join(device.uuid for device in held if device.kind == "cuda" and device.uuid)


def peak_flops(held: Sequence[Device], info: dict[str, Any]) -> float | None:
    """Return the peak FLOP/s of a job's devices together; None if one is not known."""
    each = [
        info.get("core_flops") if device.kind == "cpu" else _cuda(device.name) for device in held
    ]
    known = [flops for flops in each if flops is not None]
    return sum(known) if len(known) == len(each) else None


def _cuda(name: str) -> float | None:
    tera = _TERA.get(name)
    return None if tera is None else tera * 1e12
