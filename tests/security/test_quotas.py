"""X15: what an owner may use, refused by name, and no other owner notices."""

import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx2
import pytest

from api.schemas import documents
from glasshouse.errors import QuotaExceeded
from models.access import quotas
from models.database import Database
from models.jobs import jobs
from models.settings import Settings
from tests.conftest import empty_postgres
from tests.integration.store.factories import make_job, make_worker, running
from tests.running import Api, digits, running_api, small_job
from tests.waiting import until
from worker.dispatch import dispatch

CSV = {"Content-Type": "application/octet-stream"}


# one lock for all writers is SQLite's way: what many do at once is shown by PostgreSQL
@pytest.fixture(
    scope="module", params=[pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"]
)
def api(request: pytest.FixtureRequest) -> Generator[Api]:
    url = "" if request.param == "sqlite" else empty_postgres(request)
    with running_api(url) as started:
        yield started


@pytest.fixture(scope="module")
def tenants(api: Api) -> Generator[tuple[httpx2.Client, httpx2.Client, dict[str, Any]]]:
    """Ada, Bob, and a job that both could submit."""
    with ExitStack() as stack:
        ada, bob = (
            stack.enter_context(api.client(api.key(owner, "submit"))) for owner in ("ada", "bob")
        )
        yield ada, bob, small_job(digits(ada))


Tenants = tuple[httpx2.Client, httpx2.Client, dict[str, Any]]


@pytest.fixture
def limit(api: Api) -> Generator[Any]:
    """Sets Ada's quotas, and takes them back."""

    def put(**limits: Any) -> None:
        with api.client() as admin:
            answer = admin.put("/api/v1/quotas", json={"owner": "ada", **limits})
            assert answer.status_code == 200, answer.text
            documents.Quotas.model_validate_json(answer.content)

    yield put
    put()


def refused(answer: httpx2.Response, quota: str) -> None:
    found = answer.json()
    assert (answer.status_code, found["code"], found["quota"]) == (429, "quota_exceeded", quota)
    assert int(answer.headers["retry-after"]) >= 1
    assert found["retryable"]
    assert quota.replace("_", " ") in found["detail"] or "a second" in found["detail"]


def test_queued_jobs_are_limited_however_many_ask_at_once(api: Api, tenants: Tenants, limit: Any):
    ada, _, spec = tenants
    with api.database.read() as tx:
        already = quotas.usage(tx, "ada")["queued_jobs"]
    limit(queued_jobs=already + 3)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: ada.post("/api/v1/jobs", json=spec), range(24)))
    made = [answer for answer in answers if answer.status_code == 201]
    assert len(made) == 3
    for answer in answers:
        if answer.status_code != 201:
            refused(answer, "queued_jobs")
    with api.client(headers={}) as admin:
        path = f"/api/v1/jobs/{made[0].json()['id']}/cancel"
        assert admin.post(path).status_code == 202
    assert ada.post("/api/v1/jobs", json=spec).status_code == 201, "room was made"


def test_a_job_that_could_never_have_its_devices_is_refused_by_its_field(
    tenants: Tenants, limit: Any
):
    ada, bob, _ = tenants
    limit(devices=4)

    def asks(client: httpx2.Client, threads: int, processes: int = 1) -> httpx2.Response:
        devices = {"type": "cpu", "threads": threads}
        more = {"parallel": {"strategy": "data", "processes": processes}} if processes > 1 else {}
        return client.post("/api/v1/jobs", json=small_job(digits(client), devices=devices, **more))

    answer = asks(ada, 5)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec")
    (problem,) = answer.json()["errors"]
    assert problem["pointer"] == "/devices/threads"
    assert "quota of devices is 4" in problem["detail"]
    assert "asks for 6 cores" in asks(ada, 3, 2).json()["errors"][0]["detail"]
    assert asks(ada, 2, 2).status_code == 201
    assert asks(ada, 4).status_code == 201
    assert asks(bob, 5).status_code == 201


def test_processes_that_could_never_have_their_devices_are_refused_by_their_field(
    tenants: Tenants, limit: Any
):
    ada, bob, _ = tenants
    limit(devices=1)
    several = {"parallel": {"strategy": "data", "processes": 2}, "devices": {"type": "cpu"}}

    def asks(client: httpx2.Client, **more: Any) -> httpx2.Response:
        return client.post("/api/v1/jobs", json=small_job(digits(client), **more))

    answer = asks(ada, **several)
    assert answer.status_code == 422
    (problem,) = answer.json()["errors"]
    assert problem["pointer"] == "/parallel/processes"
    assert "asks for 2 devices, and the quota of devices is 1" in problem["detail"]
    assert asks(ada).status_code == 201
    assert asks(bob, **several).status_code == 201
    limit(devices=0)
    (problem,) = asks(ada).json()["errors"]
    assert problem["pointer"] == "/devices"
    assert "asks for 1 device, and the quota of devices is 0" in problem["detail"]


