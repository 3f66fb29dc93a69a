"""Drift of served rows in a whole service: from requests to the job, its events and webhooks."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import httpx2
import numpy as np
from sqlalchemy import select

from glasshouse.events import DriftFinding, parse_event
from models.access import webhooks
from models.tables import Checkpoint, Webhook
from tests.integration.serving.service import Service
from tests.integration.worker.harness import train_spec
from tests.waiting import until

WINDOW = 200


def publish(service: Service, num_rows: int) -> tuple[str, str]:
    """Train on rows of a dataset of its own, and publish two versions with the same weights.

    Return the names of the model and the dataset.
    """
    name, dataset = f"m-{uuid4().hex[:8]}", service.harness.dataset(num_rows)
    job = service.harness.submit(train_spec(dataset, stop={"steps": 5}))
    assert service.harness.wait(job).state == "succeeded", service.harness.logs()
    with service.harness.database.read() as tx:
        saved = tx.scalars(select(Checkpoint).where(Checkpoint.job == job)).all()
    for _ in range(2):
        service.publish(name, saved[-1].id)
    return name, dataset


def entry_of(client: httpx2.Client, job: str) -> dict[str, Any]:
    """The entry of the only version that a job serves."""
    listed = client.get(f"/api/v1/jobs/{job}").json()["serving"]["drift"]
    return listed[0] if listed else {"state": None, "detail": None, "rows": 0}


def wait_for(client: httpx2.Client, job: str, look: Callable[[dict[str, Any]], bool]) -> Any:
    """Wait until the entry of a job is so; return it."""

    def found() -> dict[str, Any] | None:
        entry = entry_of(client, job)
        return entry if look(entry) else None

    return until(found, what="the report of drift")


class Sender:
    """Sends rows of four normal columns, the third one shifted."""

    def __init__(self, client: httpx2.Client, model: str, job: str) -> None:
        self._client, self._model, self._job = client, model, job
        self._rng = np.random.default_rng(7)

    def send(self, shift: float) -> None:
        """Send some rows; those beyond the budget are not watched."""
        x = self._rng.normal(size=(50, 4))
        x[:, 2] += shift
        path, body = f"/api/v1/models/{self._model}/predict", {"inputs": {"x": x.tolist()}}
        self._client.post(path, json=body).raise_for_status()

    def until_after(self, seen: str | None, shift: float) -> dict[str, Any]:
        """Send rows until another window is reported; return the report."""

        def is_new(entry: dict[str, Any]) -> bool:
            if entry["at"] == seen:
                self.send(shift)
            return entry["at"] != seen

        return wait_for(self._client, self._job, is_new)


def test_a_shift_in_one_column_is_a_finding_and_notifies_webhooks(service: Service):
    model, _ = publish(service, 1000)
    wanted: dict[str, Any] = {"url": "https://example.org/", "events": ["job.finding"]}
    with service.harness.database.write() as tx:
        hook = webhooks.add(tx, owner="ada", labels={}, **wanted).id
    shadowed = {"model": model, "shadow": {"model": f"{model}:1", "share": 1.0}}
    job = service.serve(shadowed, drift={"window": WINDOW, "max_overhead": 1.0})
    with service.api.client(service.key) as client:
        sender = Sender(client, model, job)
        wait_for(client, job, lambda one: one["state"] == "collecting" and one["detail"] is None)
        first = sender.until_after(None, 0.0)
        second = sender.until_after(first["at"], 3.0)
        serving = client.get(f"/api/v1/jobs/{job}").json()["serving"]
        events = client.get(f"/api/v1/jobs/{job}/events", params={"types": "finding"}).json()
        deliveries = client.get(f"/api/v1/webhooks/{hook}/deliveries").json()["data"]
    facts = {key: first[key] for key in ("model", "version", "state", "rows")}
    assert facts == {"model": model, "version": 2, "state": "watching", "rows": WINDOW}
    assert [one["measure"] for one in first["series"]][:4] == ["[0]", "[1]", "[2]", "[3]"]
    assert not any(one["drifted"] for one in first["series"])
    # rows of a shadow are those of another version; it answers nobody
    assert [one["version"] for one in serving["drift"]] == [2]
    drifted = [one for one in second["series"] if one["drifted"]]
    assert [one["measure"] for one in drifted if one["of"] == "field"] == ["[2]"]

    found = [event for one in events["data"] if isinstance(event := parse_event(one), DriftFinding)]
    assert len(found) == len(events["data"]) == len(drifted)
    (of_field,) = [event for event in found if event.series.of == "field"]
    assert (of_field.model, of_field.version, of_field.rows) == (model, 2, WINDOW)
    assert "'[2]' of field 'x' moved from" in of_field.message

    sent = [one["payload"]["data"] for one in deliveries]
    assert {one["type"] for one in deliveries} == {"job.finding"}
    assert {(one["job"], one["kind"], one["finding"]["rule"]) for one in sent} == {
        (job, "serve", "drift")
    }
    assert {one["finding"]["message"] for one in sent} == {event.message for event in found}
    with service.harness.database.write() as tx:
        webhooks.delete(tx, tx.get_one(Webhook, hook))
    # the next replica has the histograms: they are a file beside the checkpoint
    assert len([*service.harness.artifacts.root.glob("jobs/*/*/drift/ckpt_*.json")]) == 1


def test_why_a_version_is_not_compared_is_shown_and_null_turns_it_off(service: Service):
    model, dataset = publish(service, 50)
    few = service.serve(model)
    with service.api.client(service.key) as client:
        entry = wait_for(client, few, lambda one: one["state"] == "unavailable")
        assert entry["detail"].startswith("It was trained on 50 rows, and at least 100 are needed")
        assert service.predict(model).version == 2
        service.end(few)
        service.harness.artifacts.delete(f"datasets/{dataset}")
        gone = service.serve(model)
        entry = wait_for(client, gone, lambda one: one["state"] == "unavailable")
        detail = f"Its training rows are gone: the dataset {dataset} was deleted."
        assert entry["detail"] == detail
        off = service.serve(model, drift=None)
        assert service.predict(model).version == 2
        assert client.get(f"/api/v1/jobs/{off}").json()["serving"]["drift"] == []
