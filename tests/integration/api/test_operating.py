"""What the service says of its own health, and what it does when the disk is nearly full."""

import json
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.http.disk_full import fills
from glasshouse.versions import SAFE_SQLITE
from models.fleet import heartbeats, workers
from models.fleet.workers import FoundDevice
from tests.running import Api, connected, database_of, digits, running_api, small_job
from tests.waiting import until

GIB = 1024**3


@pytest.fixture
def own() -> Generator[Api]:
    with running_api() as api:
        yield api


def make_worker(api: Api, name: str = "w1") -> None:
    devices = [FoundDevice("cpu:0", "cpu", 0, "core")]
    with api.database.write() as tx:
        workers.register(tx, worker=name, host="h", pid=1, version="0", info={}, devices=devices)
        heartbeats.swept(tx, name)


def set_back(api: Api, column: str, seconds: float) -> None:
    """As if the worker had not done it for so long."""
    with closing(sqlite3.connect(api.home / "glasshouse.db")) as connection:
        connection.execute(
            f"UPDATE workers SET {column} = {column} - ?",  # noqa: S608
            (round(seconds * 1000),),
        )
        connection.commit()


def checks_until(client: httpx2.Client, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = client.get("/readyz").json()
        return found if holds(found) else None

    return until(look)


def test_a_worker_that_lives_but_is_unresponsive_or_does_not_sweep_is_reported(own: Api):
    make_worker(own)
    with own.client() as client:
        found = checks_until(client, lambda told: told["checks"]["workers"] == "ok")
        assert found["checks"]["sweepers"] == "ok"
        set_back(own, "canary_ms", 3 * 30 - 10)
        time.sleep(1.1)  # answers are a second old at most
        assert client.get("/readyz").json()["checks"]["workers"] == "ok"
        set_back(own, "canary_ms", 20)
        unresponsive = "1 of 1 workers do not receive notifications"
        checks_until(client, lambda told: told["checks"]["workers"] == unresponsive)
        set_back(own, "sweep_ms", 61)
        found = checks_until(client, lambda told: told["checks"]["sweepers"] != "ok")
        assert found["status"] == "degraded"
        with own.database.write() as tx:
            heartbeats.received_canary(tx, "w1")
            heartbeats.swept(tx, "w1")
        found = checks_until(client, lambda told: told["checks"]["sweepers"] == "ok")
        assert found["checks"]["workers"] == "ok"


def test_what_is_missing_degrades_the_service_and_only_a_monitor_sees_an_error(own: Api):
    with own.client() as client:
        found = client.get("/readyz")
        assert (found.status_code, found.json()["status"]) == (200, "degraded")
        assert found.json()["checks"]["broker"] == "the broker does not answer"
        assert found.json()["checks"]["database"] == "ok"
        strictly = client.get("/readyz", params={"strict": "true"})
        assert strictly.status_code == 503
        assert int(strictly.headers["retry-after"]) > 0
        assert strictly.json()["checks"] == found.json()["checks"]
        assert client.get("/readyz", params={"strict": "perhaps"}).status_code == 422
    warned = found.json()["warnings"]
    assert ("sqlite" in warned) == (sqlite3.sqlite_version_info < SAFE_SQLITE)


def test_a_database_that_takes_no_writes_does_not_stop_reading(own: Api):
    with own.client() as client, closing(sqlite3.connect(own.home / "glasshouse.db")) as other:
        other.isolation_level = None
        other.execute("BEGIN IMMEDIATE")
        try:
            found = checks_until(client, lambda told: told["checks"]["database_write"] != "ok")
            assert found["status"] == "degraded"
            assert found["checks"]["database"] == "ok"
            assert client.get("/api/v1/jobs").status_code == 200
        finally:
            other.execute("ROLLBACK")
        checks_until(client, lambda told: told["checks"]["database_write"] == "ok")


def test_without_its_database_an_api_asks_for_no_requests_and_comes_back_by_itself(postgres: str):
    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(connected(postgres), autocommit=True) as server:
        server.execute(f'CREATE DATABASE "{name}"')
        with running_api(database_of(postgres, name)) as api, api.client() as client:
            assert client.get("/readyz").status_code == 200
            server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
            server.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
            )
            found = checks_until(client, lambda told: told["status"] == "down")
            assert found["checks"]["database"] != "ok"
            assert client.get("/readyz").status_code == 503
            metrics = client.get("/livez")
            assert metrics.status_code == 200
            server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
            checks_until(client, lambda told: told["checks"]["database"] == "ok")
            assert client.get("/readyz").status_code == 200


