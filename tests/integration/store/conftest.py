from collections.abc import Generator
from pathlib import Path

import pytest

from models.database import Database
from models.migrate import migrate


@pytest.fixture
def database(database_url: str, tmp_path: Path) -> Generator[Database]:
    """A migrated database, empty."""
    opened = Database(database_url)
    migrate(opened, lock_file=tmp_path / "migrate.lock")
    yield opened
    opened.close()
