"""Services that the acceptance tests share; each is started at its first use."""

from collections.abc import Generator

import httpx2
import pytest

import glasshouse as gh
from tests.acceptance.services import Cluster, LocalService


@pytest.fixture(scope="session")
def local_service() -> Generator[LocalService]:
    """The embedded service, as ``glasshouse up`` runs it."""
    with LocalService.temporary() as started:
        yield started


@pytest.fixture(scope="session")
def client(local_service: LocalService) -> Generator[gh.Client]:
    """The Python client of the embedded service."""
    with local_service.client() as opened:
        yield opened


@pytest.fixture(scope="session")
def http(local_service: LocalService) -> Generator[httpx2.Client]:
    """A plain HTTP client of the embedded service, below ``/api/v1``."""
    with local_service.http() as opened:
        yield opened


@pytest.fixture(scope="session")
def digits(client: gh.Client) -> str:
    """The id of the built-in digits in the embedded service."""
    return client.datasets.create(builtin="digits").id


@pytest.fixture(scope="session")
def cluster(postgres: str) -> Generator[Cluster]:
    """Two APIs and two workers on PostgreSQL and a Valkey with a password."""
    started = Cluster(postgres)
    try:
        started.start()
        yield started
    finally:
        started.stop()
