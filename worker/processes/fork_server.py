"""The worker's side of the fork server: a process that has imported torch and forks ranks.

It is started with a clean environment and restarted when it dies; all ranks that it has forked
are lost with it. This side never imports torch.
"""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import structlog

import engine
from glasshouse import failpoints, jsonio, processes
from glasshouse.processes import Identity
from worker.processes.rank import Exit, Rank

_log: Any = structlog.get_logger()

COMMAND = (sys.executable, "-P", "-m", "engine.process.fork_server")
SOCKET_VARIABLE = "GLASSHOUSE_FORK_SERVER_FD"
PASSED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "XDG_CACHE_HOME",
    "LD_LIBRARY_PATH",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    *failpoints.VARIABLES,  # for tests
)
"""The only environment variables that a rank gets from the worker. No addresses, no keys."""
FIXED = {
    # glibc keeps freed activations instead of returning them: training is 1.14 x faster
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(64 << 20),
    # after a second OpenMP thread has run in a parent, its forked children cannot compute
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
    "PYTHONUTF8": "1",
    "PYTHONNOUSERSITE": "1",
}
STREAMS = ("stdout", "stderr")
_RESTART_S = 1.0
_FORK_TIMEOUT_S = 20.0


class ForkServerLost(Exception):
    """The fork server died, or did not answer, before it had forked a rank."""


class ForkServerClient:
    """Starts the fork server, forks ranks through it, and receives how they end."""

    def __init__(self, *, log_path: Path, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._log_path = log_path
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._closing = threading.Event()
        self._asked: dict[int, tuple[Future[Rank], int]] = {}
        """Requests without an answer: the rank to come, and the end of its lifeline."""
        self._ranks: dict[int, Rank] = {}
        self._ids = itertools.count(1)
        self._socket: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0
        self.versions: dict[str, str | None] = {}
        """The versions of torch and its libraries, as of `engine.core.versions`."""
        self._thread = threading.Thread(target=self._keep, name="fork-server", daemon=True)

    def start(self) -> None:
        """Start the process, and restart it when it dies, until ``close``."""
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until ranks can be forked."""
        return self._ready.wait(timeout_s)

    def fork(self, job_dir: Path, env: Mapping[str, str], number: int = 0) -> Rank:
        """Fork a rank for an attempt's directory; ``number``: which one of the job.

        Raises:
            ForkServerLost: the fork server died meanwhile; a rank that it forked dies with it.
        """
        request = {
            "id": next(self._ids),
            "do": "fork",
            "job_dir": str(rank_directory(job_dir, number)),
            "env": dict(env),
            "stacks": str(stacks_path(job_dir, number)),
            **{stream: str(log_path(job_dir, stream, number)) for stream in STREAMS},
        }
        read_end, write_end = os.pipe()
        try:
            return self._ask(request, read_end, write_end)
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)

    def close(self) -> None:
        """End the fork server and all its ranks."""
        self._closing.set()
        if not self._ready.is_set():
            self._kill()  # it has forked nothing, and would first import torch
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(15)

    def _ask(self, request: dict[str, Any], read_end: int, write_end: int) -> Rank:
        future: Future[Rank] = Future()
        with self._lock:
            if self._socket is None or not self._ready.is_set():
                raise ForkServerLost("the fork server is not running")
            self._asked[request["id"]] = future, write_end
            line = jsonio.dumps(request).encode() + b"\n"
            try:
                sent = socket.send_fds(self._socket, [line], [read_end])
                self._socket.sendall(line[sent:])
            except OSError as error:
                del self._asked[request["id"]]
                raise ForkServerLost(f"the fork server does not answer: {error}") from error
        try:
            return future.result(_FORK_TIMEOUT_S)
        except TimeoutError as error:
            with self._lock:
                is_open = self._asked.pop(request["id"], None) is not None
            if not is_open:  # the answer, or the end of the fork server, came at that moment
                return future.result()
            self._kill()
            raise ForkServerLost("the fork server did not answer") from error

    def _keep(self) -> None:
        while not self._closing.is_set():
            try:
                self._live_once()
            except OSError:
                _log.exception("fork_server_start_failed")
            if not self._closing.is_set():
                _log.error("fork_server_lost")
                self._closing.wait(_RESTART_S)

    def _live_once(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, self._log_path.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 (our own interpreter, no shell)
                self._command,
                env=environment({SOCKET_VARIABLE: str(theirs.fileno())}),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the worker handles Ctrl-C
            )
        self.num_starts += 1
        with self._lock:
            self._socket = ours
        if self._closing.is_set():
            self._kill()
        try:
            with contextlib.suppress(OSError), ours.makefile("rb") as lines:
                for line in lines:
                    if line.endswith(b"\n"):
                        self._on_message(jsonio.loads(line))
        finally:
            self._on_exit(ours, self.process)

    def _on_message(self, message: dict[str, Any]) -> None:
        if message.get("ready"):
            self.versions = message.get("versions", {})
            self._ready.set()
            return
        with self._lock:
            if "exited" in message:
                code, number = message.get("code"), message.get("signal")
                rank = self._ranks.pop(message["exited"], None)
                if rank is not None:
                    rank.ended(Exit(code, number, peak_bytes=message.get("peak_bytes")))
                return
            future, lifeline = self._asked.pop(message.get("id", 0), (None, 0))
            if future is None:
                return  # it came too late
            pid = message.get("pid")
            if pid is None:
                reason = message.get("error", message)
                future.set_exception(ForkServerLost(f"the fork server could not fork: {reason}"))
                return
            rank = Rank(processes.identify(pid) or Identity(pid, ""), lifeline)
            self._ranks[pid] = rank
            future.set_result(rank)

    def _on_exit(self, ours: socket.socket, process: "subprocess.Popen[bytes]") -> None:
        with self._lock:
            self._ready.clear()
            self._socket = None
            ranks, self._ranks = list(self._ranks.values()), {}
            asked, self._asked = list(self._asked.values()), {}
        ours.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        for future, _ in asked:
            future.set_exception(ForkServerLost("the fork server died"))
        for rank in ranks:
            rank.ended(Exit(lost=True))

    def _kill(self) -> None:
        if self.process is not None:
            self.process.kill()


def rank_directory(job_dir: Path, number: int) -> Path:
    """Return the directory of a rank; rank 0 has that of the attempt."""
    return job_dir / f"rank-{number}" if number else job_dir


def stacks_path(job_dir: Path, number: int) -> Path:
    """Return the file to which a rank writes the stacks of its threads on `SHOW_STACKS`."""
    return rank_directory(job_dir, number) / "stacks.txt"


def log_path(job_dir: Path, stream: str, number: int = 0) -> Path:
    """Return the file to which a rank prints."""
    return job_dir / "logs" / f"rank-{number}.{stream}"


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the fork server, and so of every rank.

    The module path is the worker's own, so that installed extensions are found.
    """
    passed = {name: value for name, value in os.environ.items() if name in PASSED}
    root = str(Path(engine.__file__ or "").resolve().parents[1])
    path = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**passed, **FIXED, "PYTHONPATH": os.pathsep.join(path), **more}


def wait_for(fork_server: ForkServerClient, timeout_s: float, given_up: threading.Event) -> bool:
    """Wait for the first start; return False if it keeps dying, takes too long, or is given up."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and fork_server.num_starts <= 3 and not given_up.is_set():
        if fork_server.wait_ready(0.2):
            return True
    return False
