"""Records requests to served models for the request log.

Answers come first: the threads that read and answer requests only note what is to be recorded, and
the main thread converts it between two batches, for at most a share of its time. What exceeds that
is skipped and counted. Records go to files of the attempt's directory, which the worker deletes
once they are in the database; while too many are left, further requests are skipped.
"""

import os
import random
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from engine.core.spool import now
from engine.inference.blocks import Column
from engine.serving.asked import Asked
from engine.serving.recorded_values import Kept, as_json, kept_outputs, output_values, sent_values
from engine.serving.redaction import Redaction, problems_of
from engine.serving.served_models import ServedNetwork
from glasshouse.errors import SpecFailed
from glasshouse.ids import new_id
from glasshouse.spec import RequestLog

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
MAX_SHARE = 0.01
"""The most of the time that is spent on recording."""
_BURST_S = 0.1
"""After a pause so much may be spent at once, in parts of ``_SLICE_S``."""
_SLICE_S = 0.001
_IDLE_SLICE_S = 0.005
_EVERY_S = 0.05
_WRITE_S = 0.2
"""How long records may stay in memory."""
_WRITE_BYTES = 256 * 1024
_MAX_ASKED = 100
"""The most outputs of a request that are named."""
MAX_WAITING = 256
"""The most requests that wait to be converted."""
MAX_WAITING_BYTES = 4 * 2**20
"""The most bytes in memory, and the most in files that are not in the database yet."""
END_S = 1.0
"""The longest that recording may delay the end of a replica."""


@dataclass(eq=False, slots=True)
class SentRequest:
    """A request that is to be recorded."""

    head: Mapping[str, Any]
    body: bytes | None
    """None: it is too large, or inputs are not recorded."""
    is_too_large: bool
    arrived_at: str = field(default_factory=now)


Answered = tuple[SentRequest, Asked, Mapping[str, Column], Mapping[str, float]]
"""A request, its outputs by ``<layer>/<field>``, and its times in milliseconds."""


@dataclass(eq=False, slots=True)
class _Finished:
    """A request with its outcome, not yet converted."""

    sent: SentRequest
    version: ServedNetwork
    status: int
    code: str | None = None
    asked: Asked | None = None
    outputs: dict[str, Kept] | None = None
    timing: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def num_bytes(self) -> int:
        """Roughly the memory that it takes."""
        kept = (one for one in (self.outputs or {}).values() if isinstance(one, Column))
        body = 0 if self.sent.body is None else len(self.sent.body)
        return body + sum(one.values.nbytes for one in kept)


