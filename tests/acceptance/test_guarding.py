"""A guard through the client: the event, the error, and what is refused."""

import pytest

import glasshouse as gh
from tests.acceptance.specs import small


def logarithm(digits: str, guard: dict) -> dict:
    spec = small(digits, guards={"nonfinite": guard})
    spec["network"]["layers"].append({"name": "log", "type": "log"})
    return spec | {"loss": {"type": "CrossEntropyLoss", "inputs": ["log", "label"]}}


def test_a_bad_step_is_an_event_and_names_rows_that_can_be_shown(client: gh.Client, digits: str):
    job = client.jobs.create(logarithm(digits, {"action": "fail"}))
    with pytest.raises(gh.JobFailed) as failed:
        job.wait(timeout=200)
    assert failed.value.error["code"] == "non_finite"
    (finding,) = job.events(["finding"])
    assert (finding.layer, finding.kind, finding.phase) == ("log", "output", "forward")
    assert job.error["nonfinite"]["bad_samples"] == finding.bad_samples
    assert job.spec()["guards"]["nonfinite"]["action"] == "fail"


def test_a_guard_of_no_layer_is_refused_at_its_place(client: gh.Client, digits: str):
    with pytest.raises(gh.UnprocessableEntityError) as refused:
        client.plan(logarithm(digits, {"skip": ["nothing"]}))
    assert [item["pointer"] for item in refused.value.problem["errors"]] == [
        "/guards/nonfinite/skip/0"
    ]
    with pytest.raises(gh.UnprocessableEntityError) as refused:
        client.plan(small(digits, guards={"memory": {"fraction": 0.5}}))
    assert [item["pointer"] for item in refused.value.problem["errors"]] == [
        "/guards/memory/fraction"
    ]
