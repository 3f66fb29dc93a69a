import asyncio
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.routing import Route

import glasshouse as gh
from tests.blocking_client import blocking_client
from tests.stub_api import Serve, serve, server

__all__ = ["serve", "server"]


@pytest.fixture(params=["blocking", "awaited"])
def make_client(request: pytest.FixtureRequest) -> Generator[Callable[..., gh.Client]]:
    """Creates a client: once the blocking one, once the asynchronous one."""
    if request.param == "blocking":
        yield gh.Client
        return
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        yield lambda *given, **options: blocking_client(loop, *given, **options)


@pytest.fixture
def connect(
    serve: Serve, make_client: Callable[..., gh.Client]
) -> Generator[Callable[..., gh.Client]]:
    """Creates a client of a server with these routes."""
    with ExitStack() as stack:

        def connect(*routes: Route, **options: Any) -> gh.Client:
            client = make_client(serve(routes), "gh_test", **options)
            client._transport._sleep = lambda _: None  # retries need not take time here
            return stack.enter_context(client)

        yield connect


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch):
    """Makes the client reconnect without waiting."""

    async def sleep(_: float) -> None:
        return

    monkeypatch.setattr("glasshouse.client.blocking.stream.sleep", lambda _: None)
    monkeypatch.setattr("glasshouse.client.aio.stream.sleep", sleep)