def families(client: httpx2.Client) -> dict[str, Any]:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    return {found.name: found for found in text_string_to_metric_families(answer.text)}


def value(found: dict[str, Any], name: str, **labels: str) -> float:
    (one,) = [
        sample.value
        for sample in found[name].samples
        if labels.items() <= sample.labels.items() and not sample.name.endswith("_created")
    ]
    return one


def test_prometheus_reads_the_queue_the_workers_and_the_sizes(own: Api):
    make_worker(own)
    figures = {
        "events": 7,
        "ship_seconds": 1.5,
        "ship_buckets": [1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 1],
        "running": 3,
        "free_bytes": {"work": 5},
    }
    with own.client() as client:
        dataset = digits(client)
        client.post("/api/v1/jobs", json=small_job(dataset)).raise_for_status()
        with own.database.write() as tx:  # last: the figures of a silent worker are left out
            heartbeats.note(tx, "w1", figures)
        found = families(client)
    assert value(found, "glasshouse_jobs", state="queued") == 1
    assert value(found, "glasshouse_jobs", state="failed") == 0
    assert 0 <= value(found, "glasshouse_queue_age_seconds") < 600
    assert value(found, "glasshouse_events_shipped", worker="w1") == 7
    assert value(found, "glasshouse_worker_running_attempts", worker="w1") == 3
    assert value(found, "glasshouse_worker_free_bytes", worker="w1", place="work") == 5
    assert value(found, "glasshouse_workers", state="active") == 1
    assert value(found, "glasshouse_database_up") == 1
    assert value(found, "glasshouse_streams") == 0
    assert value(found, "glasshouse_wal_bytes") > 0
    assert value(found, "glasshouse_database_bytes") > 10_000
    assert value(found, "glasshouse_stored_bytes", what="datasets") >= 0
    for place in ("home", "artifacts", "work"):
        assert value(found, "glasshouse_free_bytes", place=place) > 0
    shipped = {
        (sample.name, sample.labels.get("le")): sample.value
        for sample in found["glasshouse_ship_seconds"].samples
    }
    assert shipped["glasshouse_ship_seconds_bucket", "0.02"] == 1
    assert shipped["glasshouse_ship_seconds_bucket", "1.0"] == 3
    assert shipped["glasshouse_ship_seconds_bucket", "+Inf"] == 4
    assert shipped["glasshouse_ship_seconds_count", None] == 4
    assert shipped["glasshouse_ship_seconds_sum", None] == 1.5


def test_nobody_can_make_prometheus_grow_by_asking_for_odd_things(own: Api):
    with own.client() as client:
        families(client)
        before = sum(len(family.samples) for family in families(client).values())
        for number in range(60):
            client.get(f"/nothing/{number}")
            client.get(f"/api/v1/jobs/job_{number}")
            client.request(f"ODD{number}", "/api/v1/jobs")
        found = families(client)
    assert sum(len(family.samples) for family in found.values()) < before + 60
    methods = {sample.labels["method"] for sample in found["glasshouse_http_requests"].samples}
    assert methods <= {"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS", "other"}
    assert value(found, "glasshouse_http_requests", route="/api/v1/jobs/{id}", status="404") == 60


def test_figures_need_a_key_that_may_read(own: Api):
    assert httpx2.get(f"{own.url}/metrics").status_code == 401


