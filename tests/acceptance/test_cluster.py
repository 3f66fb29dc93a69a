"""Two APIs and two workers on PostgreSQL and Valkey: any of them may die, and nothing is lost."""

from collections.abc import Generator
from typing import Any

import httpx2
import pytest

from tests.acceptance.services import Cluster
from tests.acceptance.specs import lasting, small
from tests.acceptance.sse import Line, polled
from tests.waiting import until

ENDED = ("succeeded", "failed", "cancelled")
ENDLESS = 1_000_000


@pytest.fixture
def one(cluster: Cluster) -> Generator[httpx2.Client]:
    """The first API, while both workers are free."""
    cluster.await_workers()
    with cluster.endpoint("one").http() as http:
        yield http


@pytest.fixture
def two(cluster: Cluster) -> Generator[httpx2.Client]:
    with cluster.endpoint("two").http() as http:
        yield http


@pytest.fixture(scope="module")
def digits(cluster: Cluster) -> str:
    with cluster.endpoint("one").client() as client:
        return client.datasets.create(builtin="digits").id


def submit(http: httpx2.Client, spec: dict[str, Any]) -> str:
    answer = http.post("/jobs", json=spec)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def on_worker(name: str) -> dict[str, Any]:
    return {"type": "cpu", "threads": 1, "worker": name}


def job_of(http: httpx2.Client, job: str) -> dict[str, Any]:
    return http.get(f"/jobs/{job}").raise_for_status().json()


def reach(http: httpx2.Client, job: str, step: int) -> dict[str, Any]:
    """The job, once it has made so many steps."""

    def reached() -> dict[str, Any] | None:
        row = job_of(http, job)
        assert row["state"] not in ENDED, row
        return row if (row["progress"] or {}).get("step", 0) >= step else None

    return until(reached, what=f"step {step}")


def succeed(http: httpx2.Client, job: str) -> dict[str, Any]:
    """The job, once it has succeeded."""

    row = until(lambda: ended_row(http, job), 200, "the end of the job")
    assert row["state"] == "succeeded", row
    return row


def stop(http: httpx2.Client, *jobs: str) -> None:
    """End jobs that have no end of their own, and wait until they have let go of their devices."""
    for job in jobs:
        http.post(f"/jobs/{job}/cancel").raise_for_status()
    for job in jobs:
        row = until(lambda job=job: ended_row(http, job), what="the end of a cancelled job")
        assert row["state"] == "cancelled", row


def ended_row(http: httpx2.Client, job: str) -> dict[str, Any] | None:
    row = job_of(http, job)
    return row if row["state"] in ENDED else None


def loss_of(http: httpx2.Client, job: str) -> tuple[list[int], list[float]]:
    query = {"name": "loss", "max_points": 100_000}
    found = http.get(f"/jobs/{job}/metrics/query", params=query).raise_for_status().json()
    return found["step"], found["values"]["loss"]


def check_one_end(cluster: Cluster, job: str) -> None:
    """The log of the job is whole, and it ended once."""
    events = polled(cluster.endpoint("two"), job, attempt="all")
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert [event["type"] for event in events].count("end") == 1
    assert events[-1]["type"] == "end"


def test_a_job_of_one_api_is_watched_through_the_other(cluster: Cluster, one, two, digits: str):
    job = submit(one, lasting(digits, 200))
    received = Line(cluster.endpoint("two"), job).read()
    assert received.complete
    assert received.events == polled(cluster.endpoint("one"), job)
    losses = [event for event in received.events if "loss" in event.get("values", ())]
    assert [event["step"] for event in losses] == list(range(200))
    assert job_of(two, job)["state"] == "succeeded"


def test_jobs_spread_over_the_workers(one, two, digits: str):
    made = [submit(http, lasting(digits, ENDLESS)) for http in (one, two)]
    workers = [device["worker"] for job in made for device in reach(two, job, 1)["devices"]]
    assert sorted(workers) == ["north", "south"]
    stop(one, *made)


@pytest.mark.parametrize("worker", ["north", "south"])
def test_a_job_runs_on_the_worker_that_it_asks_for(worker: str, one, digits: str):
    jobs = [submit(one, small(digits, devices=on_worker(worker))) for _ in range(2)]
    for job in jobs:
        succeed(one, job)
        reasons = [event for event in polled_states(one, job) if event["to"] == "running"]
        assert len(reasons) == 1
        assert workers_of(one, job) == [worker]


