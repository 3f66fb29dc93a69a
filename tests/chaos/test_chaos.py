"""Everything dies at random, and every job ends as if nothing had happened.

``make chaos`` runs it at full length: ``CHAOS_KILLS`` SIGKILLs over API, workers, fork servers,
ranks and broker while ``CHAOS_JOBS`` short jobs and a fifteenth as many longer ones run, and as
many more short ones as it takes to have some in hand until the last kill, on SQLite and on
PostgreSQL. ``CHAOS_SEED`` repeats a choice of victims, as far as time lets it.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

import glasshouse as gh
from tests.acceptance.services import Cluster
from tests.acceptance.specs import lasting, small
from tests.chaos.failover_client import FailoverClient
from tests.chaos.monkey import Monkey, leftovers, ranks
from tests.chaos.verifier import Record, record_of
from tests.waiting import until

NUM_KILLS = int(os.environ.get("CHAOS_KILLS", "20"))
NUM_SHORT = int(os.environ.get("CHAOS_JOBS", "20"))
NUM_LONG = max(2, NUM_SHORT // 15)
SEED = int(os.environ.get("CHAOS_SEED", "0"))
OVER = ("succeeded", "failed", "cancelled")
NUM_IN_HAND = 4
"""Two for each worker, one to run and one to wait: a kill of an idle service proves little."""
PATIENCE_S = 120 + 15.0 * NUM_KILLS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S * 3)]


@pytest.fixture
def cluster(database_url: str) -> Generator[Cluster]:
    """Two APIs and two workers with a broker, on either database."""
    started = Cluster(database_url)
    try:
        started.start()
        yield started
    finally:
        started.stop()


def specs(dataset: str) -> dict[str, dict[str, Any]]:
    often = {"every_steps": 5, "keep_last": 2}
    calm = {"max_restarts": 1000}
    watched = {"layers": ["fc"], "kinds": ["output", "param_grad"], "every": 10}
    return {
        "short": small(dataset, stop={"steps": 20}, checkpoint=often, retry=calm),
        "long": lasting(
            dataset,
            300,
            checkpoint={"every_steps": 20, "keep_last": 2},
            retry=calm,
            probes=[watched | {"max_overhead": None}],
        ),
    }


def follow(cluster: Cluster, job: str, seen: list[int]) -> threading.Thread:
    """Read a job's stream to its end, over every reconnect."""

    def read(client: gh.Client) -> None:
        events = client.jobs.get(job).stream(after=len(seen), attempt="all", give_up_after_s=5)
        seen.extend(event.seq for event in events)

    def run() -> None:
        with FailoverClient(cluster, PATIENCE_S) as failover_client:
            failover_client.ask(read)

    thread = threading.Thread(target=run, name=f"follow-{job}", daemon=True)
    thread.start()
    return thread


@pytest.fixture
def failover_client(cluster: Cluster) -> Generator[FailoverClient]:
    """Whichever API of the cluster lives."""
    with FailoverClient(cluster, PATIENCE_S) as opened:
        yield opened


def test_whatever_dies_every_job_ends_as_if_nothing_had(
    cluster: Cluster, failover_client: FailoverClient
):
    with cluster.endpoint("one").client() as client:
        dataset = client.datasets.create(builtin="digits").id
    golden = {kind: undisturbed(cluster, spec) for kind, spec in specs(dataset).items()}
    before = leftovers(cluster)
    monkey = Monkey(cluster, seed=SEED, num_kills=NUM_KILLS, pause_s=(0.2, 2.0))
    made: dict[str, str] = {}
    streams: dict[str, tuple[list[int], threading.Thread]] = {}
    kinds = ["long"] * NUM_LONG + ["short"] * NUM_SHORT
    wanted = specs(dataset)
    try:
        for kind in kinds:
            job = failover_client.ask(lambda client, kind=kind: client.jobs.create(wanted[kind]).id)
            made[job] = kind
            if kind == "long":
                seen: list[int] = []
                streams[job] = (seen, follow(cluster, job, seen))
        made |= dict.fromkeys(keep_busy(failover_client, monkey, wanted["short"]), "short")
    finally:
        monkey.stop()
    states = until(lambda: all_ended(failover_client, made), PATIENCE_S, "the end of all jobs")
    assert set(states.values()) == {"succeeded"}, failures(failover_client, states)
    with cluster.endpoint("one").http() as http:
        for job, kind in made.items():
            found = record_of(http, job)
            assert found.metrics == golden[kind].metrics, job
            assert found.log == golden[kind].log, job
            assert found.weights == golden[kind].weights, job
    for seen, thread in streams.values():
        thread.join(60)
        assert not thread.is_alive(), "a stream has not ended with its job"
        assert seen == [*range(1, len(seen) + 1)], "a stream lost, doubled or mixed up events"
        assert len(seen) > 300, "a stream saw less than its job said"
    cluster.await_workers()
    until(lambda: not ranks(cluster), 60, "the end of the last rank")
    assert leftovers(cluster) <= before
    told = {
        "killed": dict(monkey.killed),
        "jobs": len(made),
        "attempts": attempts(failover_client, made),
    }
    sys.stdout.write(json.dumps({"chaos": told}) + "\n")
    assert told["attempts"] > len(made), "nothing that ran was hit: the run proves nothing"


def undisturbed(cluster: Cluster, spec: dict[str, Any]) -> Record:
    with cluster.endpoint("one").client() as client:
        job = client.jobs.create(spec).wait(timeout=PATIENCE_S)
        job.raise_if_unsuccessful()
    with cluster.endpoint("one").http() as http:
        return record_of(http, job.id)


def keep_busy(failover_client: FailoverClient, monkey: Monkey, spec: dict[str, Any]) -> list[str]:
    """Submit until the last kill, whenever few jobs are left; the jobs submitted."""
    added: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    while not monkey.is_done:
        assert time.monotonic() < deadline, "the last kill has not come"
        if num_in_hand(failover_client) < NUM_IN_HAND:
            added.append(failover_client.ask(lambda client: client.jobs.create(spec).id))
        else:
            time.sleep(0.1)
    return added


def num_in_hand(failover_client: FailoverClient) -> int:
    """How many jobs have not ended."""
    states = failover_client.ask(lambda client: [job.state for job in client.jobs.list()])
    return sum(state not in OVER for state in states)


def all_ended(failover_client: FailoverClient, made: dict[str, str]) -> dict[str, str] | None:
    def look(client: gh.Client) -> dict[str, str]:
        return {job.id: job.state for job in client.jobs.list() if job.id in made}

    states = failover_client.ask(look)
    over = all(state in OVER for state in states.values())
    if not over or len(states) < len(made):
        time.sleep(0.5)
        return None
    return states


def failures(failover_client: FailoverClient, states: dict[str, str]) -> list[Any]:
    bad = [job for job, state in states.items() if state != "succeeded"]
    return [
        failover_client.ask(lambda client, job=job: client.jobs.get(job).data) for job in bad[:3]
    ]


def attempts(failover_client: FailoverClient, made: dict[str, str]) -> int:
    return sum(
        failover_client.ask(lambda client, job=job: client.jobs.get(job).data["attempt"])
        for job in made
    )
