"""A line that breaks again and again: the client loses no event and doubles none."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import glasshouse as gh
from tests.acceptance.services import LocalService
from tests.acceptance.specs import lasting
from tests.acceptance.sse import polled
from tests.cutting_proxy import Cutter

NUM_CUTS = 50


def by_blocking(url: str, key: str, job_id: str) -> list[dict[str, Any]]:
    with gh.Client(url, key) as client:
        return list(client.jobs.get(job_id).stream().records())


def by_awaiting(url: str, key: str, job_id: str) -> list[dict[str, Any]]:
    async def stream() -> list[dict[str, Any]]:
        async with gh.AsyncClient(url, key) as client:
            job = await client.jobs.get(job_id)
            return [record async for record in job.stream().records()]

    return asyncio.run(stream())


@pytest.mark.parametrize("stream", [by_blocking, by_awaiting])
def test_a_stream_that_is_cut_50_times_while_the_job_runs_gives_every_event_once(
    local_service: LocalService,
    client: gh.Client,
    digits: str,
    stream: Callable[..., list[dict[str, Any]]],
):
    spec = lasting(digits, 800)
    spec["data"]["batch_size"] = 400  # slow enough that the reader catches up with it
    job = client.jobs.create(spec)
    with Cutter(local_service.url, cuts=NUM_CUTS, bytes_each=(1500, 6000), seed=3) as cutter:
        events = stream(cutter.url, local_service.key, job.id)
    assert cutter.made == NUM_CUTS, "the job ended before the line was cut often enough"
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events == polled(local_service, job.id)
    assert events[-1]["type"] == "end"


def test_several_jobs_on_one_line_that_is_cut_give_every_event_once(
    local_service: LocalService, client: gh.Client, digits: str
):
    jobs = [client.jobs.create(lasting(digits, 200)).id for _ in range(3)]
    found: dict[str, list[dict[str, Any]]] = {job: [] for job in jobs}
    with (
        Cutter(local_service.url, cuts=NUM_CUTS, bytes_each=(3000, 12000), seed=4) as cutter,
        gh.Client(cutter.url, local_service.key) as far,
    ):
        for record in far.stream(jobs).records():
            found[record["job"]].append(record)
    assert cutter.made > 5
    for job in jobs:
        assert found[job] == polled(local_service, job)


def test_a_training_that_is_asked_to_stop_ends_well_and_early(client: gh.Client, digits: str):
    class Enough(gh.Callback):
        def on_train_batch_end(self, step: int, logs: dict[str, float]) -> str | None:
            return "stop" if step == 10 else None

    job = client.jobs.create(lasting(digits, 1_000_000)).watch(Enough())
    assert job.state == "succeeded"
    steps = job.metrics("loss").steps
    assert 10 < len(steps) < 1_000_000
    assert job.checkpoints()[-1].step == len(steps)
    losses = [one.metrics["loss"] for one in job.checkpoints()]
    assert job.best_checkpoint("loss").metrics["loss"] == min(losses)
    assert "is succeeded" in str(job.explain())
