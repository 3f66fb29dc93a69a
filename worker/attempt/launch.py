"""Starts the ranks of one attempt, each in a directory of its own, and ends all processes."""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from glasshouse import jsonio, processes
from glasshouse.errors import (
    CheckpointMissing,
    CheckpointNotFound,
    DataFailed,
    DeviceFailed,
    DiskFull,
    JobNotFound,
    NotFound,
    StorageFailed,
)
from glasshouse.failpoints import failpoint
from glasshouse.spec.data import sources_in
from glasshouse.spec.parallel import num_processes
from models.database import Transaction
from models.fleet import workers
from models.jobs import attempts, checkpoints, commands, jobs
from models.jobs.needs import Need
from models.observations import outputs, probes
from models.storage import datasets
from models.storage.artifacts import Artifacts
from models.tables import Checkpoint, Device, Job
from worker.attempt import serving
from worker.attempt.captures import NO_SPACE
from worker.attempt.control import CommandDelivery
from worker.attempt.resume import Attempt
from worker.devices.usage import Usage
from worker.processes.fork_server import ForkServerLost, rank_directory
from worker.processes.rank import Rank, RankRegistry
from worker.processes.ranks import Ranks

_log: Any = structlog.get_logger()
_WAIT_S = 1.0
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


class Launch:
    """Starts the ranks of one attempt and ends them."""

    def __init__(self, attempt: Attempt, control: CommandDelivery) -> None:
        self._attempt = attempt
        self._control = control
        self._register = RankRegistry(attempt.context.work)
        self._devices = [str(device["id"]) for device in attempt.job.devices]
        self._ranks: list[Rank] = []
        """All that were forked and not ended yet."""
        self.resumes = False
        """Whether the rank resumes from a checkpoint."""
        self.parts = 1
        """Into how many micro-batches the memory guard splits each batch."""
        self.models: list[dict[str, Any]] = []
        """Of a serve job: the versions that the rank starts with."""
        self.usage: Usage | None = None
        """Measures what the rank uses of its machine."""
        self.is_stuck = False
        """Whether a process of the attempt cannot be ended; then no job gets its devices."""

    def start(
        self,
        ring: str | None,
        meanwhile: Callable[[], None],
        read_end: Callable[[int], dict[str, Any] | None],
    ) -> Ranks:
        """Fork the ranks; call ``meanwhile`` repeatedly while the fork server is not ready.

        ``ring``: the name of the shared memory for whole tensors. ``read_end``: as of `Ranks`.

        Raises:
            ForkServerLost: the fork server died, or the worker stops.
            RunFailure: data of the job is gone, or the work directory cannot be written.
        """
        context = self._attempt.context
        envs = context.with_retries(lambda: self._prepare(ring))
        while not context.fork_server.wait_ready(_WAIT_S):
            meanwhile()
            if context.stopping.is_set():
                raise ForkServerLost("the worker stops")
        for number, env in enumerate(envs):
            failpoint("rank.fork")
            rank = context.fork_server.fork(self._attempt.directory, env, number)
            self._ranks.append(rank)
            failpoint("rank.forked")
            try:
                self._register.note(rank.identity, self._devices)
            except OSError as error:
                raise _unwritable(error) from error
            failpoint("rank.noted")
            _log.info("rank_started", rank=number, pid=rank.identity.pid)
        gpus = [uuid for env in envs for uuid in env["CUDA_VISIBLE_DEVICES"].split(",") if uuid]
        self.usage = Usage([rank.identity.pid for rank in self._ranks], gpus)
        return Ranks(self._ranks, read_end)

    def abandon(self) -> None:
        """Give up on ranks that SIGKILL has not ended; their devices stay withheld."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            if rank.wait(0) is None:
                self._give_up(rank)
                rank.close()
            else:
                self._end(rank)

    def end(self, *, gently: bool = False) -> None:
        """End all processes of the attempt; ``gently``: send SIGTERM before SIGKILL."""
        ranks, self._ranks = self._ranks, []
        if self.usage is not None:
            self.usage.close()
        if gently:
            running = [rank for rank in ranks if rank.wait(0) is None]
            for rank in running:
                rank.signal(signal.SIGTERM)
            for rank in running:
                rank.wait(self._attempt.context.settings.kill_s)
        for rank in ranks:
            rank.signal(signal.SIGKILL)
        for rank in ranks:
            self._end(rank)

    def _end(self, rank: Rank) -> None:
        """Wait for a rank that was killed, and end what it has started."""
        kill_s = self._attempt.context.settings.kill_s
        rank.wait(kill_s)
        rank.close()
        gone = processes.wait_gone(rank.identity, kill_s)
        if gone and processes.kill_orphans(rank.identity, kill_s):
            self._register.forget(rank.identity)
        else:
            self._give_up(rank)

    def _give_up(self, rank: Rank) -> None:
        self.is_stuck = True
        self._register.note(rank.identity, self._devices, is_stuck=True)

    def _prepare(self, ring: str | None) -> list[dict[str, str]]:
        """Write a directory for each rank; return additions to the environment of each."""
        directory = self._attempt.directory
        database = self._attempt.context.database
        serves = self._attempt.job.kind == "serve"
        with database.write() if serves else database.read() as tx:
            described, envs = _describe(tx, self._attempt)
        for number in range(len(envs)):
            group = {"rank": number, "size": len(envs), "store": str(directory / "store")}
            more = {"group": group, "ring": None if number else ring}
            _make_directory(rank_directory(directory, number), described | more)
        self._control.delivered(described)
        self.models = described.get("models") or []
        self.resumes = described["resume"] is not None
        self.parts = described["parts"]
        return envs


def remove(directory: Path) -> None:
    """Remove an attempt's directory, and the job's if it is empty then."""
    failpoint("workplace.remove")
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.parent.rmdir()


def _describe(tx: Transaction, attempt: Attempt) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return the content of ``job.json``, and additions to the environment of each rank.

    Raises:
        DataFailed: something that the job reads is gone.
        DeviceFailed: its devices are gone.
    """
    job, artifacts = attempt.job, attempt.context.artifacts
    spec, init = job.resolved, job.resolved.get("init")
    held = workers.devices_of(tx, job)
    if not held:
        raise DeviceFailed("The job's devices are gone from the worker.")
    saved = _checkpoint(tx, spec)
    start = attempts.start_of(tx, attempt.claim)
    first = None if start is None else start.step
    need = Need.of(job.wants, job.kind)
    try:
        saved_dir = saved and str(artifacts.local(saved.key))
        return {
            "job": job.id,
            "attempt": attempt.claim.attempt,
            "spec": commands.spec_at(tx, job.id, spec, first),
            "datasets": {
                name: {"dir": str(artifacts.local(datasets.get(tx, name, None).key))}
                for name in sorted({part["dataset"] for part in sources_in(spec)})
            },
            "device": {
                "type": held[0].kind,
                "threads": need.num_threads([device.kind for device in held]),
                "peak_flops": peak_flops(held, workers.info_of(tx, held[0].worker)),
            },
            "flops": job.plan.get("flops"),
            "checkpoint": saved and {"dir": saved_dir},
            "commands": commands.to_carry_out(tx, job.id, first),
            "probes": probes.wanted(tx, job.id) if job.kind == "train" else None,
            "resume": start and {"dir": str(artifacts.local(start.key)), "step": start.step},
            "stored": _stored(tx, job, artifacts),
            **_serving(tx, attempt),
            "parts": 2 ** attempts.num_halved(tx, job.id),
            "init": init and {"dir": saved_dir, "load": init["load"]},
            "trained_by": saved and checkpoints.trained(tx, saved),
        }, environments(spec, held)
    except (FileNotFoundError, NotFound) as error:
        raise DataFailed(f"Something that the job reads is gone: {error}") from error


