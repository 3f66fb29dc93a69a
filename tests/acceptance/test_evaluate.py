"""An evaluation job, as a client, the command line and HTTP see it."""

import json

import httpx2
import pytest

import glasshouse as gh
from glasshouse.client import Job
from tests.acceptance.services import LocalService
from tests.acceptance.specs import digits_example

F1 = {"type": "MulticlassF1Score", "args": {"num_classes": 10}, "inputs": ["fc", "label"]}


@pytest.fixture(scope="module")
def trained(client: gh.Client, digits: str) -> Job:
    return client.jobs.create(digits_example(digits, stop={"epochs": 1})).wait(timeout=120)


def test_the_client_evaluates_as_the_training_job_did(client: gh.Client, trained: Job, digits: str):
    data = {"dataset": digits, "split": "validation"}
    found = client.evaluate(trained, data, metrics=[F1], by="label", worst=3)
    last = trained.metrics("validation/loss").values[-1]
    assert found["metrics"]["loss"] == pytest.approx(float(last), rel=1e-6)
    total = sum(sum(row) for row in found["confusion"])
    right = sum(row[number] for number, row in enumerate(found["confusion"]))
    assert right / total == pytest.approx(found["metrics"]["accuracy"])
    assert sum(own["rows"] for own in found["by"]["label"].values()) == total == found["rows"]
    assert len(found["worst_samples"]) == 3
    assert 0 < found["metrics"]["MulticlassF1Score"] <= 1
    client.models.publish("judged", trained.checkpoints()[-1])
    again = client.evaluate("judged", data, want=[])
    assert again["metrics"]["loss"] == found["metrics"]["loss"]


def test_one_request_submits_it_and_waits(http: httpx2.Client, trained: Job, digits: str):
    data = {"dataset": digits, "split": "test"}
    body = {"kind": "evaluate", "job": trained.id, "data": data, "want": ["confusion"]}
    plan = http.post("/plan", json=body).json()
    assert plan["spec"]["checkpoint"].startswith("ckpt_")
    shown = http.post("/jobs", json=body, headers={"Prefer": "wait=60"}).json()
    assert (shown["state"], shown["kind"]) == ("succeeded", "evaluate")
    assert shown["result"]["rows"] == 250
    listed = http.get("/jobs", params={"kind": "evaluate"}).json()["data"]
    assert shown["id"] in [one["id"] for one in listed]
    files = http.get(f"/jobs/{shown['id']}/artifacts").json()["data"]
    assert {one["name"] for one in files} == {"evaluation.json", "confusion.csv"}
    wrong = http.post("/jobs", json={**body, "by": "weight"})
    assert wrong.status_code == 422
    assert wrong.json()["errors"][0]["pointer"] == "/by"


def test_the_command_line_evaluates(local_service: LocalService, trained: Job, digits: str):
    given = ["evaluate", trained.id, "--data", digits, "--split", "test", "--by", "label"]
    printed = local_service.command(*given, "--metric", json.dumps(F1))
    assert "250 rows" in printed
    assert "MulticlassF1Score" in printed
    assert "mean_auroc" in printed
    shown = local_service.command("show", "last")
    assert "mean_auroc" in shown
    found = json.loads(local_service.command(*given, "--want", "calibration", "--json"))
    assert "expected_calibration_error" in found["calibration"]
