"""Reads uploaded files, each in a short-lived process of its own with limits.

A pending dataset waits in the database until a worker claims it. The claim is a lease with a
fence, like that of an attempt: if the worker is lost, another reads the file again, and a worker
that is too late changes nothing. A file may be hostile, so this process never parses it.
"""

import contextlib
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from glasshouse import jsonio
from models.database import Transaction
from models.storage import datasets
from models.storage.datasets import Reading
from worker.context import AWAY, Every, WorkerContext
from worker.processes.fork_server import environment

NUM_AT_ONCE = 2
"""How many files one worker reads at the same time."""
MAX_TRIES = 5
_SLACK_S = 60.0
_log: Any = structlog.get_logger("glasshouse.worker.reading")


class Readers:
    """The threads that read pending datasets until ``close``.

    What an earlier process of this worker left is removed.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._settings = context.settings
        self._database = context.database
        self._artifacts = context.artifacts
        self._work = context.work / "reading"
        self._stopping = threading.Event()
        self._threads: list[Every] = []
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(mode=0o700, parents=True)

    def start(self) -> None:
        """Start the threads."""
        for number in range(NUM_AT_ONCE):
            thread = Every(self._settings.sweep_s, self._read_all, f"reader-{number}")
            self._threads.append(thread)

    def wake(self) -> None:
        """Check for datasets now: one was created."""
        for thread in self._threads:
            thread.wake()

    def close(self) -> None:
        """Stop reading. Datasets that are being read become pending at once, for another worker."""
        self._stopping.set()
        for thread in self._threads:
            thread.end(timeout_s=None)

    def read_one(self) -> bool:
        """Read the dataset that has waited longest; return False if there is none."""
        with self._database.read() as tx:
            if not datasets.is_unread(tx):
                return False
        with self._database.write() as tx:
            reading = datasets.claim(tx, self._context.name, lease_ms=self._context.lease_ms)
        if reading is None:
            return False
        self._read(reading)
        return True

    def _read_all(self) -> None:
        while not self._stopping.is_set() and self.read_one():
            pass

    def _read(self, reading: Reading) -> None:
        out = self._work / f"{reading.dataset}-{secrets.token_hex(4)}"
        try:
            answer = self._answer(reading, out)
            if answer is not None:
                self._settle(reading, out, answer)
            elif self._stopping.is_set():
                with self._database.write() as tx:
                    datasets.give_back(tx, reading)
        finally:
            for left in (out, *out.parent.glob(f"{out.name}.*")):
                shutil.rmtree(left, ignore_errors=True)

    def _answer(self, reading: Reading, out: Path) -> dict[str, Any] | None:
        """Return what the process printed; None if the claim is lost or the worker stops."""
        if reading.tries > MAX_TRIES:
            return _problem(f"Reading the file was interrupted {MAX_TRIES} times; upload it again.")
        try:
            command = self._command(reading, out)
        except FileNotFoundError:
            return _problem("The uploaded file is gone; upload it again.")
        with subprocess.Popen(  # noqa: S603 (our own command; the file's name is an id)
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environment({}),
        ) as process:
            try:
                return self._wait(process, reading)
            finally:
                process.kill()  # does nothing if it has ended

    def _command(self, reading: Reading, out: Path) -> list[str]:
        settings = self._settings
        if reading.builtin is not None:
            what = ["--builtin", reading.builtin]
        else:
            source = self._artifacts.local(datasets.source_key(reading.dataset))
            what = ["--format", reading.format, "--source", str(source)]
            what += [] if reading.resize is None else ["--resize", reading.resize]
            if reading.header is not None:
                what += ["--header" if reading.header else "--no-header"]
        return [
            *(sys.executable, "-m", "engine.datasets.ingest", *what, "--out", str(out)),
            *("--max-memory-bytes", str(settings.ingest_memory_bytes)),
            *("--max-cpu-s", str(settings.ingest_cpu_s)),
            *("--max-out-bytes", str(settings.max_upload_bytes)),
        ]

    def _wait(self, process: "subprocess.Popen[bytes]", reading: Reading) -> dict[str, Any] | None:
        """Wait for the process, and renew the lease while it runs."""
        limit_s = self._settings.ingest_cpu_s + _SLACK_S
        began = renewed = time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                printed, _ = process.communicate(timeout=0.1)
                return _parsed(printed, process.returncode)
            now = time.monotonic()
            if self._stopping.is_set():
                return None
            if now - began > limit_s:
                return _problem(f"The file took longer than {limit_s:g} s to read.")
            if now - renewed > self._settings.lease_s / 3:
                renewed = now
                if not self._renewed(reading):
                    return None

    def _renewed(self, reading: Reading) -> bool:
        """Renew the lease; return whether we hold it. While the database is unavailable, we do."""
        try:
            with self._database.write() as tx:
                return datasets.renew(tx, reading, lease_ms=self._context.lease_ms)
        except AWAY as error:
            _log.warning("database_unavailable", dataset=reading.dataset, error=str(error))
            return True

    def _settle(self, reading: Reading, out: Path, answer: dict[str, Any]) -> None:
        is_ok = bool(answer.get("ok"))
        if is_ok:
            kept = self._keep(reading, out, answer["meta"])
        else:
            kept = self._write(lambda tx: datasets.unreadable(tx, reading, answer["problem"]))
        if kept:
            self._artifacts.delete(datasets.source_key(reading.dataset))
        _log.info("dataset_read", dataset=reading.dataset, ok=is_ok, kept=kept)
        self._context.notifier.job_changed(reading.dataset)

    def _keep(self, reading: Reading, out: Path, meta: dict[str, Any]) -> bool:
        """Store the columns. Each try has its own key, which is deleted if the try is too late."""
        key = f"datasets/{reading.dataset}/{secrets.token_hex(4)}"
        self._artifacts.put(key, out)
        found: dict[str, Any] = {
            "columns": [
                {name: value for name, value in column.items() if name != "file"}
                for column in meta["columns"]
            ],
            "splits": meta["splits"],
            "notes": meta.get("notes"),
        }
        # if it raises, the row may name the files or not
        kept = self._write(lambda tx: datasets.read(tx, reading, key=key, **found))
        others = [entry.key for entry in self._artifacts.entries(f"datasets/{reading.dataset}")]
        for other in [other for other in others if other != key] if kept else [key]:
            self._artifacts.delete(other)  # of a try that died between its files and its row
        return kept

    def _write(self, act: Callable[[Transaction], bool]) -> bool:
        def write() -> bool:
            with self._database.write() as tx:
                return act(tx)

        return self._context.with_retries(write, patience_s=0)


def _parsed(printed: bytes, code: int) -> dict[str, Any]:
    """Return what the process printed, or the problem if it printed no answer."""
    try:
        return jsonio.loads(printed.splitlines()[-1])
    except (ValueError, IndexError):
        _log.warning("ingest_died", code=code)
        return _problem(
            "The process that reads the file ended before it was done; the file may need more "
            "memory or time than is allowed."
        )


def _problem(detail: str) -> dict[str, Any]:
    return {"ok": False, "problem": {"code": "invalid_dataset", "detail": detail}}
