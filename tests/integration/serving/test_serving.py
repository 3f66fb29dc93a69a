"""Requests to replicas that are killed, stand still, are full or close; the versions they serve."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from glasshouse import frames
from glasshouse.frames import Kind
from models.jobs import jobs, pausing
from tests.integration.serving.service import (
    ROW,
    Answer,
    Service,
    read_answer,
    rss_bytes,
    statuses,
)
from tests.integration.serving.test_peers import Peer
from tests.waiting import until

SLOW = {"misbehave": "be-slow", "at": "compute", "hit": "each"}
"""Labels of a job whose batches take 0.05 s."""
SLOWER = SLOW | {"misbehave": "pause"}
"""0.3 s."""
NUM_CLIENTS = 16


@pytest.fixture
def model(service: Service) -> str:
    """The name of a model of its own with the version 1."""
    name = f"m-{uuid4().hex[:8]}"
    service.publish(name, service.checkpoint(), "live")
    return name


def gather(*asked: Any) -> list[Answer]:
    async def act() -> list[Answer]:
        return list(await asyncio.gather(*asked))

    return asyncio.run(act())


async def seen(look: Callable[[], bool]) -> None:
    """Wait until something is so, while clients wait for answers."""
    await asyncio.to_thread(until, look, longest_pause_s=0.01)


def test_a_request_is_answered_by_the_version_that_is_served(service: Service, model: str):
    service.serve(model)
    answer = service.predict(model, 3)
    assert answer.version == 1
    assert answer.headers["x-model-version"] == f"{model}:1"
    assert len(answer.document["outputs"]["fc2/value"]) == 3


# --- replicas that end ---------------------------------------------------------------------------


def test_a_killed_replica_loses_no_request(service: Service, model: str):
    job = service.serve(model, labels=SLOW, max_batch_size=1)
    pid = service.harness.rank_pid(job)

    async def act() -> list[Answer]:
        asked = [asyncio.ensure_future(service.ask(model, timeout_s=60)) for _ in range(40)]
        await seen(lambda: sum(one.done() for one in asked) >= 5)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*asked)

    assert statuses(asyncio.run(act())) == {200: 40}
    assert [one.exit_kind for one in service.harness.attempts(job)] == ["killed_from_outside", None]


def test_crashes_after_requests_were_answered_are_no_crash_loop(service: Service, model: str):
    job = service.serve(model)
    for attempt in range(1, 5):
        assert service.predict(model, timeout_s=60).version == 1
        assert service.harness.job(job).attempt == attempt
        os.kill(service.harness.rank_pid(job), signal.SIGSEGV)
    assert service.predict(model, timeout_s=60).version == 1
    kinds = [one.exit_kind for one in service.harness.attempts(job)]
    assert kinds == ["crash"] * 4 + [None]


def test_a_replica_that_crashes_while_it_loads_ends_its_job(service: Service, model: str):
    labels = {"misbehave": "crash", "at": "load"}
    job = service.serve(model, labels=labels, wait=False)
    found = service.harness.wait(job)
    assert (found.state, found.state_reason) == ("failed", "crash_loop")
    assert len(service.harness.attempts(job)) == 3
    assert service.predict(model).status == 404


def test_a_replica_that_stands_still_is_restarted(service: Service, model: str):
    job = service.serve(model, stall_timeout_s=3)
    assert service.predict(model).version == 1
    os.kill(service.harness.rank_pid(job), signal.SIGSTOP)
    assert gather(*(service.ask(model, timeout_s=0.5) for _ in range(3)))[0].status == 504
    assert service.predict(model, timeout_s=60).version == 1
    kinds = [one.exit_kind for one in service.harness.attempts(job)]
    assert kinds == ["stalled", None]


def two_replicas(service: Service, model: str, **changes: Any) -> tuple[str, str]:
    """Serve a model with two replicas, both of which have answered requests."""
    job = service.serve(model, replicas={"min": 2, "max": 2}, **changes)
    child = until(lambda: service.children(job))[0].id
    until(lambda: service.listens(child), what="listening")

    def both_answered() -> bool:
        gather(*(service.ask(model) for _ in range(2)))
        return all(service.replica(one).traffic.get("requests") for one in (job, child))

    until(both_answered)
    return job, child


def test_requests_go_to_another_replica_if_one_stands_still(service: Service, model: str):
    job, child = two_replicas(service, model)
    assert [one.parent for one in service.children(job)] == [job]
    os.kill(service.harness.rank_pid(job), signal.SIGSTOP)
    try:
        found = [service.predict(model, timeout_s=1.5) for _ in range(8)]
        counted = statuses(found)
        assert counted[200] >= 7, counted
        assert counted.get(504, 0) <= 1, counted
    finally:
        os.kill(service.harness.rank_pid(job), signal.SIGCONT)
    service.end(job)
    until(lambda: service.harness.job(child).state == "cancelled")


def test_a_request_goes_to_another_replica_if_the_queue_of_one_is_full(
    service: Service, model: str
):
    """Requests of another API process have filled it."""
    labels = SLOWER | {"misbehave": "doze"}
    limits = {"max_batch_size": 1, "max_queue": 2}
    job, _ = two_replicas(service, model, labels=labels, **limits)
    replica = service.replica(job)
    with Peer(replica.address) as peer:
        peer.greet(replica.token)
        assert peer.read() is not None
        body = json.dumps({"inputs": {"x": [ROW]}}).encode()
        head = {"reference": model, "protocol": "predict", "content_type": "application/json"}
        for number in range(1, 10):
            peer.send(b"".join(map(bytes, frames.pack_parts(Kind.REQUEST, number, head, body))))
        refused = peer.read()
        assert refused is not None
        assert refused.head["code"] == "queue_full"
        assert statuses(gather(*(service.ask(model) for _ in range(2)))) == {200: 2}


# --- full queues, priorities, deadlines ----------------------------------------------------------


def test_a_full_queue_refuses_and_loses_nothing(service: Service, model: str):
    service.serve(model, labels=SLOW, max_batch_size=1, max_queue=4)
    found = gather(*(service.ask(model) for _ in range(64)))
    counted = statuses(found)
    assert counted[200] + counted[429] == 64, counted
    assert 4 <= counted[200] < 64
    for one in found:
        if one.status == 429:
            assert one.document["code"] == "queue_full"
            assert int(one.headers["retry-after"]) >= 1


def test_a_thousand_clients_at_once(service: Service, model: str):
    job = service.serve(model, max_queue=100)
    pids = (service.api.process.pid, service.harness.rank_pid(job))

    def wave() -> tuple[int, ...]:
        counted = statuses(gather(*(service.ask(model) for _ in range(1000))))
        assert counted.get(200, 0) + counted.get(429, 0) == 1000, counted
        assert counted[200] >= 100
        return tuple(rss_bytes(pid) for pid in pids)

    wave()
    before, after = wave(), wave()
    assert all(b - a < 16 << 20 for a, b in zip(before, after, strict=True)), (before, after)


def test_the_urgent_requests_are_answered_first(service: Service, model: str, tmp_path: Path):
    reached = tmp_path / "reached"
    labels = SLOWER | {"reached": str(reached)}
    job = service.serve(model, labels=labels, max_batch_size=1, max_queue=6)
    order: list[str] = []

    async def ask(name: str, **query: Any) -> Answer:
        found = await service.ask(model, **query)
        order.append(name)
        return found

    async def act() -> list[Answer]:
        asked = [asyncio.ensure_future(ask("first"))]
        await seen(reached.exists)
        asked += [asyncio.ensure_future(ask("low", priority=-1)) for _ in range(6)]
        await asyncio.sleep(0.05)
        asked.append(asyncio.ensure_future(ask("high", priority=1)))
        return await asyncio.gather(*asked)

    found = asyncio.run(act())
    assert statuses(found) == {200: 7, 429: 1}  # the queue was full: one made room
    assert found[0].status == found[-1].status == 200
    assert order.index("high") < len(order) - 4, order
    assert service.wait_answered(job, 7) == 8


def test_a_request_that_is_late_is_not_computed(service: Service, model: str, tmp_path: Path):
    reached = tmp_path / "reached"
    labels = SLOWER | {"misbehave": "doze", "reached": str(reached)}
    job = service.serve(model, labels=labels, max_batch_size=1)

    async def act() -> list[Answer]:
        first = asyncio.ensure_future(service.ask(model))
        await seen(reached.exists)
        late = await asyncio.gather(*(service.ask(model, timeout_s=0.05) for _ in range(5)))
        assert not first.done()
        return [await first, *late]

    found = asyncio.run(act())
    assert statuses(found) == {200: 1, 504: 5}
    assert service.predict(model).status == 200
    assert service.wait_answered(job, 2) == 7


# --- clients -------------------------------------------------------------------------------------


def test_a_request_whose_client_left_is_not_computed(service: Service, model: str, tmp_path: Path):
    reached = tmp_path / "reached"
    labels = SLOWER | {"misbehave": "doze", "reached": str(reached)}
    job = service.serve(model, labels=labels, max_batch_size=1)

    async def act() -> list[Answer]:
        first = asyncio.ensure_future(service.ask(model))
        await seen(reached.exists)
        leaving = [await service.send(model) for _ in range(5)]
        await asyncio.sleep(0.3)  # so that the API has sent them on
        for _, writer in leaving:
            writer.close()
        return [await first, await service.ask(model)]

    assert statuses(asyncio.run(act())) == {200: 2}
    assert service.wait_answered(job, 2) == 7


def test_slow_clients_hold_nobody_up(service: Service, model: str):
    service.serve(model)
    whole = service.request(model, 4096)

    async def act() -> list[Answer]:
        dribbling = [await service.connect() for _ in range(20)]
        for _, writer in dribbling:
            writer.write(whole[: len(whole) // 2])
        unread = [await service.send(model, 4096) for _ in range(20)]  # read no answer
        others = await asyncio.gather(*(service.ask(model) for _ in range(50)))
        for _, writer in dribbling:
            writer.write(whole[len(whole) // 2 :])
        found = [await read_answer(reader) for reader, _ in dribbling]
        for _, writer in (*dribbling, *unread):
            writer.close()
        return [*others, *found]

    assert statuses(asyncio.run(act())) == {200: 70}


# --- versions ------------------------------------------------------------------------------------


async def load(service: Service, name: str, ends: asyncio.Event) -> list[Answer]:
    """Requests of one client, one after the other."""
    found: list[Answer] = []
    while not ends.is_set():
        found.append(await service.ask(name))
    return found


def under_load(
    service: Service, name: str, act: Callable[[], Any], seen: Callable[[], bool]
) -> list[list[Answer]]:
    """Do something while clients send requests; end when it was seen. Return their answers."""

    async def run() -> list[list[Answer]]:
        ends = asyncio.Event()
        clients = [asyncio.ensure_future(load(service, name, ends)) for _ in range(NUM_CLIENTS)]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(act)
        await asyncio.to_thread(until, seen)
        await asyncio.sleep(0.3)
        ends.set()
        return await asyncio.gather(*clients)

    return asyncio.run(run())


def served(service: Service, job: str) -> int:
    (one,) = service.replica(job).models
    return int(one["version"])


def test_an_alias_moves_under_load_and_back(service: Service, model: str):
    second = service.publish(model, service.checkpoint(2))
    job = service.serve(f"{model}@live")
    name = f"{model}@live"
    assert service.predict(name).version == 1
    path = f"/api/v1/models/{model}"
    with service.api.client(service.key) as client:
        refused = client.delete(f"{path}/versions/1")
        assert (refused.status_code, refused.json()["code"]) == (409, "model_in_use")
        assert client.delete(path).status_code == 409
    for to in (second, 1, second):
        before = 1 if to == second else second
        answers = under_load(
            service,
            name,
            lambda to=to: service.move(model, live=to),
            lambda to=to: served(service, job) == to,
        )
        for client_answers in answers:
            versions = [one.version for one in client_answers]  # all were answered
            assert versions == sorted(versions, reverse=to < before)
        assert {one.version for some in answers for one in some} == {1, second}
    values = {service.predict(name).document["outputs"]["fc2/value"][0][0]}
    service.move(model, live=1)
    until(lambda: served(service, job) == 1)
    values.add(service.predict(name).document["outputs"]["fc2/value"][0][0])
    assert len(values) == 2  # the weights changed as well
    service.move(model, live=second)
    until(lambda: served(service, job) == second)
    with service.api.client(service.key) as client:
        assert client.delete(f"{path}/versions/1").status_code == 204
        assert client.delete(f"{path}/versions/{second}").status_code == 409
    service.end(job)
    with service.api.client(service.key) as client:
        assert client.delete(path).status_code == 204


def test_a_damaged_version_leaves_the_one_before_in_place(service: Service, model: str):
    damaged = service.publish(model, service.damaged_checkpoint())
    good = service.publish(model, service.checkpoint(2))
    job = service.serve(f"{model}@live")
    service.move(model, live=damaged)

    def problems() -> list[str]:
        told = service.harness.payloads(job, "serving")
        return [event["problem"] for event in told if event["problem"]]

    (problem,) = until(problems)
    assert "model.safetensors" in problem or "weights" in problem, problem
    assert service.predict(f"{model}@live").version == 1
    service.move(model, live=good)
    until(lambda: service.predict(f"{model}@live").version == good)
    assert len(problems()) == 1


def bounds(num: int, share: float, risk: float = 5e-7) -> tuple[int, int]:
    """The interval outside of which a binomial variable is at each end with at most this risk."""
    chances = [comb(num, k) * share**k * (1 - share) ** (num - k) for k in range(num + 1)]
    low = next(k for k in range(num + 1) if sum(chances[: k + 1]) > risk)
    high = next(k for k in range(num, -1, -1) if sum(chances[k:]) > risk)
    return low, high


def test_a_canary_gets_its_share_and_a_shadow_is_compared(service: Service, model: str):
    second = service.publish(model, service.checkpoint(2))
    canary = {"model": f"{model}:{second}", "share": 0.3}
    shadow = {"model": f"{model}:{second}", "share": 1.0}
    job = service.serve({"model": f"{model}@live", "canary": canary, "shadow": shadow})
    num, found = 20 * NUM_CLIENTS, list[Answer]()
    while len(found) < num:
        found += gather(*(service.ask(f"{model}@live") for _ in range(NUM_CLIENTS)))
    low, high = bounds(num, 0.3)
    assert 50 < low < 96 < high < 145
    assert low <= sum(one.version == second for one in found) <= high
    service.wait_answered(job, num)
    assert set(service.replica(job).traffic["answered"]) == {f"{model}:1", f"{model}:{second}"}
    compared = until(lambda: service.replica(job).traffic.get("shadows"))[f"{model}:{second}"]
    assert compared["requests"] > 0
    assert compared["max_difference"] > 0


# --- pauses --------------------------------------------------------------------------------------


def test_requests_in_the_queue_are_answered_before_a_pause(service: Service, model: str):
    job = service.serve(model, labels=SLOW, max_batch_size=1)

    async def act() -> list[Answer]:
        asked = [asyncio.ensure_future(service.ask(model)) for _ in range(20)]
        await seen(asked[0].done)
        await asyncio.to_thread(pause)
        return await asyncio.gather(*asked)

    def pause() -> None:
        with service.harness.database.write() as tx:
            pausing.request_pause(tx, jobs.get(tx, job, None))

    assert statuses(asyncio.run(act())) == {200: 20}
    service.harness.wait(job, "paused")
    refused = service.predict(model)
    assert (refused.status, refused.document["code"]) == (404, "model_not_served")
    assert "paused" in refused.document["detail"]
    with service.harness.database.write() as tx:
        pausing.request_resume(tx, jobs.get(tx, job, None))
    until(lambda: service.predict(model, timeout_s=60).status == 200)


@pytest.mark.parametrize("at", ["drain", "stop"])
def test_a_request_that_comes_while_an_idle_replica_closes(
    service: Service, model: str, at: str, tmp_path: Path
):
    """At ``drain`` it still gets into the queue; at ``stop`` the job is resumed for it."""
    reached = tmp_path / "reached"
    labels = {"misbehave": "pause", "at": at, "reached": str(reached), "attempts": "1"}
    job = service.serve(model, replicas={"min": 0, "max": 1}, idle_s=0.5, labels=labels)
    until(reached.exists)
    assert service.predict(model, timeout_s=60).version == 1
    assert service.harness.wait(job, "paused").state_reason == "no request came for idle_s"
    assert service.predict(model, timeout_s=60).version == 1
    assert service.harness.job(job).attempt >= 2


@pytest.mark.slow
def test_requests_at_random_times_around_a_pause_are_all_answered(service: Service, model: str):
    service.serve(model, replicas={"min": 0, "max": 1}, idle_s=0.5)
    drawn = random.Random(1)  # noqa: S311 (pauses)
    for _ in range(20):
        assert service.predict(model, timeout_s=60).version == 1
        time.sleep(drawn.uniform(0.3, 1.2))


@pytest.mark.slow
def test_a_worker_that_stops_answers_what_waits_and_queues_the_job(service: Service, model: str):
    harness = service.harness
    job = service.serve(model, labels=SLOW, max_batch_size=1)
    worker = harness.workers["w1"]

    async def act() -> list[Answer]:
        asked = [asyncio.ensure_future(service.ask(model, timeout_s=60)) for _ in range(30)]
        await seen(asked[0].done)
        worker.terminate()
        await asyncio.to_thread(worker.wait, 60)
        assert await asyncio.to_thread(harness.wait, job, "queued")
        harness.start_worker(misbehaving=True, wait=False, CPU_CORES="6")
        return await asyncio.gather(*asked)

    assert statuses(asyncio.run(act())) == {200: 30}
    assert harness.attempts(job)[0].exit_kind == "interrupted"
    assert service.predict(model, timeout_s=60).version == 1


# --- scaling -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_replicas_are_added_under_load_and_end_when_they_are_spare(service: Service, model: str):
    job = service.serve(
        model,
        labels=SLOW,
        max_batch_size=1,
        replicas={"min": 0, "max": 2},
        idle_s=2.0,
    )

    def child_answers() -> bool:
        return any(
            service.listens(one.id) and service.replica(one.id).traffic.get("requests")
            for one in service.children(job)
        )

    answers = under_load(service, model, lambda: None, child_answers)
    assert statuses(one for some in answers for one in some).keys() == {200}
    (child,) = service.children(job)
    assert service.harness.wait(job, "paused").state_reason == "no request came for idle_s"
    ended = service.harness.job(child.id)
    assert (ended.state, ended.state_reason) == ("cancelled", "no longer needed as a replica")
    assert service.predict(model, timeout_s=60).version == 1
