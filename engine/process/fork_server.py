"""Fork server: a process that has imported everything and forks ranks in milliseconds.

It never starts a thread: a fork copies only the forking thread. Requests are JSON lines on a Unix
socket; each fork request includes the read end of the rank's lifeline. A rank that sees a GPU is a
new program in the forked process (`fresh_rank`).
"""

import array
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # there is no garbage yet, and looking for it takes a sixth of the import time

import torch

from engine.core.versions import versions
from engine.process import rank
from engine.process.hardening import check_torch, limit_rank
from glasshouse.processes import SHOW_STACKS
from glasshouse.unpickling import seal_pickle

FRESH_RANK = ("-P", "-m", "engine.process.fresh_rank")
SOCKET_VARIABLE = "GLASSHOUSE_FORK_SERVER_FD"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_GRACE_S = 5.0
_MAX_LINE = 1 << 20
_TASKS = "/proc/self/task"
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def warm_up() -> None:
    """Run one tiny step on one thread, so that everything is loaded at a rank's first step."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # else a rank's first optimizer step would: 1.1 s
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    loss = torch.nn.CrossEntropyLoss()(network(torch.zeros(2, 1, 4, 4)), torch.tensor([0, 1]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def load_driver() -> int:
    """Let torch count the devices, as a backward pass does; return how many threads that starts.

    Where there is a CUDA driver, counting initializes it, although it shows no device here, and it
    has threads of its own. A fork does not have them and never calls the driver: a rank on CPU
    cores uses no device, and torch, which counts once, does not ask again. A rank on a device is a
    new program.
    """
    before = num_threads()
    torch.ones(1, requires_grad=True).sum().backward()
    return num_threads() - before


def check_threads(num_expected: int) -> None:
    """Exit if this process has more threads than its own and those of the driver.

    Raises:
        SystemExit: it has.
    """
    names = thread_names()
    if len(names) > num_expected:
        listed = ", ".join(names)
        raise SystemExit(f"the fork server has the threads {listed}; a fork of it could hang")


def num_threads() -> int:
    """Return the number of threads, including those of native libraries if they can be counted."""
    return len(thread_names())


def thread_names() -> list[str]:
    """Return the names of all threads, including those of native libraries if they are known."""
    try:
        return [Path(_TASKS, one, "comm").read_text().strip() for one in os.listdir(_TASKS)]
    except FileNotFoundError:
        return [thread.name for thread in threading.enumerate()]


class ForkServer:
    """Serves fork requests and reports the exits of the ranks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""
        self._descriptors: list[int] = []
        self._children: set[int] = set()

    def serve(self) -> None:
        """Answer until the other end of the socket closes; then end the ranks."""
        self._say({"ready": True, "versions": versions()})
        while True:
            readable, _, _ = select.select([self._connection], [], [], _POLL_S)
            self._reap()
            if readable and not self._receive():
                break
        self._end_children()

    def _receive(self) -> bool:
        space = socket.CMSG_SPACE(16 * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = self._connection.recvmsg(65536, space)
        except ConnectionError:
            return False
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._descriptors.extend(received)
        if not data:
            return False
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._answer(json.loads(line))
        return len(self._buffer) < _MAX_LINE

    def _answer(self, request: dict[str, Any]) -> None:
        lifeline = self._descriptors.pop(0)
        try:
            pid = self._fork(request, lifeline)
        except OSError as error:
            self._say({"id": request["id"], "error": str(error)})
        else:
            self._say({"id": request["id"], "pid": pid})
        finally:
            os.close(lifeline)

    def _fork(self, request: dict[str, Any], lifeline: int) -> int:
        gc.collect(0)
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._children.add(pid)
            return pid
        code = 70
        try:
            self._connection.close()
            for other in self._descriptors:
                os.close(other)
            become_rank(request, parent)
            if os.environ.get("CUDA_VISIBLE_DEVICES"):
                begin_anew(request, lifeline)
            code = rank.main(Path(request["job_dir"]), lifeline)
        except BaseException as error:
            traceback.print_exception(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        for pid in list(self._children):
            try:
                ended, status, used = os.wait4(pid, os.WNOHANG)
            except ChildProcessError:
                ended, status, used = pid, 0, None
            if ended:
                self._children.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                message: dict[str, Any] = {
                    "exited": pid,
                    "code": None if code < 0 else code,
                    "signal": -code if code < 0 else None,
                }
                if used is not None:
                    message["peak_bytes"] = used.ru_maxrss * _MAXRSS_UNIT
                self._say(message)

    def _end_children(self) -> None:
        for number, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            for pid in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + patience_s
            while self._children and time.monotonic() < deadline:
                self._reap()
                time.sleep(0.01)

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # the worker is gone; the read side notices and ends the ranks
            return


def become_rank(request: dict[str, Any], parent: int) -> None:
    """Set up a fresh fork as its own process: session, files, environment, parent-death signal."""
    os.setsid()
    _die_with(parent)
    limit_rank()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, key in ((1, "stdout"), (2, "stderr")):
        file = os.open(request[key], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.close(nothing)
    for name, value in request.get("env", {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    stacks = os.open(request["stacks"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(SHOW_STACKS, stacks, all_threads=True)
    # Only the lifeline's thread receives it: it would interrupt what native code waits for.
    signal.pthread_sigmask(signal.SIG_BLOCK, {SHOW_STACKS})
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def begin_anew(request: dict[str, Any], lifeline: int) -> None:
    """Replace this process by a rank that has imported nothing yet."""
    os.set_inheritable(lifeline, True)
    given = (request["job_dir"], str(lifeline), request["stacks"])
    os.execv(sys.executable, [sys.executable, *FRESH_RANK, *given])  # noqa: S606 (no shell)


def _die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent exits for any reason."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(rank.PARENT_GONE)


def main() -> None:
    """Serve the socket that the worker passed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(SHOW_STACKS, signal.SIG_IGN)  # until a fork of it has registered its file
    connection = socket.socket(fileno=int(os.environ.pop(SOCKET_VARIABLE, "3")))
    os.set_inheritable(connection.fileno(), False)
    check_torch()
    num_expected = 1 + load_driver()
    warm_up()
    seal_pickle()
    check_threads(num_expected)
    gc.freeze()
    gc.enable()
    ForkServer(connection).serve()


if __name__ == "__main__":
    main()
