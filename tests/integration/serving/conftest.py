import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import select

from models.state import OPEN
from models.tables import Job
from tests import leaks
from tests.integration.serving.service import Service
from tests.integration.worker.conftest import open_broker
from tests.integration.worker.harness import Harness
from tests.running import Api


@contextmanager
def running_service(database_url: str = "") -> Generator[Service]:
    """Start a service, by default on SQLite."""
    home = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))
    url = database_url or f"sqlite:///{home / 'test.db'}"
    with contextmanager(open_broker)() as broker:
        harness = Harness(url, broker.url, home)
        api = Api(home, url, redis_url=broker.url, quota_requests_per_s="100000")
        try:
            harness.start_worker(misbehaving=True, wait=False, CPU_CORES="6")
            api.start()
            harness.wait_ready("w1")
            yield Service(harness, api)
        finally:
            api.stop()
            harness.close()
            api.database.close()
    leaks.check_home(home)
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_service() -> Generator[Service]:
    """One service for all tests of serving."""
    with running_service() as started:
        yield started


@pytest.fixture
def service(shared_service: Service) -> Generator[Service]:
    """The service; jobs that a test leaves are ended."""
    yield shared_service
    with shared_service.harness.database.read() as tx:
        left = list(tx.scalars(select(Job.id).where(Job.state.in_(OPEN))))
    shared_service.end(*left)
