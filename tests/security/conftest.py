"""Fixtures of the security tests: an API with two tenants, and the app's list of routes."""

from collections.abc import Generator
from typing import Any

import httpx2
import pytest

from tests.running import running_api
from tests.security import figures
from tests.security.populated_api import PopulatedApi, all_routes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for ``route`` every operation of the app."""
    if "route" in metafunc.fixturenames:
        metafunc.parametrize("route", all_routes(), ids=str)


@pytest.fixture(autouse=True)
def counting(request: pytest.FixtureRequest) -> Generator[None]:
    """Count the requests of a test, for the table at the end of the run."""
    found: dict[str, Any] = {}
    with figures.counted(found):
        yield
    request.node.user_properties.append((figures.PROPERTY, found))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how much was tested."""
    stats = terminalreporter.stats
    reports = [one for kind in ("", "error") for one in stats.get(kind, ())]
    lines = figures.table(one for one in reports if getattr(one, "when", "") == "teardown")
    if lines:
        terminalreporter.section("security figures")
    for line in lines:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def populated() -> Generator[PopulatedApi]:
    """A running API with resources of the owner Ada."""
    with running_api(max_json_bytes="200000", max_upload_bytes="3000000") as api:
        made = PopulatedApi(api)
        made.fill()
        yield made


@pytest.fixture(scope="session")
def nobody(populated: PopulatedApi) -> Generator[httpx2.Client]:
    """A client without a key."""
    with httpx2.Client(base_url=populated.api.url, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def ada(populated: PopulatedApi) -> Generator[httpx2.Client]:
    with populated.api.client(populated.ada) as client:
        yield client


@pytest.fixture(scope="session")
def bob(populated: PopulatedApi) -> Generator[httpx2.Client]:
    with populated.api.client(populated.bob) as client:
        yield client


@pytest.fixture(scope="session")
def reader(populated: PopulatedApi) -> Generator[httpx2.Client]:
    with populated.api.client(populated.reader) as client:
        yield client
