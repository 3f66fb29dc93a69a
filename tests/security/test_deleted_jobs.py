"""A job that was deleted is 404 on every route, for its owner and for an admin, at once."""

from collections.abc import Generator

import pytest

from models.jobs import attempts
from models.jobs.leases import Claim
from tests.running import running_api, small_job
from tests.security.populated_api import PopulatedApi, Route, body_of, url_of

OF_JOBS = ("/api/v1/jobs/{id}", "/api/v1/checkpoints/{id}", "/api/v1/stream")


@pytest.fixture(scope="module")
def gone() -> Generator[PopulatedApi]:
    """Ada's things, after her job has ended and was deleted; no worker purges."""
    with running_api(max_json_bytes="200000", max_upload_bytes="3000000") as api:
        populated = PopulatedApi(api)
        populated.fill()
        job = populated.ids["jobs"]
        with api.database.write() as tx:
            claim = Claim(job, 1, 1)
            assert attempts.finish(tx, claim, "cancelled", exit_kind="cancelled")
        with api.client(populated.ada) as ada:
            queued = ada.get("/api/v1/jobs?state=queued").json()["data"]
            for other in queued:
                assert ada.post(f"/api/v1/jobs/{other['id']}/cancel").status_code == 202
            child = ada.post(f"/api/v1/jobs/{job}/retry")
            assert child.status_code == 201, child.text
            populated.ids["child"] = child.json()["id"]
            assert ada.patch(f"/api/v1/jobs/{job}", json={"labels": {"a": "1"}}).status_code in (
                200,
                415,
            )
            used = ada.get("/api/v1/quotas").json()["used"]
            populated.ids["bytes"] = str(used["storage_bytes"])
            assert ada.delete(f"/api/v1/jobs/{job}").status_code == 204
        yield populated


def test_every_route_of_a_deleted_job_is_404(gone: PopulatedApi, route: Route):
    if not route.path.startswith(OF_JOBS):
        return
    for key in (gone.ada, None):
        with gone.api.client(key) as client:
            answer = client.request(route.method, url_of(route, gone), **body_of(route, gone))
            assert answer.status_code == 404, (str(route), answer.text[:300])


def test_a_deleted_job_is_in_no_list(gone: PopulatedApi):
    job = gone.ids["jobs"]
    for key in (gone.ada, None):
        with gone.api.client(key) as client:
            for query in (
                "",
                f"q={job}",
                "state=cancelled",
                "q=watched",
                "label=a:1",
                "kind=train",
            ):
                listed = client.get(f"/api/v1/jobs?{query}&limit=1000").json()["data"]
                assert job not in [one["id"] for one in listed], query
            for path in ("/api/v1/queue", "/api/v1/devices", "/api/v1/checkpoints"):
                assert f'"{job}"' not in client.get(path).text, path
            metrics = client.get("/metrics").text
            assert 'glasshouse_jobs{state="cancelled"} 1.0' in metrics


def test_a_deleted_job_counts_for_no_quota_and_its_children_stay(gone: PopulatedApi):
    with gone.api.client(gone.ada) as ada:
        used = ada.get("/api/v1/quotas").json()["used"]["storage_bytes"]
        assert used < int(gone.ids["bytes"])
        child = ada.get(f"/api/v1/jobs/{gone.ids['child']}").json()
        assert child["parent"] == gone.ids["jobs"]
        infer = {"kind": "infer", "job": gone.ids["jobs"], "inputs": {"image": [[0.0] * 64]}}
        refused = ada.post("/api/v1/jobs", json=infer)
        assert refused.status_code == 422, refused.text
        begun = small_job(gone.ids["datasets"], init={"checkpoint": gone.ids["checkpoints"]})
        assert ada.post("/api/v1/jobs", json=begun).status_code == 422


def test_what_only_a_deleted_job_read_can_be_deleted(gone: PopulatedApi):
    with gone.api.client(gone.ada) as ada:
        for one in ada.get("/api/v1/jobs?state=queued").json()["data"]:
            assert ada.post(f"/api/v1/jobs/{one['id']}/cancel").status_code == 202
        assert ada.delete(f"/api/v1/datasets/{gone.ids['datasets']}").status_code == 204
