"""Run a serve job: load models, answer requests until the job is asked to end."""

import contextlib
import gc
import json
import queue as queues
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.core.spool import now
from engine.inference.blocks import Column
from engine.serving.answers import answered, failed
from engine.serving.drift.watch import DriftWatch
from engine.serving.listener import Listener
from engine.serving.queue import Pending, QueueFull, RequestQueue
from engine.serving.request_log import Answered, RequestRecorder
from engine.serving.served_models import ServedEntry, ServedVersion, VersionName
from engine.serving.traffic import Traffic
from engine.training.control import RunControl
from engine.training.loop import End
from engine.training.report import Outputs
from glasshouse.errors import SpecFailed
from glasshouse.failpoints import failpoint
from glasshouse.spec import ServeJob, Trained, parse_trained
from glasshouse.spec.jobs.serve_job import DEFAULT_IDLE_S, IDLE

MAX_ROWS = 4096
"""The most rows of one request."""
WAIT_S = 0.2
"""How often the job's owner is heard while no request comes."""
DRAIN_S = 20.0
"""The longest that requests in the queue are answered after the job was asked to end."""
SWITCH_INTERVAL_S = 0.0005
"""How long the network thread waits for Python's lock while the other one computes."""


def run(
    job: ServeJob,
    models: Sequence[Mapping[str, Any]],
    listen: Mapping[str, Any],
    device: torch.device,
    *,
    control: RunControl,
    out: Outputs,
) -> End:
    """Serve until the job is asked to end, or no request came for ``idle_s``.

    Args:
        job: the spec.
        models: for each reference its ``model``, ``version``, ``checkpoint``, ``dir`` and
            ``trained_by``; also of ``canary`` and ``shadow``.
        listen: see `Listener.open`.
        device: what computes.
        control: requests to the job.
        out: where records go.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    requests = RequestQueue(job.max_queue, job.max_batch_size, job.max_delay_ms / 1000)
    replica = _Replica(job, requests, listen, device, out)
    replica.load(models)
    gc.collect()
    gc.freeze()  # searching the models for garbage again and again would delay requests
    replica.open()
    if replica.drift is not None:
        replica.drift.start()
    try:
        with torch.inference_mode():
            while not control.cancel_requested and not replica.is_idle:
                replica.turn(control)
            replica.drain()
    finally:
        replica.listener.stop()
        if replica.drift is not None:
            replica.drift.close()
    return End(control.ends_as) if control.cancel_requested else End("paused", IDLE)


def _trained(described: Mapping[str, Any]) -> Trained:
    found = parse_trained(json.dumps(described["trained_by"]))
    if found is None:
        raise SpecFailed(f"{described['reference']!r} is not of a job that trains a network.")
    return found


class _Replica:
    """Answers the requests of a queue."""

    def __init__(
        self,
        job: ServeJob,
        requests: RequestQueue,
        listen: Mapping[str, Any],
        device: torch.device,
        out: Outputs,
    ) -> None:
        self._job, self._requests, self._device, self._out = job, requests, device, out
        self._listen, self._token = listen, secrets.token_urlsafe(32)
        self.listener = Listener(self._token, requests, MAX_ROWS)
        self._traffic = Traffic(out, job.stall_timeout_s)
        self.drift = None if job.drift is None else DriftWatch(job.drift, out, device)
        """Compares served rows with training rows; None: nothing does."""
        self._served: Mapping[str, ServedEntry] = {}
        self._recorder: RequestRecorder | None = None
        if job.request_log is not None:
            self._recorder = RequestRecorder(job.request_log, out.directory, out.emit)
            self.listener.recorder = self._traffic.recorder = self._recorder
        self._loaded: dict[tuple[str, int], ServedVersion] = {}
        self._loading: threading.Thread | None = None
        self._new: queues.SimpleQueue[Mapping[str, ServedEntry]] = queues.SimpleQueue()
        self._seen: Any = None
        self._problem: str | None = None
        """Why versions could not be loaded, until that is reported."""

    def load(self, models: Sequence[Mapping[str, Any]]) -> None:
        """Load versions, and answer requests for their references from the next batch on.

        Raises:
            RunFailure: a model cannot be loaded.
        """
        self._use(self._entries(models))
        self._seen = models

    def open(self) -> None:
        """Listen, and report the address."""
        address = self.listener.open(self._listen)
        reach = {"address": address, "token": self._token}
        self._out.emit({"type": "listening", "at": now(), **reach})
        self._report()
        self._out.flush()
        failpoint("serve.listening")

    @property
    def is_idle(self) -> bool:
        """Whether the replica may stop because no request came.

        Among several replicas the service decides, which knows of all of them.
        """
        idle_s = DEFAULT_IDLE_S if self._job.idle_s is None else self._job.idle_s
        is_only = self._job.replicas.min == 0 and self._job.replicas.max == 1
        return is_only and self._traffic.idle_s > idle_s

    def turn(self, control: RunControl) -> None:
        """Answer the next batch, if one comes soon; then hear what changed."""
        batch = self._requests.take(WAIT_S)
        if batch:
            self._answer(batch)
        if self._recorder is not None:
            self._recorder.work(is_idle=not batch)
        self._traffic.look(len(self._requests), self.listener)
        if self.drift is not None:
            self.drift.settle()
        self._out.settle()
        if not self._new.empty():
            self._use(self._new.get())
            self._report()
        if self._problem is not None:
            self._report()
        if control.models is not None and control.models != self._seen:
            self._load_later(control.models)

    def drain(self) -> None:
        """Answer what is in the queue, and take no more."""
        self.listener.close()
        until = time.monotonic() + DRAIN_S
        while time.monotonic() < until:
            batch = self._requests.take(0.0)
            if not batch:
                break
            self._answer(batch)
        if self._recorder is not None:
            self._recorder.finish()
        self._traffic.end(self.listener)

    def _answer(self, batch: list[Pending]) -> None:
        started = time.monotonic()
        version, asked = batch[0].version, [request.asked for request in batch]
        is_watched = self.drift is not None and all(one.shadows is None for one in batch)
        drift = self.drift if is_watched else None
        sample = None if drift is None else drift.begin(version, asked[0].outputs)
        try:
            found: list[dict[str, Column]] = version.compute(asked, sample)
        except Exception as error:  # one request must not end the service of the others
            self._failed(batch, error)
            return
        answers: list[Callable[[], None]] = []
        recorded: list[Answered] = []
        compute_s = time.monotonic() - started
        for request, columns in zip(batch, found, strict=True):
            if request.shadows is not None:
                self._traffic.compare(request, columns)
                continue
            if request.shadow is not None:
                request.columns = columns
                with contextlib.suppress(QueueFull):
                    self._requests.put(request.shadow)
            queued_s = started - request.arrived
            answers.append(answered(request, columns, queued_s, compute_s))
            self._traffic.count(request, queued_s, compute_s)
            if request.sent is not None and not request.is_cancelled:
                times = {"queue_ms": round(queued_s * 1e3, 3)}
                times["compute_ms"] = round(compute_s * 1e3, 3)
                recorded.append((request.sent, request.asked, columns, times))
        self.listener.send(answers)
        if self._recorder is not None:
            self._recorder.answered(version, recorded)
        took_s = time.monotonic() - started
        self._requests.took(batch, took_s)
        self._traffic.worked(took_s)
        if drift is not None:
            drift.end(version, asked, sample, compute_s)

    def _failed(self, batch: list[Pending], error: Exception) -> None:
        """Compute requests one by one, so that only the one that cannot be computed fails."""
        if len(batch) > 1:
            for request in batch:
                self._answer([request])
            return
        self.listener.send([failed(batch[0], error)])
        self._traffic.failed(batch[0])
        self.listener.record_refusal(batch[0], 500, "prediction_failed")

    # --- models ------------------------------------------------------------------------------

    def _entries(self, models: Sequence[Mapping[str, Any]]) -> dict[str, ServedEntry]:
        """Load the versions that are not in memory yet."""
        loaded: dict[tuple[str, int], ServedVersion] = {}

        def version(described: Mapping[str, Any]) -> ServedVersion:
            key = (str(described["model"]), int(described["version"]))
            if key not in loaded:
                loaded[key] = self._loaded.get(key) or self._load(described)
            return loaded[key]

        entries: dict[str, ServedEntry] = {}
        for described in models:
            parts: dict[str, Any] = {}
            for part in ("canary", "shadow"):
                if (other := described.get(part)) is not None:
                    parts[part] = version(other)
                    parts[f"{part}_share"] = float(other["share"])
            reference = str(described["reference"])
            entries[reference] = ServedEntry(reference, version(described), **parts)
        if self._recorder is not None:
            self._recorder.check(loaded.values())
        return entries

    def _load(self, described: Mapping[str, Any]) -> ServedVersion:
        name = VersionName(
            str(described["model"]),
            int(described["version"]),
            str(described["checkpoint"]),
            Path(described["dir"]),
            {
                dataset: None if directory is None else Path(directory)
                for dataset, directory in (described.get("datasets") or {}).items()
            },
            Path(described["references"]) if described.get("references") else None,
        )
        trained_by = _trained(described)
        version = ServedVersion(name, trained_by, self._device, self._job.max_batch_size)
        version.warm_up()
        return version

    def _use(self, entries: Mapping[str, ServedEntry]) -> None:
        self._served = self.listener.entries = entries
        versions = {one for entry in entries.values() for one in entry.versions}
        self._loaded = {(one.name.model, one.name.version): one for one in versions}
        if self.drift is not None:
            answering = ((entry.current, entry.canary) for entry in entries.values())
            self.drift.use(one for both in answering for one in both if one is not None)
        if self._recorder is not None:
            self._recorder.use(versions)

    def _load_later(self, models: Sequence[Mapping[str, Any]]) -> None:
        """Load other versions in a thread, while requests are answered."""
        if self._loading is not None and self._loading.is_alive():
            return
        self._seen = models

        def load() -> None:
            try:
                with torch.inference_mode():
                    self._new.put(self._entries(models))
            except Exception as error:  # the versions in memory still serve
                traceback.print_exc()
                self._problem = f"{type(error).__name__}: {error}"[:500]

        self._loading = threading.Thread(target=load, name="loading", daemon=True)
        self._loading.start()

    def _report(self) -> None:
        found = [
            {
                "reference": entry.reference,
                "model": entry.current.name.model,
                "version": entry.current.name.version,
                "checkpoints": [one.name.checkpoint for one in entry.versions],
            }
            for entry in self._served.values()
        ]
        problem, self._problem = self._problem, None
        self._out.emit({"type": "serving", "at": now(), "models": found, "problem": problem})
