"""The local service: broker, API and workers, which one parent process starts and restarts.

All its files are in one directory, the home. A lock there prevents a second service;
``run/stack.json`` lists the processes, so that the next start finds those that a killed stack left
behind. API and workers inherit the read end of a pipe (``GLASSHOUSE_LIFELINE_FD``): it closes when
the stack ends, for whatever reason, and they exit. They are started first and import their modules
while the broker starts and the database is migrated. They wait until a second pipe
(``GLASSHOUSE_START_FD``) is closed.
"""

import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import IO, Any

import glasshouse
from glasshouse import processes
from glasshouse.cli.service.broker import (
    StackError,
    answers,
    check_socket_path,
    configuration,
    find_binary,
)
from glasshouse.cli.service.processes import ROOT, Child
from glasshouse.client import Client
from glasshouse.client.connection.address import read_runtime
from glasshouse.errors import APIError
from glasshouse.lifeline import START_VARIABLE, VARIABLE
from glasshouse.processes import Identity

HOST = "127.0.0.1"
READY_S = 120.0
MIGRATE_S = 600.0
HEALTHY_AFTER_S = 60.0
LONGEST_BACKOFF_S = 30.0
_DIRECTORIES = ("run", "valkey", "logs", "artifacts", "work")


class Stack:
    """Starts the service, keeps it running, stops it."""

    def __init__(
        self, home: Path, *, port: int, num_workers: int, report: Callable[[str], None]
    ) -> None:
        self.home = home
        self.url = ""
        self._broker = ""
        self._port = port
        self._num_workers = num_workers
        self._report = report
        self._stopping = threading.Event()
        self._children: list[Child] = []
        self._lifeline: tuple[int, int] | None = None
        self._start_end = -1

    @property
    def socket(self) -> Path:
        """The broker's socket."""
        return self.home / "run" / "valkey.sock"

    def run(self, when_ready: Callable[[], None] = lambda: None) -> None:
        """Run the service until it receives a signal; call ``when_ready`` once it is up.

        Raises:
            StackError: it could not be started, or is already running. No process is left.
        """
        check_socket_path(self.socket)
        os.umask(0o077)  # an existing home may be readable by others
        make_home(self.home)
        with locked(self.home), self._signals(), ExitStack() as cleaning:
            cleaning.callback(self._clean)
            end_leftovers(self.home)
            cleaning.callback(self._stop)
            self._start()
            self._report(self._banner())
            when_ready()
            self._keep_running()

    def _start(self) -> None:
        self._lifeline = os.pipe()
        self._start_end, begin = os.pipe()
        port = free_port(self._port)
        self.url = f"http://{HOST}:{port}"
        with os.fdopen(begin, "wb"):  # children wait until it is closed
            self._start_broker()
            self._launch(self._child("api", "api", "--host", HOST, "--port", str(port)))
            for number in range(1, self._num_workers + 1):
                self._launch(self._worker(number))
            self._await("the broker", lambda: answers(self.socket))
            self._migrate()
        self._await("the API", self._is_up)
        key = self._key()
        self._write_runtime(key, os.getpid())
        self._await_ready(key)

    def _start_broker(self) -> None:
        binary = find_binary()
        self._broker = str(binary)
        for stale in (self.socket, self.home / "run" / "valkey.pid"):
            stale.unlink(missing_ok=True)
        config = self.home / "run" / "valkey.conf"
        write_private(config, configuration(self.home))
        broker = Child(
            "valkey",
            [str(binary.path), str(config)],
            log=self.home / "logs" / "valkey.log",
            environ=os.environ,
            grace_s=5,
        )
        self._launch(broker)

    def _migrate(self) -> None:
        log = self.home / "logs" / "migrate.log"
        with log.open("wb") as file:
            done = subprocess.run(
                [sys.executable, "-m", "models.migrate"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environ(),
                cwd=ROOT,
                timeout=MIGRATE_S,
                check=False,
            )
        if done.returncode:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise StackError(f"the database could not be migrated ({log}):\n{end}")

    def _worker(self, number: int) -> Child:
        child = self._child("worker" if number == 1 else f"worker-{number}", "worker")
        name = os.environ.get("GLASSHOUSE_WORKER_NAME") or socket.gethostname()
        more = {"GLASSHOUSE_WORKER_NAME": name if number == 1 else f"{name}-{number}"}
        if self._num_workers > 1 and "GLASSHOUSE_CPU_CORES" not in os.environ:
            # workers of one machine must not lease the same cores twice
            more["GLASSHOUSE_CPU_CORES"] = str(max(1, (os.cpu_count() or 1) // self._num_workers))
        return child.with_environ(more)

    def _child(self, name: str, module: str, *arguments: str) -> Child:
        if self._lifeline is None:
            raise StackError("the lifeline pipe does not exist yet")
        return Child(
            name,
            [sys.executable, "-m", module, *arguments],
            log=self.home / "logs" / f"{name}.log",
            environ=self._environ()
            | {VARIABLE: str(self._lifeline[0]), START_VARIABLE: str(self._start_end)},
            inherited=[self._lifeline[0], self._start_end],
            grace_s=15 if module == "worker" else 10,
        )

    def _environ(self) -> dict[str, str]:
        own = {"GLASSHOUSE_HOME": str(self.home), "GLASSHOUSE_REDIS_URL": f"unix://{self.socket}"}
        return dict(os.environ) | own

    def _launch(self, child: Child) -> None:
        child.start()
        self._children.append(child)
        self._write_down()

    def _await(self, what: str, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_S
        while not happened():
            if self._stopping.is_set():
                raise StackError("the service was stopped during startup")
            for child in self._children:
                if (status := child.ended()) is not None:
                    raise StackError(
                        f"{child.name} exited with status {status} ({child.log}):\n"
                        f"{child.log_tail()}"
                    )
            if time.monotonic() > deadline:
                logs = self.home / "logs"
                raise StackError(f"timed out after {READY_S:.0f} s waiting for {what}; see {logs}")
            time.sleep(0.05)

    def _is_up(self) -> bool:
        if not accepts(HOST, int(self.url.rpartition(":")[2])):
            return False  # creating a client would take processor time that the API needs to start
        with suppress(APIError), Client(self.url, "-", timeout=5, max_retries=0) as client:
            client.ready()
            return True
        return False

    def _await_ready(self, key: str) -> None:
        """Wait until the workers are ready too. If they are not in time, print a warning."""
        readiness: dict[str, Any] = {}

        def is_healthy() -> bool:
            with suppress(APIError):
                readiness.update(client.ready())
                active = [one for one in client.workers.list() if one.data["state"] == "active"]
                return readiness.get("status") == "ok" and len(active) >= self._num_workers
            return False

        try:
            with Client(self.url, key, timeout=5, max_retries=0) as client:
                self._await("the workers", is_healthy)
        except StackError as error:
            if any(child.ended() is not None for child in self._children):
                raise
            self._report(f"warning: {error.detail}; {readiness.get('checks')}")

    def _key(self) -> str:
        """The previous API key if it still works, else a new one."""
        old = read_runtime(self.home).get("api_key")
        if old:
            with suppress(APIError), Client(self.url, old, timeout=5, max_retries=0) as client:
                client.info()
                return str(old)
        command = [sys.executable, "-m", "models.keys", "create", "--name", "local"]
        command += ["--scopes", "read,submit,admin", "--owner", "local"]
        made = subprocess.run(  # noqa: S603
            command, env=self._environ(), cwd=ROOT, capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise StackError(f"no API key could be created:\n{made.stderr[-2000:]}")
        return str(json.loads(made.stdout)["key"])

    def _keep_running(self) -> None:
        while not self._stopping.wait(0.2):
            for child in self._children:
                status = child.ended()
                if status is not None:
                    self._restart(child, status)
                elif time.monotonic() - child.started_at > HEALTHY_AFTER_S:
                    child.failures = 0

    def _restart(self, child: Child, status: int) -> None:
        pause_s = min(0.5 * 2**child.failures, LONGEST_BACKOFF_S)
        child.failures += 1
        self._report(f"{child.name} exited with status {status}; restarting in {pause_s:g} s")
        if self._stopping.wait(pause_s):
            return
        child.stop()  # the rest of its process group
        child.start()
        self._write_down()

    def _stop(self) -> None:
        self._report("stopping …")
        for child in [*self._children[1:], *self._children[:1]]:  # the broker last
            child.stop()
        if self._lifeline is not None:
            for end in (*self._lifeline, self._start_end):
                os.close(end)
        runtime = read_runtime(self.home)
        if runtime.get("pid") == os.getpid():
            self._write_runtime(runtime["api_key"], None)

    def _clean(self) -> None:
        for name in ("valkey.sock", "valkey.pid", "stack.json"):
            (self.home / "run" / name).unlink(missing_ok=True)

    def _write_runtime(self, key: str, pid: int | None) -> None:
        runtime = {"url": self.url, "api_key": key, "pid": pid, "version": glasshouse.__version__}
        write_private(self.home / "runtime.json", json.dumps(runtime) + "\n")

    def _write_down(self) -> None:
        children = [
            {"name": child.name, **asdict(child.running)}
            for child in self._children
            if child.running is not None
        ]
        stack = processes.identify(os.getpid())
        text = json.dumps({"stack": asdict(stack) if stack else None, "children": children})
        write_private(self.home / "run" / "stack.json", text)

    @contextmanager
    def _signals(self) -> Generator[None]:
        """Shut down on Ctrl-C, on SIGTERM, and when the terminal closes."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, self._request_stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping.set()

    def _banner(self) -> str:
        place = f" --home {self.home}" if self.home != Path.home() / ".glasshouse" else ""
        return (
            f"Glasshouse {glasshouse.__version__} runs at {self.url}\n"
            f"  dashboard          glasshouse open{place}\n"
            f"  broker             {self._broker}\n"
            f"  API documentation  {self.url}/docs\n"
            f"  submit a job       glasshouse submit job.json --watch\n"
            f"  logs               {self.home / 'logs'}\n"
            f"  stop               Ctrl-C, or glasshouse down{place}"
        )


def accessible_to_others(home: Path) -> Path | None:
    """The first path of a home that other users can access; None if there is none."""
    for path in (home, home / "run", home / "runtime.json"):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            return path
    return None


def make_home(home: Path) -> None:
    """Create the home and its directories, for its owner only.

    Raises:
        StackError: it exists, and other users can access it.
    """
    path = accessible_to_others(home)
    if path is not None:
        raise StackError(
            f"{path} contains keys and data and is accessible to other users. Run: chmod go= {path}"
        )
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in _DIRECTORIES:
        (home / name).mkdir(mode=0o700, exist_ok=True)
    (home / "run").chmod(0o700)


def accepts(host: str, port: int) -> bool:
    """Whether a server listens on this port."""
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


@contextmanager
def locked(home: Path) -> Generator[None]:
    """Hold the home's lock, which the system releases even if this process is killed.

    Raises:
        StackError: another stack holds it.
    """
    with (home / "run" / "stack.lock").open("a") as file:
        if not _lock(file):
            url = read_runtime(home).get("url")
            where = f" at {url}" if url else ""
            raise StackError(f"the service is already running{where} (home {home})")
        yield


def is_locked(home: Path) -> bool:
    """Whether a stack runs in this home."""
    try:
        with (home / "run" / "stack.lock").open("r") as file:
            return not _lock(file)
    except OSError:
        return False


def running_stack(home: Path) -> Identity | None:
    """The stack of a home, if the process named in ``run/stack.json`` still runs."""
    written = _read_stack(home)
    stack = _identity(written["stack"]) if written and written["stack"] else None
    return stack if stack is not None and processes.alive(stack) else None


def end_leftovers(home: Path) -> None:
    """End the processes that a killed stack left running. Call it only with the lock held."""
    written = _read_stack(home)
    children = [_identity(value) for value in written["children"]] if written else []
    for child in reversed(children):
        processes.end(child, 10)
    # a broker that was started but is not yet in stack.json: its title names our socket
    with suppress(OSError, ValueError):
        pid = int((home / "run" / "valkey.pid").read_text())
        command = ["/bin/ps", "-ww", "-o", "command=", "-p", str(pid)]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if str(home / "run") in shown.stdout:
            broker = processes.identify(pid)
            if broker is not None:
                processes.end(broker, 10)


def free_port(port: int) -> int:
    """The port to listen on: this one, or for 0 any free port.

    Raises:
        StackError: another process uses it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as cause:
            raise StackError(f"port {port} is in use; select another one with --port") from cause
        return probe.getsockname()[1]


def write_private(path: Path, text: str) -> None:
    """Write a file for its owner only, atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _identity(written: dict[str, Any]) -> Identity:
    return Identity(int(written["pid"]), str(written.get("started", "")))


def _read_stack(home: Path) -> dict[str, Any] | None:
    try:
        written = json.loads((home / "run" / "stack.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return written if isinstance(written, dict) else None  # pyright: ignore[reportUnknownVariableType]
