from collections.abc import Generator

import pytest

from models.database import Database
from tests.conftest import empty_postgres


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> str:
    """A migrated, empty PostgreSQL database, which locks single rows."""
    return empty_postgres(request)


@pytest.fixture
def postgresql(postgres_url: str) -> Generator[Database]:
    opened = Database(postgres_url)
    yield opened
    opened.close()
