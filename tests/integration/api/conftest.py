"""APIs that the tests of this folder share."""

from collections.abc import Generator

import pytest

from tests.running import Api, digits, running_api


@pytest.fixture(scope="session")
def service() -> Generator[Api]:
    """A running API on SQLite, without a broker or a worker."""
    with running_api(max_json_bytes="1000000", max_upload_bytes="3000000") as api:
        yield api


@pytest.fixture(scope="session")
def dataset(service: Api) -> str:
    """The digits, owned by ``ada``."""
    with service.client(service.key("ada")) as client:
        return digits(client)


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def each_service(request: pytest.FixtureRequest) -> Generator[Api]:
    """A running API, on SQLite and then on PostgreSQL."""
    if request.param == "sqlite":
        yield request.getfixturevalue("service")
        return
    with running_api(request.getfixturevalue("postgres")) as api:
        yield api