class RequestRecorder:
    """Records the requests of one replica.

    `draw` and `refused` may be called by any thread, the other methods by the main thread only.
    """

    def __init__(
        self,
        spec: RequestLog,
        directory: Path,
        emit: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``directory``: the attempt's. ``emit``: reports each file of records."""
        self._spec, self._directory, self._emit, self.clock = spec, directory, emit, clock
        self._random = random.Random()  # noqa: S311 (a share of the requests)
        self._lock = threading.Lock()
        self._finished: deque[_Finished] = deque()
        self._finished_bytes = 0
        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._files: deque[tuple[Path, int]] = deque()
        self._num_files = self._last_ms = 0
        self._redactions: dict[ServedNetwork, Redaction] = {}
        self._credit_s = _BURST_S
        self._credited_at = self._wrote_at = self._converted_at = clock()
        self.num_recorded = self.num_skipped = 0

    @property
    def counts(self) -> dict[str, int]:
        """How many requests were recorded, and how many were not because there was no time."""
        return {"recorded": self.num_recorded, "skipped": self.num_skipped}

    def check(self, versions: Iterable[ServedNetwork]) -> None:
        """Check that each entry of ``redact`` matches a field or column of a version.

        Raises:
            SpecFailed: one does not; its values would be recorded.
        """
        problems = problems_of(self._spec, [one.inputs.trained_by for one in versions])
        if problems:
            raise SpecFailed(f"{problems[0][0]}: {problems[0][1]}"[:1000])

    def use(self, versions: Iterable[ServedNetwork]) -> None:
        """Note the versions that answer from now on."""
        self._redactions = {one: self._redaction(one) for one in versions}

    def draw(self, head: Mapping[str, Any], body: bytes) -> SentRequest | None:
        """Decide whether a request that has arrived is recorded; None: it is not."""
        if self._spec.share < 1 and self._random.random() >= self._spec.share:
            return None
        if self._is_full:
            self.num_skipped += 1
            return None
        is_too_large = self._spec.inputs and len(body) > self._spec.max_request_bytes
        kept = body if self._spec.inputs and not is_too_large else None
        return SentRequest(head, kept, is_too_large)

    def refused(
        self,
        sent: SentRequest,
        version: ServedNetwork,
        status: int,
        code: str,
        asked: Asked | None = None,
    ) -> None:
        """Note that a request was answered with an error; its values are not recorded."""
        sent.body = None
        self._add(_Finished(sent, version, status, code, asked))

    def answered(self, version: ServedNetwork, answers: Iterable[Answered]) -> None:
        """Note the answers of a batch that a version computed."""
        for sent, asked, columns, timing in answers:
            outputs = None
            if self._spec.outputs and not self._is_full:
                outputs = kept_outputs(columns, self._spec.max_request_bytes)
            self._add(_Finished(sent, version, 200, None, asked, outputs, timing))

    def work(self, *, is_idle: bool) -> None:
        """Convert what waits as far as the time allows, and write it from time to time.

        ``is_idle``: no request waits for an answer.
        """
        if not self._finished and not self._lines:
            return
        at = self.clock()
        if self._finished and (is_idle or at - self._converted_at >= _EVERY_S):
            self._credit_s = min(_BURST_S, self._credit_s + MAX_SHARE * (at - self._credited_at))
            self._credited_at = self._converted_at = at
            if self._credit_s > 0:
                self._convert(at + (_IDLE_SLICE_S if is_idle else _SLICE_S))
        is_due = at - self._wrote_at >= _WRITE_S or self._lines_bytes >= _WRITE_BYTES
        if self._lines and is_due:
            self._write()
        self._credit_s -= self.clock() - at

    def finish(self) -> None:
        """Convert and write what waits, at the end of the replica."""
        self._convert(self.clock() + END_S)
        with self._lock:
            self.num_skipped += len(self._finished)
            self._finished.clear()
        if self._lines:
            self._write()

    @property
    def _is_full(self) -> bool:
        return len(self._finished) >= MAX_WAITING or self._finished_bytes >= MAX_WAITING_BYTES

    def _redaction(self, version: ServedNetwork) -> Redaction:
        found = self._redactions.get(version)
        return version.redaction(self._spec.redact) if found is None else found

    def _add(self, finished: _Finished) -> None:
        with self._lock:
            if self._is_full:
                self.num_skipped += 1
                return
            self._finished_bytes += finished.num_bytes
            self._finished.append(finished)

    def _convert(self, until: float) -> None:
        while self._finished:
            with self._lock:
                finished = self._finished.popleft()
                self._finished_bytes -= finished.num_bytes
            try:
                line = orjson.dumps(self._record(finished))
            except Exception as error:  # must not end the service
                # without the message, which may quote a value that is redacted
                sys.stderr.write(f"request log: {type(error).__name__}\n")
                traceback.print_tb(error.__traceback__)
                self.num_skipped += 1
            else:
                self._lines.append(line)
                self._lines_bytes += len(line)
            if self.clock() >= until:
                break

    def _write(self) -> None:
        """Write records to a file and report it; skip them if too many are not stored yet."""
        lines, size = self._lines, self._lines_bytes + len(self._lines)
        self._lines, self._lines_bytes, self._wrote_at = [], 0, self.clock()
        while self._files and not self._files[0][0].exists():
            self._files.popleft()
        if sum(one for _, one in self._files) + size > MAX_WAITING_BYTES and self._files:
            self.num_skipped += len(lines)
            return
        path = self._directory / f"requests-{self._num_files}.jsonl"
        content = b"\n".join(lines)
        try:
            with open(os.open(path, _NEW_FILE, 0o600), "wb") as file:
                file.write(content)
        except OSError:  # a full disk is no reason to stop answering
            path.unlink(missing_ok=True)
            self.num_skipped += len(lines)
            return
        self._num_files += 1
        self._files.append((path, size))
        self.num_recorded += len(lines)
        checksum = zlib.crc32(content)
        found = {"file": path.name, "count": len(lines), "crc32": checksum}
        self._emit({"type": "requests", "at": now(), **found})

    def _new_id(self) -> str:
        """Return an id that sorts after all earlier ones, also within a millisecond."""
        self._last_ms = max(time.time_ns() // 1_000_000, self._last_ms + 1)
        return new_id("rec", at_ms=self._last_ms)

    def _record(self, finished: _Finished) -> dict[str, Any]:
        """Return a request as it is stored: what is searched for, and the rest as JSON."""
        sent, asked, version = finished.sent, finished.asked, finished.version
        values: dict[str, bytes] = {}
        redacted: list[str] = []
        too_large = ["inputs"] if sent.is_too_large else []
        form = None
        if asked is not None:
            inputs, redaction = version.inputs, self._redaction(version)
            if sent.body is not None:
                found = sent_values(sent.head, sent.body, asked, inputs, redaction)
                form, redacted = found.form, found.redacted
                values["inputs"] = as_json(found.values)
            if finished.outputs is not None:
                outputs, others = output_values(finished.outputs, inputs, redaction)
                redacted = redacted + others
                values["outputs"] = as_json(outputs)
        for part in [*values]:
            if len(values[part]) > self._spec.max_request_bytes:
                too_large.append(part)
                del values[part]
        details = {
            "reference": str(sent.head.get("reference")),
            "request_id": sent.head.get("request_id"),
            "num_rows": None if asked is None else asked.num_rows,
            "asked": None if asked is None else asked.outputs[:_MAX_ASKED],
            "queue_ms": finished.timing.get("queue_ms"),
            "compute_ms": finished.timing.get("compute_ms"),
            "form": form,
            "inputs": orjson.Fragment(values.get("inputs", b"null")),
            "outputs": orjson.Fragment(values.get("outputs", b"null")),
            "redacted": redacted,
            "too_large": too_large,
        }
        return {
            "id": self._new_id(),
            "at": sent.arrived_at,
            "model": str(version.origin["model"]),
            "version": int(version.origin["version"]),
            "status": finished.status,
            "code": finished.code,
            "details": orjson.dumps(details).decode(),
        }
