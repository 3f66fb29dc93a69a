"""``Client("inproc://")``: a service in this process, with a home of its own that goes with it.

The one place of the client that knows the service's rooms. Their names (``api``, ``engine``,
``models``, ``worker``) are names that a user's modules may have, so they are imported when such a
client is made and never before, and only if they are ours.
"""

import importlib
import importlib.util
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import httpx2

import glasshouse
from glasshouse.client.address import Address
from glasshouse.errors import APIConnectionError

URL = "inproc://"
_HOST = "http://127.0.0.1"
_ROOMS = ("api", "engine", "models", "worker")
_QUEUES = re.compile(r"/api/v1/(datasets|jobs(/[^/]+/(retry|fork|resume))?)")
"""What puts a job into the queue."""


class InProcess(httpx2.Client):
    """Hands requests to the API, which runs in a thread; jobs run in the thread that asks for them.

    A request that puts a job into the queue is answered when that job has ended.
    """

    def __init__(self) -> None:
        _check_rooms()
        self._home = Path(tempfile.mkdtemp(prefix="glasshouse-"))
        try:
            self.address = Address(_HOST, self._furnish())
        except BaseException:
            shutil.rmtree(self._home, ignore_errors=True)
            raise
        super().__init__(transport=_Working(self._api, self._bench))

    def _furnish(self) -> str:
        """Make a home with a database; gives a key to it."""
        settings = _load("models.settings").Settings(
            home=self._home,
            database_url=f"sqlite:///{self._home / 'glasshouse.db'}",
            redis_url=f"unix://{self._home / 'no-broker.sock'}",
            artifacts_dir=self._home / "artifacts",
            work_dir=self._home / "work",
            worker_name="here",
            lease_s=86_400.0,
        )
        database = _load("models.database").Database(settings.database)
        _load("models.migrate").migrate(database, lock_file=self._home / "migrate.lock")
        with database.write() as tx:
            scopes = ("read", "submit", "admin")
            _, key = _load("models.keys").create(tx, name="here", owner="local", scopes=scopes)
        database.close()
        _be_quiet()
        self._bench = _load("worker.in_process").Bench(
            settings, _load("engine.process.in_process").carry_out
        )
        app = _load("api.app").create_app(settings)
        self._api = _load("starlette.testclient").TestClient(
            app, base_url=_HOST, raise_server_exceptions=False, client=("127.0.0.1", 1)
        )
        self._api.__enter__()
        return key

    def close(self) -> None:
        """End the API and remove all that its jobs have made."""
        if not self.is_closed:
            super().close()
            self._api.__exit__(None, None, None)
            self._bench.close()
            shutil.rmtree(self._home, ignore_errors=True)


class _Working(httpx2.BaseTransport):
    """Has jobs run before a request that queued one is answered."""

    def __init__(self, api: Any, bench: Any) -> None:
        self._api = api
        self._bench = bench

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = self._api.send(request, stream=True)
        is_made = request.method == "POST" and response.is_success
        if is_made and _QUEUES.fullmatch(request.url.path):
            response.read()
            self._bench.work()
        return response


def _check_rooms() -> None:
    """Raise if what the service needs is not there, or something else has its name."""
    ours = Path(glasshouse.__file__).parents[1]
    for room in _ROOMS:
        spec = importlib.util.find_spec(room)
        if spec is None:
            raise APIConnectionError(
                f"{URL} runs the service in this process and there is no {room!r}: "
                "pip install 'glasshouse[server]'"
            )
        if spec.origin is None or Path(spec.origin).parents[1] != ours:
            raise APIConnectionError(
                f"{URL} runs the service in this process, and {spec.origin or room} has the name "
                f"of its package {room!r}: rename it, or use a service that runs by itself"
            )


def _load(name: str) -> Any:
    return importlib.import_module(name)


def _be_quiet() -> None:
    """Keep the service's own log out of the user's terminal, unless the user has set that up."""
    structlog = _load("structlog")
    if not structlog.is_configured():
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
