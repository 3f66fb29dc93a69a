"""Reading uploaded files: each in a short-lived process of its own, with limits.

A file may be hostile, so nothing of it is parsed in this process. Work lost with a process of
the API is found again by its rows, which stay pending.
"""

import asyncio
import contextlib
import secrets
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from starlette.concurrency import run_in_threadpool

from api.children import clean_environment
from api.turns import Turns
from glasshouse import jsonio
from glasshouse.errors import DatabaseUnavailable
from models import datasets
from models.artifacts import Artifacts
from models.database import Database
from models.settings import Settings
from models.tables import Dataset

NUM_AT_ONCE = 2
BUILTIN = "builtin:"
"""The format of a dataset that has no file."""
_SLACK_S = 60.0
_RETRY_S = 2.0
_log: Any = structlog.get_logger("glasshouse.api.ingest")


class Ingest:
    """The bounded pool of processes that read files."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        artifacts: Artifacts,
        wake: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._database = database
        self._artifacts = artifacts
        self._wake = wake
        self._slots = asyncio.Semaphore(NUM_AT_ONCE)
        self._turns = Turns(NUM_AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def resume(self) -> None:
        """Read what an earlier process left unread."""
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                for dataset in await run_in_threadpool(self._pending):
                    self.add(dataset)
                return
            await asyncio.sleep(_RETRY_S)

    def add(self, dataset: Dataset) -> None:
        """Have a pending dataset read. On the event loop's thread."""
        if dataset.id not in self._tasks:
            task = asyncio.create_task(self._read(dataset))
            self._tasks[dataset.id] = task
            task.add_done_callback(lambda _: self._tasks.pop(dataset.id, None))

    async def close(self) -> None:
        """Stop reading; what is unread stays pending."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _pending(self) -> list[Dataset]:
        with self._database.read() as tx:
            return datasets.pending(tx)

    async def _read(self, dataset: Dataset) -> None:
        async with self._turns.of(dataset.owner), self._slots:
            out = self._settings.work / "ingest" / f"{dataset.id}-{secrets.token_hex(4)}"
            await run_in_threadpool(out.parent.mkdir, mode=0o700, parents=True, exist_ok=True)
            try:
                answer = await self._run(dataset, out)
                await self._settle(dataset, out, answer)
            except Exception:
                _log.exception("ingest_failed", dataset=dataset.id)
                await self._settle(dataset, out, _problem("The service failed to read the file."))
            finally:
                await run_in_threadpool(_remove, out)
        self._wake(dataset.id)

    async def _run(self, dataset: Dataset, out: Path) -> dict[str, Any]:
        settings = self._settings
        if dataset.format.startswith(BUILTIN):
            what = ["--builtin", dataset.format.removeprefix(BUILTIN)]
        else:
            try:
                source = self._artifacts.local(source_key(dataset.id))
            except FileNotFoundError:
                return _problem("The uploaded file is gone; upload it again.")
            what = ["--format", dataset.format, "--source", str(source)]
            what += [] if dataset.resize is None else ["--resize", dataset.resize]
            if dataset.header is not None:
                what += ["--header" if dataset.header else "--no-header"]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "engine.ingest",
            *what,
            "--out",
            str(out),
            "--max-memory-bytes",
            str(settings.ingest_memory_bytes),
            "--max-cpu-s",
            str(settings.ingest_cpu_s),
            "--max-out-bytes",
            str(settings.max_upload_bytes),
            stdin=DEVNULL,
            stdout=PIPE,
            env=clean_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),
        )
        return await _answer_of(process, settings.ingest_cpu_s + _SLACK_S)

    async def _settle(self, dataset: Dataset, out: Path, answer: dict[str, Any]) -> None:
        if answer.get("ok"):
            kept = await run_in_threadpool(self._keep, dataset.id, out, answer["meta"])
        else:
            kept = await run_in_threadpool(self._refuse, dataset.id, answer["problem"])
        if kept:
            await run_in_threadpool(self._artifacts.delete, source_key(dataset.id))
        _log.info("dataset_read", dataset=dataset.id, ok=bool(answer.get("ok")), kept=kept)

    def _keep(self, dataset_id: str, out: Path, meta: dict[str, Any]) -> bool:
        """Each try has a key of its own: of two processes that read one file, one is too late."""
        key = f"datasets/{dataset_id}/{secrets.token_hex(4)}"
        self._artifacts.put(key, out)
        columns = [
            {name: value for name, value in column.items() if name != "file"}
            for column in meta["columns"]
        ]
        with self._database.write() as tx:
            kept = datasets.read(
                tx,
                dataset_id,
                key=key,
                columns=columns,
                splits=meta["splits"],
                notes=meta.get("notes"),
            )
        if not kept:
            self._artifacts.delete(key)
        return kept

    def _refuse(self, dataset_id: str, problem: dict[str, Any]) -> bool:
        with self._database.write() as tx:
            return datasets.unreadable(tx, dataset_id, problem)


def source_key(dataset_id: str) -> str:
    """Where an uploaded file waits to be read."""
    return f"uploads/{dataset_id}"


async def _answer_of(process: Process, limit_s: float) -> dict[str, Any]:
    """What the process printed, or why it printed nothing."""
    try:
        async with asyncio.timeout(limit_s):
            printed, _ = await process.communicate()
    except TimeoutError:
        await _kill(process)
        return _problem(f"The file took longer than {limit_s:g} s to read.")
    except BaseException:
        await _kill(process)
        raise
    try:
        return jsonio.loads(printed.splitlines()[-1])
    except (ValueError, IndexError):
        _log.warning("ingest_died", code=process.returncode)
        return _problem(
            "The process that reads the file ended before it was done; the file may need more "
            "memory or time than is allowed."
        )


async def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _problem(detail: str) -> dict[str, Any]:
    return {"ok": False, "problem": {"code": "invalid_dataset", "detail": detail}}


def _remove(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    for left in out.parent.glob(f"{out.name}.*"):
        shutil.rmtree(left, ignore_errors=True)