def test_the_buckets_are_those_that_workers_count_in():
    from api.routes.service.prometheus import _SHIP_BOUNDS
    from worker.context import BOUNDS_S

    assert [float(bound) for bound in _SHIP_BOUNDS] == [*BOUNDS_S, float("inf")]


@pytest.mark.parametrize(
    ("method", "path", "refused"),
    [
        ("POST", "/api/v1/jobs", True),
        ("POST", "/api/v1/datasets", True),
        ("POST", "/api/v1/checkpoints", True),
        ("POST", "/api/v1/jobs/job_1/fork", True),
        ("POST", "/api/v1/jobs/job_1/probes", True),
        ("POST", "/api/v1/jobs/job_1/cancel", False),
        ("POST", "/api/v1/jobs/job_1/pause", False),
        ("POST", "/api/v1/plan", False),
        ("DELETE", "/api/v1/jobs/job_1", False),
        ("GET", "/api/v1/jobs", False),
    ],
)
def test_only_what_takes_room_is_refused_for_lack_of_it(method: str, path: str, refused: bool):
    assert fills(method, path) == refused


def test_below_the_least_free_space_new_work_is_refused_and_taken_again_once_there_is_room():
    """The free space of this machine's disk really falls below the setting, by one big file."""
    place = Path("/tmp")  # noqa: S108 (where running_api has its home)
    free = shutil.disk_usage(place).free
    if free < 16 * GIB:
        pytest.skip("there is not room enough to take some away")
    least = free - 4 * GIB
    with running_api(min_free_bytes=str(least)) as api, api.client() as client:
        dataset = digits(client)
        job = client.post("/api/v1/jobs", json=small_job(dataset)).json()["id"]
        filler = api.home / "filler"
        try:
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 8 * GIB)

            def refused() -> httpx2.Response | None:
                answer = client.post("/api/v1/jobs", json=small_job(dataset))
                return answer if answer.status_code == 503 else None

            answer = until(refused)
            assert answer.json()["code"] == "storage_full"
            assert answer.json()["retryable"] is True
            assert int(answer.headers["retry-after"]) > 0
            upload = client.post(
                "/api/v1/datasets", params={"format": "csv"}, content=b"a,b\n1,2\n" * 200_000
            )
            assert (upload.status_code, upload.json()["code"]) == (503, "storage_full")
            assert client.get(f"/api/v1/jobs/{job}").status_code == 200
            assert client.post(f"/api/v1/jobs/{job}/cancel").status_code == 202
            assert client.delete(f"/api/v1/jobs/{job}").status_code == 204
            nobody = httpx2.post(f"{api.url}/api/v1/jobs", json={})
            assert nobody.status_code == 401
            found = checks_until(client, lambda told: told["checks"]["disk"] != "ok")
            assert found["status"] == "degraded"
        finally:
            filler.unlink(missing_ok=True)
        until(lambda: client.post("/api/v1/jobs", json=small_job(dataset)).status_code == 201)
        checks_until(client, lambda told: told["checks"]["disk"] == "ok")


def test_each_line_of_the_log_says_which_request_and_which_job(own: Api):
    with own.client() as client:
        dataset = digits(client)
        job = client.post("/api/v1/jobs", json=small_job(dataset)).json()["id"]
        asked = client.get(f"/api/v1/jobs/{job}", headers={"X-Request-Id": "mine-1"})
    assert asked.headers["x-request-id"] == "mine-1"

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in own.log.splitlines() if line.startswith("{")]

    def mine_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line for line in lines if line.get("request_id") == "mine-1"]

    (mine,) = until(lambda: mine_of(lines()))  # it is written after the answer was sent
    assert (mine["event"], mine["job"], mine["status"]) == ("request", job, 200)
    away = [line for line in lines() if line["event"] == "broker_away"]
    assert away
    assert all(line.get("request_id") for line in away)
