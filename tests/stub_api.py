"""A real HTTP server with the routes of one test, and responses as the API gives them."""

import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from engine.datasets import formats
from glasshouse import Client, Job, jsonio

Serve = Callable[[Sequence[Route]], str]


CATALOG = Route(
    "/api/v1/catalog/datasets",
    lambda _: Response(jsonio.dumps({"entries": formats.catalog()})),
)


class Server:
    """A server that answers with the routes of the running test."""

    def __init__(self) -> None:
        self._app = Starlette()
        self._listening = socket.socket()
        self._listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        config = uvicorn.Config(
            self._answer,
            log_level="error",
            ws="none",
            lifespan="off",
            interface="asgi3",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._listening],), daemon=True
        )
        self._thread.start()
        while not self._server.started:
            time.sleep(0.002)

    def serve(self, routes: Sequence[Route]) -> str:
        self._app = Starlette(routes=[*routes, CATALOG])
        return self.url

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._listening.close()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


@pytest.fixture(scope="session")
def server() -> Generator[Server]:
    """One server for all tests; each sets its own routes."""
    started = Server()
    yield started
    started.close()


@pytest.fixture
def serve(server: Server) -> Serve:
    """Serves these routes from now on; returns the address."""
    return server.serve


@pytest.fixture
def connect(serve: Serve) -> Generator[Callable[..., Client]]:
    """Creates a client of a server with these routes."""
    with ExitStack() as stack:

        def connect(*routes: Route, **options: Any) -> Client:
            client = Client(serve(routes), "gh_test", **options)
            client._transport._sleep = lambda _: None  # retries need not take time here
            return stack.enter_context(client)

        yield connect


def answer(body: Any, status: int = 200, **headers: str) -> Response:
    """Return a JSON response."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(jsonio.dumps(body), status, named, "application/json")


def problem(status: int, code: str = "broken", **members: Any) -> Response:
    """Return a response with a problem document."""
    headers: dict[str, str] = members.pop("headers", {})
    body = {"type": f"/errors/{code}", "title": "It broke.", "status": status, "code": code}
    return Response(
        jsonio.dumps({**body, "request_id": "req-1", "retryable": False, **members}),
        status,
        headers,
        "application/problem+json",
    )


def listing(*data: Any, next: Any = None) -> Response:  # noqa: A002
    """Return a response with one page of a list."""
    body = {"object": "list", "data": data, "has_more": next is not None, "next": next}
    return answer(body)


def job(**fields: Any) -> dict[str, Any]:
    """Return a job as the API returns it."""
    return {
        "id": "job_1",
        "object": "job",
        "kind": "train",
        "name": "mnist",
        "state": "running",
        "state_reason": None,
        "created_at": "2026-11-20T10:00:00.000Z",
        "created_by": "laptop",
        "queued_at": "2026-11-20T10:00:00.000Z",
        "started_at": "2026-11-20T10:00:01.000Z",
        "ended_at": None,
        "attempt": 1,
        "labels": {},
        "priority": 0,
        "parent": None,
        "devices": [{"worker": "host-a", "kind": "cpu", "id": "cpu:0"}],
        "progress": {
            "step": 410,
            "num_steps": 1000,
            "epoch": 0,
            "samples": 41000,
            "samples_per_s": 5120.3,
            "eta_s": 11.5,
        },
        "summary": {"loss": {"last": 0.31, "min": 0.29, "min_step": 402}},
        "error": None,
        **fields,
    }


def job_of(client: Client) -> Job:
    """Return that job as an object of a client that has read it."""
    found = client.jobs._job("job_1")
    found.data = job()
    return found


def events(count: int = 30) -> list[dict[str, Any]]:
    """Return the events of a short job that succeeds."""
    made: list[dict[str, Any]] = [
        {"type": "state", "from": "queued", "to": "starting", "reason": None},
        {"type": "attempt", "n": 1, "resumed_from_step": None},
        {"type": "state", "from": "starting", "to": "running", "reason": None},
    ]
    for step in range(count - 4):
        value: Any = "NaN" if step == 5 else 2.0 / (step + 1)
        made.append({"type": "metrics", "step": step, "epoch": 0, "values": {"loss": value}})
    made.append({"type": "end", "state": "succeeded"})
    return [
        {"job": "job_1", "seq": seq, "attempt": 1, "at": "2026-11-20T10:00:00.000Z", **event}
        for seq, event in enumerate(made, 1)
    ]