def test_one_owners_usage_does_not_count_for_another(api: Api, tenants: Tenants, limit: Any):
    ada, bob, spec = tenants
    limit(queued_jobs=0, uploads=0, streams=0, storage_bytes=0)
    refused(ada.post("/api/v1/jobs", json=spec), "queued_jobs")
    theirs = bob.post("/api/v1/datasets", json={"builtin": "digits"})
    assert theirs.status_code == 201
    own = small_job(digits(bob))
    assert bob.post("/api/v1/jobs", json=own).status_code == 201


def test_storage_is_limited_before_and_after_the_bytes_came(tenants: Tenants, limit: Any):
    ada, bob, spec = tenants
    used = ada.get("/api/v1/quotas").json()["used"]["storage_bytes"]
    limit(storage_bytes=used + 1000)
    path = "/api/v1/datasets?format=csv"
    refused(ada.post(path, content=b"1,2\n" * 1000, headers=CSV), "storage_bytes")
    chunks = (b"1,2\n" * 100 for _ in range(10))
    refused(ada.post(path, content=chunks, headers=CSV), "storage_bytes")
    small = ada.post(path, content=b"1,2\n" * 100, headers=CSV)
    assert small.status_code == 201
    limit(storage_bytes=0)
    refused(ada.post("/api/v1/jobs", json=spec), "storage_bytes")
    assert ada.get("/api/v1/quotas").json()["used"]["storage_bytes"] == used + 400
    assert bob.post(path, content=b"1,2\n" * 1000, headers=CSV).status_code == 201


def test_uploads_are_limited_while_they_come_in(tenants: Tenants, limit: Any):
    ada, bob, _ = tenants
    until(lambda: ada.get("/api/v1/quotas").json()["used"]["uploads"] == 0)
    limit(uploads=1)
    go_on = threading.Event()

    def slowly() -> Generator[bytes]:
        yield b"1,2\n"
        assert go_on.wait(60)
        yield b"3,4\n"

    path = "/api/v1/datasets?format=csv"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: ada.post(path, content=slowly(), headers=CSV))
        until(lambda: ada.get("/api/v1/quotas").json()["used"]["uploads"] == 1)
        refused(ada.post(path, content=b"1,2\n", headers=CSV), "uploads")
        assert bob.post(path, content=b"1,2\n", headers=CSV).status_code == 201
        go_on.set()
        assert first.result().status_code == 201
    until(lambda: ada.get("/api/v1/quotas").json()["used"]["uploads"] == 0)
    assert ada.post(path, content=b"1,2\n", headers=CSV).status_code == 201


def test_streams_of_all_keys_of_an_owner_count_together(api: Api, tenants: Tenants, limit: Any):
    ada, bob, spec = tenants
    job = ada.post("/api/v1/jobs", json=spec).json()["id"]
    theirs = bob.post("/api/v1/jobs", json=small_job(digits(bob))).json()["id"]
    limit(streams=2)
    path = f"/api/v1/jobs/{job}/stream"
    held: list[Any] = []  # a stream that nobody holds is closed, and counts no more
    with ExitStack() as stack:
        other = stack.enter_context(api.client(api.key("ada", "read")))
        for client in (ada, other):
            answer = stack.enter_context(client.stream("GET", path))
            assert answer.status_code == 200
            held.append(answer.iter_lines())
            assert next(held[-1]) == "event: hello"
        refused(other.get(path), "streams")
        assert ada.get("/api/v1/quotas").json()["used"]["streams"] == 2
        with bob.stream("GET", f"/api/v1/jobs/{theirs}/stream") as own:
            assert own.status_code == 200
    until(lambda: ada.get("/api/v1/quotas").json()["used"]["streams"] == 0)


def test_a_key_with_too_many_requests_gets_a_retry_time(api: Api, tenants: Tenants, limit: Any):
    ada, bob, _ = tenants
    limit(requests_per_s=5)
    answers = [ada.get("/livez") for _ in range(50)]
    assert all(answer.status_code == 200 for answer in answers), "open paths have no key"
    answers = [ada.get("/api/v1/jobs?limit=1") for _ in range(40)]
    late = [answer for answer in answers if answer.status_code != 200]
    assert late
    for answer in late:
        refused(answer, "requests_per_s")
    assert all(bob.get("/api/v1/jobs?limit=1").status_code == 200 for _ in range(40))
    time.sleep(int(late[-1].headers["retry-after"]))
    assert ada.get("/api/v1/jobs?limit=1").status_code == 200