def _serving(tx: Transaction, attempt: Attempt) -> dict[str, Any]:
    """Return what the rank of a serve job serves, and where it listens."""
    job, context = attempt.job, attempt.context
    if job.kind != "serve":
        return {}
    found = serving.models_of(tx, job, context.artifacts)
    models = serving.with_networks(tx, found, context.artifacts)
    serving.hold(tx, job, models)
    return {"models": models, "listen": serving.listen_at(context.settings, attempt.directory)}


def _stored(tx: Transaction, job: Job, artifacts: Artifacts) -> dict[str, str]:
    """Return the files of outputs that earlier attempts of an inference have stored, by name."""
    found: dict[str, str] = {}
    for row in outputs.parts(tx, job.id) if job.kind == "infer" else ():
        with contextlib.suppress(FileNotFoundError):
            found[row.name] = str(artifacts.local(row.key))
    return found


def environments(spec: Mapping[str, Any], held: Sequence[Device]) -> list[dict[str, str]]:
    """Return additions to the environment of each rank: the devices that it sees, in order.

    ``spec``: the resolved spec. ``held``: the devices of the job, by number. Of several ranks each
    sees one device; one rank sees all of them.
    """
    ids: list[int] = spec["devices"].get("ids") or []
    cuda = [device for device in held if device.kind == "cuda"]
    if ids:  # process 0 gets the first one, which is device 0 of its layers
        cuda.sort(key=lambda device: ids.index(device.number))
    uuids = [device.uuid for device in cuda if device.uuid]
    num_ranks = num_processes(spec)
    shares = [uuids[n : n + 1] for n in range(num_ranks)] if num_ranks > 1 else [uuids]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def _checkpoint(tx: Transaction, spec: dict[str, Any]) -> Checkpoint | None:
    """Return the checkpoint that a job runs or evaluates, or starts from, if any."""
    try:
        if spec["kind"] not in ("infer", "evaluate"):
            begins = spec.get("init")
            return None if begins is None else checkpoints.get(tx, begins["checkpoint"], None)
        if spec.get("checkpoint"):
            return checkpoints.get(tx, spec["checkpoint"], None)
        return checkpoints.newest(tx, jobs.get(tx, spec["job"], None))
    except (CheckpointNotFound, CheckpointMissing, JobNotFound) as error:
        raise DataFailed(str(error)) from error


def peak_flops(held: Sequence[Device], info: dict[str, Any]) -> float | None:
    """Return the peak FLOP/s of a job's devices together; None if one is not known.

    Cores beside CUDA devices do not count.
    """
    peak = 0.0
    for device in [one for one in held if one.kind == "cuda"] or held:
        tera = _TERA.get(device.name)
        known = info.get("core_flops") if device.kind == "cpu" else tera and tera * 1e12
        if known is None:
            return None
        peak += known
    return peak


def _make_directory(directory: Path, description: dict[str, Any]) -> None:
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
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> StorageFailed:
    """Return the failure of a job whose worker cannot write; a full disk has its own."""
    failure = DiskFull if error.errno in NO_SPACE else StorageFailed
    reason = os.strerror(error.errno or 0)
    return failure(f"The worker cannot write its work directory: {reason}.")