def polled_states(http: httpx2.Client, job: str) -> list[dict[str, Any]]:
    return http.get(f"/jobs/{job}/events?types=state").raise_for_status().json()["data"]


def workers_of(http: httpx2.Client, job: str) -> list[str]:
    return sorted({device["worker"] for device in job_of(http, job)["devices"]})


def test_a_job_whose_worker_is_killed_runs_again_on_the_other(
    cluster: Cluster, one, two, digits: str
):
    job = submit(one, lasting(digits, 1500))
    first = reach(one, job, 100)["devices"][0]["worker"]
    cluster.kill_worker(first)
    try:
        other = until(lambda: other_worker(two, job, first), what="the second attempt")
        assert {first, other} == {"north", "south"}
        row = succeed(two, job)
    finally:
        cluster.start_worker(first)
    assert row["attempt"] == 2
    steps, losses = loss_of(one, job)
    assert steps == list(range(1500))
    assert None not in losses
    check_one_end(cluster, job)
    same = submit(one, lasting(digits, 300))
    succeed(one, same)
    assert loss_of(one, same)[1] == losses[:300], "another attempt gives other numbers"


def other_worker(http: httpx2.Client, job: str, first: str) -> str | None:
    row = job_of(http, job)
    workers = [device["worker"] for device in row["devices"] if device["worker"] != first]
    return workers[0] if workers and row["state"] == "running" else None


def test_a_stream_continues_through_the_other_api_when_one_is_killed(
    cluster: Cluster, one, two, digits: str
):
    job = submit(two, lasting(digits, ENDLESS))
    reach(two, job, 1)
    line = Line(cluster.endpoint("one"), job)
    received = b"".join(line.read_message() for _ in range(30))
    cluster.kill_api("one")
    try:
        stop(two, job)
        rest = line.read()
        assert not rest.complete
        before = type(rest)(200, received + rest.body, complete=False).events
        after = Line(cluster.endpoint("two"), job, before[-1]["seq"]).read()
        assert after.complete
        assert before + after.events == polled(cluster.endpoint("two"), job)
    finally:
        cluster.start_api("one")


def test_the_client_outlives_an_api_that_starts_again(cluster: Cluster, two, one, digits: str):
    job = submit(two, lasting(digits, 1000))
    numbers: list[int] = []
    with cluster.endpoint("one").client() as client:
        for event in client.jobs.get(job).stream():
            numbers.append(event.seq)
            if len(numbers) == 50:
                cluster.kill_api("one")
                cluster.start_api("one")
    assert numbers == [event["seq"] for event in polled(cluster.endpoint("two"), job)]


def test_jobs_outlive_a_broker_that_forgets_everything(cluster: Cluster, one, digits: str):
    devices = on_worker("north")
    running = submit(one, lasting(digits, ENDLESS, devices=devices))
    waiting = [submit(one, small(digits, devices=devices)) for _ in range(2)]
    reach(one, running, 10)
    assert {job_of(one, job)["state"] for job in waiting} == {"queued"}
    cluster.broker.kill()
    meanwhile = submit(one, small(digits, devices=on_worker("south")))
    reach(one, running, job_of(one, running)["progress"]["step"] + 100)
    cluster.broker.start()
    stop(one, running)
    for job in (*waiting, meanwhile):
        succeed(one, job)
    for job in (running, *waiting, meanwhile):
        assert job_of(one, job)["attempt"] == 1
        check_one_end(cluster, job)
        steps, _ = loss_of(one, job)
        assert steps == list(range(len(steps)))


def test_a_network_trained_by_one_worker_infers_on_the_other(cluster: Cluster, one, digits: str):
    job = submit(one, small(digits, devices=on_worker("north")))
    succeed(one, job)
    rows = {"dataset": digits, "split": "test"}
    with cluster.endpoint("two").client() as client:
        found = client.infer(job, data=rows, outputs=["flat", "fc"], devices=on_worker("south"))
    assert {name: array.shape for name, array in found.items()} == {
        "flat": (250, 64),
        "fc": (250, 10),
        "fc/id": (250,),
        "fc/prob": (250,),
    }
