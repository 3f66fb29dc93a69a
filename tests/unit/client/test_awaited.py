"""What only a client with an event loop can get wrong."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from torch.utils.data import Dataset

import glasshouse as gh
from tests.stub_api import Serve, answer, job, listing

LAYERS = [{"name": "scores", "type": "Linear", "args": {"in_features": 3, "out_features": 2}}]
DATASET = {"id": "ds_1", "state": "ready", "splits": {"train": 6}, "columns": [], "format": "npz"}


class Rows(Dataset[Any]):
    """Notes in which thread it is read."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, place: int) -> Any:
        self.threads.add(threading.get_ident())
        return np.full(3, place, np.float32), place % 2


def training() -> list[Route]:
    """A service that takes datasets and jobs."""

    async def datasets(request: Request) -> Response:
        return listing() if request.method == "GET" else answer(DATASET, 201)

    return [
        Route("/api/v1/datasets", datasets, methods=["GET", "POST"]),
        Route("/api/v1/datasets/ds_1", lambda _: answer(DATASET)),
        Route("/api/v1/jobs", lambda _: answer(job(), 201), methods=["POST"]),
        Route("/api/v1/jobs/job_1", lambda _: answer(job())),
    ]


def test_rows_are_read_off_the_loop_and_by_the_blocking_client_in_its_own_thread(serve: Serve):
    async def awaited() -> Rows:
        async with gh.AsyncClient(serve(training()), "k") as client:
            rows = Rows()
            assert (await client.train(LAYERS, rows, epochs=1)).id == "job_1"
            return rows

    assert threading.get_ident() not in asyncio.run(awaited()).threads
    before = threading.active_count()
    with gh.Client(serve(training()), "k") as client:
        rows = Rows()
        client.train(LAYERS, rows, epochs=1)
        assert rows.threads == {threading.get_ident()}
        assert threading.active_count() == before


def test_waiting_can_be_cut_short_and_the_client_continues(serve: Serve):
    async def wait() -> None:
        async with gh.AsyncClient(serve(training()), "k") as client:
            found = await client.jobs.get("job_1")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await found.wait()
            assert (await found.refresh()).state == "running"

    asyncio.run(wait())


def streaming(closed: threading.Event) -> Route:
    """One event, and then nothing for as long as somebody listens."""

    async def stream(request: Request) -> Response:
        async def body() -> Any:
            yield b'id: 1\nevent: metrics\ndata: {"job":"job_1","seq":1,"type":"hatched"}\n\n'
            try:
                await asyncio.Event().wait()
            finally:
                closed.set()

        return StreamingResponse(body(), media_type="text/event-stream")

    return Route("/api/v1/jobs/job_1/stream", stream)


@pytest.mark.parametrize("leave", ["block", "cancel"])
def test_a_stream_that_is_left_closes_its_connection(serve: Serve, leave: str):
    closed = threading.Event()

    async def first(client: gh.AsyncClient, seen: asyncio.Event) -> None:
        found = await client.jobs.get("job_1")
        async with found.stream() as stream:
            async for event in stream:
                assert event.seq == 1
                seen.set()
                if leave == "block":
                    return

    async def watch() -> None:
        async with gh.AsyncClient(serve([*training(), streaming(closed)]), "k") as client:
            seen = asyncio.Event()
            task = asyncio.create_task(first(client, seen))
            await asyncio.wait_for(seen.wait(), 60)
            if leave == "cancel":
                task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() == (leave == "cancel")
            assert await asyncio.to_thread(closed.wait, 60)

    asyncio.run(watch())


def test_a_hundred_and_fifty_streams_leave_room_for_other_requests(serve: Serve):
    async def watch() -> None:
        closed = threading.Event()
        async with gh.AsyncClient(serve([*training(), streaming(closed)]), "k") as client:
            found = await client.jobs.get("job_1")
            streams = [found.stream() for _ in range(150)]
            events = await asyncio.gather(*(anext(aiter(stream)) for stream in streams))
            assert [event.seq for event in events] == [1] * 150
            assert (await found.refresh()).id == "job_1"
            await asyncio.gather(*(stream.close() for stream in streams))

    asyncio.run(watch())


def test_other_options_go_over_the_same_connections(connect: Callable[..., gh.Client]):
    asked: list[str] = []

    def endpoint(request: Request) -> Response:
        asked.append(f"{request.client}")
        return answer(job())

    client = connect(Route("/api/v1/jobs/job_1", endpoint))
    patient = client.with_options(timeout=300.0, max_retries=0)
    assert patient._transport.timeout_s == 300.0
    assert patient._transport.max_retries == 0
    assert client._transport.timeout_s == 60.0
    client.jobs.get("job_1")
    patient.jobs.get("job_1")
    patient.close()
    client.jobs.get("job_1")
    assert len(asked) == 3
    assert len(set(asked)) == 1


def test_a_timeout_of_one_call_is_that_calls(connect: Callable[..., gh.Client]):
    async def slow(request: Request) -> Response:
        await asyncio.sleep(0.5)
        return answer(job())

    client = connect(Route("/api/v1/jobs/job_1", slow))
    with pytest.raises(gh.APITimeoutError):
        client.with_options(timeout=0.05, max_retries=0).jobs.get("job_1")
    assert client.jobs.get("job_1").id == "job_1"


def test_any_request_has_the_key_and_the_errors_of_all(connect: Callable[..., gh.Client]):
    asked: list[Request] = []

    async def endpoint(request: Request) -> Response:
        asked.append(request)
        return answer({"body": await request.json()})

    client = connect(Route("/api/v1/new", endpoint, methods=["POST"]))
    response = client.request("POST", "/api/v1/new", params={"a": [1, 2]}, json={"b": float("nan")})
    assert response.json() == {"body": {"b": "NaN"}}
    assert asked[0].headers["authorization"] == "Bearer gh_test"
    assert asked[0].query_params.getlist("a") == ["1", "2"]
    with pytest.raises(gh.NotFoundError):
        client.request("GET", "/api/v1/nothing")
