"""``Client("inproc://")``: a service in this process, with a temporary home directory.

Only this module of the client imports the packages of the service. A user's modules may have the
same names (``api``, ``engine``, ``models``, ``worker``), so the packages are imported only when
such a client is created, and only if they belong to glasshouse.
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
from glasshouse.client.connection.address import Address
from glasshouse.errors import APIConnectionError

URL = "inproc://"
_HOST = "http://127.0.0.1"
_PACKAGES = ("api", "engine", "models", "worker")
_QUEUES = re.compile(r"/api/v1/(datasets|jobs(/[^/]+/(retry|fork|resume))?)")
"""Requests that queue a job."""


class InProcess(httpx2.Client):
    """An HTTP client whose API runs in a background thread and whose jobs run in the caller's.

    A request that queues a job returns when the job has ended.
    """

    def __init__(self) -> None:
        _check_packages()
        self._home = Path(tempfile.mkdtemp(prefix="glasshouse-"))
        try:
            self.address = Address(_HOST, self._start())
        except BaseException:
            shutil.rmtree(self._home, ignore_errors=True)
            raise
        super().__init__(transport=_Transport(self._api, self._worker))

    def _start(self) -> str:
        """Create the database and start the API; return an API key."""
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
        self._worker = _load("worker.in_process").InProcessWorker(
            settings, _load("engine.process.in_process").carry_out
        )
        app = _load("api.app").create_app(settings)
        self._api = _load("starlette.testclient").TestClient(
            app, base_url=_HOST, raise_server_exceptions=False, client=("127.0.0.1", 1)
        )
        self._api.__enter__()
        return key

    def close(self) -> None:
        """Stop the API and remove the home directory."""
        if not self.is_closed:
            super().close()
            self._api.__exit__(None, None, None)
            self._worker.close()
            shutil.rmtree(self._home, ignore_errors=True)


class _Transport(httpx2.BaseTransport):
    """Runs queued jobs before it returns the response to the request that queued them."""

    def __init__(self, api: Any, worker: Any) -> None:
        self._api = api
        self._worker = worker

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = self._api.send(request, stream=True)
        is_created = request.method == "POST" and response.is_success
        if is_created and _QUEUES.fullmatch(request.url.path):
            response.read()
            self._worker.work()
        return response


def _check_packages() -> None:
    """Raise an error if a package of the service is missing or shadowed by another module."""
    root = Path(glasshouse.__file__).parents[1]
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise APIConnectionError(
                f"{URL} runs the service in this process, but the package {package!r} is missing: "
                "pip install 'glasshouse[server]'"
            )
        if spec.origin is None or Path(spec.origin).parents[1] != root:
            raise APIConnectionError(
                f"{URL} runs the service in this process, but {spec.origin or package} shadows its "
                f"package {package!r}: rename yours, or start a separate service"
            )


def _load(name: str) -> Any:
    return importlib.import_module(name)


def _be_quiet() -> None:
    """Silence the log of the service, unless the user has configured structlog."""
    structlog = _load("structlog")
    if not structlog.is_configured():
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
