"""X12: whatever two tenants do in whatever order, each sees what is theirs, and all of it."""

from collections import defaultdict
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.running import small_job
from tests.security.populated_api import PopulatedApi

OWNERS = ("dora", "emil")
ACTIONS = ("job", "same job", "dataset", "cancel", "rename", "delete", "other's")


class Tenants:
    """Two tenants and what each has made, written down beside the service."""

    def __init__(self, populated: PopulatedApi) -> None:
        self.populated = populated
        self.keys = {owner: populated.api.key(owner, "submit") for owner in OWNERS}
        self.jobs: dict[str, set[str]] = defaultdict(set)
        self.ever: dict[str, set[str]] = defaultdict(set)
        """Jobs, those that were deleted too."""
        self.datasets: dict[str, set[str]] = defaultdict(set)
        self.clients = {owner: populated.api.client(key) for owner, key in self.keys.items()}
        for owner in OWNERS:
            self.add_dataset(owner)

    def add_dataset(self, owner: str) -> None:
        client = self.clients[owner]
        made = client.post("/api/v1/datasets", json={"builtin": "digits"})
        assert made.status_code == 201, made.text
        client.get(made.headers["location"], headers={"Prefer": "wait=60"})
        self.datasets[owner].add(made.json()["id"])

    def add_job(self, owner: str, once: str | None = None) -> None:
        headers = {"Idempotency-Key": once} if once else {}
        spec = small_job(min(self.datasets[owner]))
        made = self.clients[owner].post("/api/v1/jobs", json=spec, headers=headers)
        assert made.status_code == 201, made.text
        job = made.json()["id"]
        if "idempotency-replayed" in made.headers:  # and it may have been deleted meanwhile
            assert job in self.ever[owner]
        else:
            self.jobs[owner].add(job)
            self.ever[owner].add(job)

    def act(self, owner: str, action: str, number: int) -> None:
        client = self.clients[owner]
        mine = sorted(self.jobs[owner])
        if action == "job":
            self.add_job(owner)
        elif action == "same job":
            self.add_job(owner, once=f"key {number % 3}")
        elif action == "dataset":
            if len(self.datasets[owner]) < 4:
                self.add_dataset(owner)
        elif action == "other's":
            self.try_the_others(owner, number)
        elif mine:
            job = mine[number % len(mine)]
            path = f"/api/v1/jobs/{job}"
            if action == "rename":
                assert client.patch(path, json={"name": f"{owner}'s"}).status_code == 200
            elif action == "cancel":
                assert client.post(f"{path}/cancel").status_code in (202, 409)
            elif client.delete(path).status_code == 204:
                self.jobs[owner].discard(job)

    def try_the_others(self, owner: str, number: int) -> None:
        client = self.clients[owner]
        (other,) = set(OWNERS) - {owner}
        things = sorted(self.jobs[other] | self.datasets[other])
        thing = things[number % len(things)]
        kind = "jobs" if thing.startswith("job_") else "datasets"
        for method in ("GET", "DELETE"):
            assert client.request(method, f"/api/v1/{kind}/{thing}").status_code == 404
        if kind == "jobs":
            for path in (f"/jobs/{thing}/stream", f"/stream?job={thing}", f"/jobs/{thing}/events"):
                assert client.get(f"/api/v1{path}").status_code == 404
            assert client.get(f"/api/v1/jobs?q={thing}").json()["data"] == []
            assert client.get(f"/api/v1/jobs?parent={thing}").json()["data"] == []
        else:
            refused = client.post("/api/v1/plan", json=small_job(thing))
            assert refused.status_code == 422
            unknown = client.post("/api/v1/plan", json=small_job(thing[:-6] + "zzzzzz"))
            assert self.told(refused, thing) == self.told(unknown, thing[:-6] + "zzzzzz")

    @staticmethod
    def told(answer: httpx2.Response, name: str) -> Any:
        return answer.text.replace(name, "…").split('"request_id"')[0]

    def check(self) -> None:
        for owner, client in self.clients.items():
            for kind, mine in (("jobs", self.jobs), ("datasets", self.datasets)):
                listed = client.get(f"/api/v1/{kind}?limit=1000").json()["data"]
                assert {entry["id"] for entry in listed} == mine[owner]
            (other,) = set(OWNERS) - {owner}
            for path in ("/api/v1/queue", "/api/v1/devices", "/api/v1/workers"):
                text = client.get(path).text
                assert not [job for job in self.jobs[other] if job in text], path


@pytest.fixture(scope="module")
def tenants(populated: PopulatedApi) -> Any:
    made = Tenants(populated)
    yield made
    for client in made.clients.values():
        client.close()


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.sampled_from(OWNERS), st.sampled_from(ACTIONS), st.integers(0, 99)),
        min_size=3,
        max_size=10,
    )
)
def test_each_sees_what_is_theirs_and_all_of_it(
    tenants: Tenants, steps: list[tuple[str, str, int]]
):
    for owner, action, number in steps:
        tenants.act(owner, action, number)
    tenants.check()


def test_a_stream_of_several_jobs_has_none_of_anothers_among_them(
    populated: PopulatedApi, tenants: Tenants
):
    dora = tenants.clients["dora"]
    tenants.add_job("dora")
    mine, theirs = min(tenants.jobs["dora"]), populated.ids["jobs"]
    for query in (f"job={mine}&job={theirs}", f"job={theirs}&job={mine}"):
        answer = dora.get(f"/api/v1/stream?{query}")
        assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")
    for cursor in (f"{theirs}:1", f"{mine}:1,{theirs}:1", theirs, "1,2,3"):
        answer = dora.get(f"/api/v1/stream?job={mine}", headers={"Last-Event-ID": cursor})
        assert answer.status_code in (400, 404), cursor


def test_another_owners_checkpoint_cannot_be_used(populated: PopulatedApi, bob: httpx2.Client):
    ids = populated.ids
    for source in ({"checkpoint": ids["checkpoints"]}, {"job": ids["jobs"]}):
        body = {"kind": "infer", "inputs": {"image": [[[[0.0] * 8] * 8]]}, **source}
        answer = bob.post("/api/v1/jobs", json=body)
        assert answer.status_code in (404, 422), answer.text
        assert "No " in answer.json()["detail"]


def test_an_admin_sees_everything_and_a_submitter_is_no_admin(populated: PopulatedApi):
    with populated.api.client() as admin:
        owners = {job["id"] for job in admin.get("/api/v1/jobs?limit=1000").json()["data"]}
    assert populated.ids["jobs"] in owners
    with populated.api.client(populated.ada) as ada:
        for path in ("/api/v1/keys", "/api/v1/quotas?owner=bob"):
            assert ada.get(path).status_code == 403
