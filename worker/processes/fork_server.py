"""The worker's side of the fork server: a process that has imported torch and forks ranks.

It is started with a clean environment and restarted when it dies; all ranks that it has forked
are lost with it. This side never imports torch.
"""

import contextlib
import os
import signal
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
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        self._ranks: dict[int, Rank] = {}
        self._exits: dict[int, Exit] = {}
        self._next_id = 0
        self._socket: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0
        self._thread = threading.Thread(target=self._keep, name="fork-server", daemon=True)

    def start(self) -> None:
        """Start the process, and restart it when it dies, until ``close``."""
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until ranks can be forked."""
        return self._ready.wait(timeout_s)

    def fork(self, job_dir: Path, env: Mapping[str, str]) -> Rank:
        """Fork a rank for a job directory.

        Raises:
            ForkServerLost: the fork server died meanwhile; a rank that it forked dies with it.
        """
        read_end, write_end = os.pipe()
        try:
            answer = self._ask(
                {
                    "do": "fork",
                    "job_dir": str(job_dir),
                    "env": dict(env),
                    **{stream: str(log_path(job_dir, stream)) for stream in STREAMS},
                },
                read_end,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return self._adopt(int(answer["pid"]), write_end)

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

    def _adopt(self, pid: int, write_end: int) -> Rank:
        identity = processes.identify(pid) or Identity(pid, "")
        rank = Rank(identity, write_end)
        with self._lock:
            if (ended := self._exits.pop(pid, None)) is not None:  # it ended before this
                rank.ended(ended)
            elif not self._ready.is_set():
                rank.ended(Exit(lost=True))
            else:
                self._ranks[pid] = rank
        return rank

    def _ask(self, request: dict[str, Any], handle: int) -> dict[str, Any]:
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._socket is None or not self._ready.is_set():
                raise ForkServerLost("the fork server is not running")
            self._next_id += 1
            self._asked[self._next_id] = future
            line = jsonio.dumps({"id": self._next_id, **request}).encode() + b"\n"
            try:
                sent = socket.send_fds(self._socket, [line], [handle])
                self._socket.sendall(line[sent:])
            except OSError as error:
                del self._asked[self._next_id]
                raise ForkServerLost(f"the fork server does not answer: {error}") from error
        try:
            answer = future.result(_FORK_TIMEOUT_S)
        except TimeoutError as error:
            self._kill()
            raise ForkServerLost("the fork server did not answer") from error
        if "pid" not in answer:
            raise ForkServerLost(f"the fork server could not fork: {answer.get('error', answer)}")
        return answer

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
            self._read(ours)
        finally:
            self._on_exit(ours)

    def _read(self, ours: socket.socket) -> None:
        waiting = b""
        while True:
            try:
                data = ours.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                self._on_message(jsonio.loads(line))

    def _on_message(self, message: dict[str, Any]) -> None:
        if message.get("ready"):
            self._ready.set()
        elif "exited" in message:
            ended = Exit(
                message.get("code"), message.get("signal"), peak_bytes=message.get("peak_bytes")
            )
            with self._lock:
                rank = self._ranks.pop(message["exited"], None)
                if rank is None:
                    self._exits[message["exited"]] = ended
            if rank is not None:
                rank.ended(ended)
        elif (future := self._asked.pop(message.get("id", 0), None)) is not None:
            future.set_result(message)

    def _on_exit(self, ours: socket.socket) -> None:
        with self._lock:
            self._ready.clear()
            self._socket = None
            ranks, self._ranks = list(self._ranks.values()), {}
            asked, self._asked = list(self._asked.values()), {}
            self._exits.clear()
        ours.close()
        self._reap()
        for future in asked:
            future.set_exception(ForkServerLost("the fork server died"))
        for rank in ranks:
            rank.ended(Exit(lost=True))

    def _reap(self) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self._kill()
            self.process.wait(10)

    def _kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)


def log_path(job_dir: Path, stream: str) -> Path:
    """Return the file to which a rank prints."""
    return job_dir / "logs" / f"rank-0.{stream}"


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
