import contextlib
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import httpx2
import pytest
from redis import Redis

from models.database import Database
from models.migrate import migrate
from tests import leaks
from tests.integration.inspection import services
from tests.integration.inspection.services import Api, Broker, Writer


@pytest.fixture(scope="module")
def home() -> Generator[Path]:
    """A home directory with a short path, because socket paths are limited."""
    directory = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))
    yield directory
    leaks.check_home(directory)
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def broker(home: Path) -> Generator[Broker]:
    started = Broker(home)
    started.start()
    yield started
    started.kill()


@pytest.fixture(scope="module")
def sqlite(home: Path) -> Generator[Database]:
    opened = Database(f"sqlite:///{home / 'glasshouse.db'}")
    migrate(opened, lock_file=home / "migrate.lock")
    yield opened
    opened.close()


@pytest.fixture
def serve(home: Path, broker: Broker) -> Generator[Callable[..., Api]]:
    """Starts API processes and kills them after the test."""
    started: list[Api] = []

    def start(database: Database, **settings: str) -> Api:
        started.append(Api(home, database.url, broker.url, **settings))
        return started[-1]

    yield start
    for api in started:
        api.kill()


@pytest.fixture(scope="module")
def redis(broker: Broker) -> Generator[Redis]:
    opened = Redis.from_url(broker.url)
    yield opened
    opened.close()


@pytest.fixture
def writer(sqlite: Database, redis: Redis) -> Writer:
    """A running job on SQLite, and the writer of its events."""
    return Writer(sqlite, redis).begin()


@pytest.fixture(scope="module")
def ada(home: Path, broker: Broker, sqlite: Database) -> Generator[httpx2.Client]:
    """A client of the module's API, with a key of the owner of the writers' jobs."""
    api = Api(home, sqlite.url, broker.url)
    _, secret = services.make_key(sqlite, "ada")
    with contextlib.closing(services.client(api.url, secret)) as opened:
        yield opened
    api.kill()