def test_a_client_without_pauses_slows_no_other_down(api: Api, tenants: Tenants, limit: Any):
    """Bob's slowest answer, beside four threads of Ada's that are refused, stays under a second."""
    _, bob, _ = tenants
    limit(requests_per_s=20)
    over = threading.Event()
    key = api.key("ada", "read")

    def ask() -> int:
        refusals = 0
        with api.client(key) as client:
            while not over.is_set():
                refusals += client.get("/api/v1/jobs?limit=100").status_code == 429
        return refusals

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        took: list[float] = []
        for _ in range(100):
            began = time.monotonic()
            assert bob.get("/api/v1/jobs?limit=1").status_code == 200
            took.append(time.monotonic() - began)
        over.set()
        assert sum(each.result() for each in asking) > 50
    assert sorted(took)[90] < 1.0, took


def test_quotas_are_read_and_set_by_those_who_may(api: Api, tenants: Tenants, limit: Any):
    ada, bob, _ = tenants
    limit(devices=3, requests_per_s=77.5)
    seen = ada.get("/api/v1/quotas").json()
    assert (seen["owner"], seen["limits"]["devices"]) == ("ada", 3)
    assert seen["own"] == {"devices": 3, "requests_per_s": 77.5}
    assert bob.get("/api/v1/quotas").json()["own"] == {}
    assert bob.get("/api/v1/quotas?owner=ada").status_code == 403
    assert bob.put("/api/v1/quotas", json={"owner": "bob"}).status_code == 403
    with api.client() as admin:
        assert admin.get("/api/v1/quotas?owner=ada").json()["limits"]["devices"] == 3
        for wrong in ({"devices": -1}, {"devices": 1.5}, {"jobs": 1}, {"requests_per_s": 0}):
            answer = admin.put("/api/v1/quotas", json={"owner": "ada", **wrong})
            assert answer.status_code == 422
            assert answer.json()["errors"][0]["pointer"].strip("/") in wrong


def make_jobs(database: Database, owner: str, count: int) -> None:
    for _ in range(count):
        make_job(database, owner)


def states(database: Database, owner: str) -> list[str]:
    with database.read() as tx:
        found = jobs.find(tx, jobs.Filter(owner=owner), after=None, limit=5000)
    return sorted(job.state for job in found)


@pytest.mark.parametrize("quota", ["running_jobs", "devices"])
def test_jobs_beyond_what_may_run_wait_and_let_others_pass(
    database: Database, tmp_path: Any, quota: str
):
    settings = Settings(home=tmp_path, **{f"quota_{quota}": 2})
    with database.write() as tx:
        for _ in range(250):  # more than a dispatcher looks at of one owner and one wish
            jobs.add(
                tx,
                owner="ada",
                spec={"kind": "train"},
                resolved={"devices": {"type": "cpu", "threads": 1}},
                plan={},
            )
        jobs.add(
            tx,
            owner="bob",
            spec={"kind": "train"},
            resolved={"devices": {"type": "cpu", "threads": 1}},
            plan={},
        )
    make_worker(database, "w1", cores=8)  # only now: its lease is short, and the jobs are many
    make_worker(database, "w2", cores=8)
    dispatch(database, settings)
    dispatch(database, settings)
    assert states(database, "ada").count("starting") == 2
    assert states(database, "bob") == ["starting"]


def test_a_job_that_may_take_half_takes_what_its_owner_may(database: Database, tmp_path: Any):
    make_worker(database, "w1", cores=8)
    with database.write() as tx:
        quotas.put(tx, "ada", {"devices": 1}, by="admin")
        jobs.add(tx, owner="ada", spec={"kind": "train"}, resolved={}, plan={})
    (given,) = dispatch(database, Settings(home=tmp_path))
    assert len(given.devices) == 1


def test_usage_counts_only_what_exists(database: Database):
    make_worker(database)
    running(database, make_job(database))
    make_jobs(database, "ada", 2)
    make_jobs(database, "bob", 1)
    with database.read() as tx:
        used = quotas.usage(tx, "ada")
    assert used == {
        "queued_jobs": 2,
        "running_jobs": 1,
        "devices": 1,
        "storage_bytes": 0,
        "uploads": 0,
    }


def test_of_two_at_once_only_one_is_the_last_that_fits(database: Database, tmp_path: Any):
    """Both would count none before either has stored its job, if they could."""
    few = Settings(home=tmp_path, quota_queued_jobs=1)
    both_have_counted = threading.Barrier(2)

    def submit() -> bool:
        try:
            with database.write() as tx:
                quotas.admit_job(tx, "ada", few)
                with suppress(threading.BrokenBarrierError):
                    both_have_counted.wait(1.0)
                jobs.add(tx, owner="ada", spec={"kind": "train"}, resolved={}, plan={})
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda _: submit(), range(2))) == [False, True]
    assert states(database, "ada") == ["queued"]
