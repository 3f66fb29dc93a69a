"""Services that the acceptance tests share; each is started at its first use."""

from collections.abc import Generator

import httpx2
import pytest

import glasshouse as gh
from tests.acceptance.houses import Cluster, House


@pytest.fixture(scope="session")
def house() -> Generator[House]:
    """The embedded service, as ``glasshouse up`` runs it."""
    with House.lent() as started:
        yield started


@pytest.fixture(scope="session")
def client(house: House) -> Generator[gh.Client]:
    """The Python client of the embedded service."""
    with house.client() as opened:
        yield opened


@pytest.fixture(scope="session")
def http(house: House) -> Generator[httpx2.Client]:
    """A plain HTTP client of the embedded service, below ``/api/v1``."""
    with house.http() as opened:
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
