"""Failpoints of the API: a retry with the same key creates one resource, not two or none.

``FAILPOINTS_DATABASE`` says on which database: ``sqlite`` or ``postgresql``.
"""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import select

from models.fleet import workers
from models.storage import datasets
from models.tables import Dataset, Job
from tests.integration.worker.conftest import Broker, open_broker
from tests.running import Api, digits, running_api, small_job

DATABASE = os.environ.get("FAILPOINTS_DATABASE", "sqlite")
SUBMITTING = ("submit.commit", "submit.committed", "submit.notified")
UPLOADING = ("artifact.received", "artifact.replaced")
IN_SHORT = {("submit.committed", "kill"), ("artifact.replaced", "kill")}
PAUSE_S = 2


def cases(*points: str) -> list[Any]:
    both = [(point, action) for point in points for action in ("kill", "raise", "pause")]
    return [
        pytest.param(*case, id="-".join(case), marks=() if case in IN_SHORT else pytest.mark.slow)
        for case in both
    ]


@pytest.fixture
def broker() -> Generator[Broker]:
    yield from open_broker()


@pytest.fixture
def api(
    point: str, action: str, database_url: str, broker: Broker, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Generator[Api]:  # fmt: skip
    """An API to which something happens at a point, once."""
    what = f"pause:{PAUSE_S}" if action == "pause" else action
    monkeypatch.setenv("FAILPOINTS", f"{point}={what}")
    monkeypatch.setenv("FAILPOINTS_ONCE", str(tmp_path))
    with running_api(database_url, redis_url=broker.url) as started:
        yield started
    assert (tmp_path / f"{point}.{action}.1").exists(), "it did not come by there"


def insist(api: Api, path: str, **body: Any) -> httpx2.Response:
    """Ask with one key until there is an answer, as the client does."""
    headers = {"Idempotency-Key": "one"}
    for _ in range(3):
        try:
            with api.client() as client:
                answer = client.post(f"/api/v1{path}", headers=headers, **body)
        except httpx2.TransportError:
            api.kill()
            api.start()
            continue
        if answer.status_code < 500:
            return answer
    raise AssertionError("it has no answer")


@pytest.mark.parametrize("database_url", [DATABASE], indirect=True)
@pytest.mark.parametrize(("point", "action"), cases(*SUBMITTING))
def test_a_job_is_submitted_once_and_found_whatever_became_of_its_message(api: Api):
    with api.client() as client:
        dataset = digits(client)
    answer = insist(api, "/jobs", json=small_job(dataset))
    assert answer.status_code == 201
    with api.database.read() as tx:
        made = list(tx.scalars(select(Job.id)))
        found = [one.job for one in workers.asked_for(tx)]
    assert made == found == [answer.json()["id"]]


@pytest.mark.parametrize("database_url", [DATABASE], indirect=True)
@pytest.mark.parametrize(("point", "action"), cases(*UPLOADING))
def test_a_dataset_is_uploaded_once_and_whole(api: Api):
    rows = b"a,b\n" + b"1,2\n" * 1000
    answer = insist(api, "/datasets?format=csv", content=rows)
    assert answer.status_code == 201, answer.text
    with api.client() as client:
        path = answer.headers["location"]
        row = client.get(path, headers={"Prefer": "wait=60"}).json()
    assert (row["state"], row["splits"]) == ("ready", {"all": 1000}), row
    with api.database.read() as tx:
        made = list(tx.scalars(select(Dataset.id)))
        assert made == [row["id"]]
        assert datasets.get(tx, row["id"], None).state == "ready"
