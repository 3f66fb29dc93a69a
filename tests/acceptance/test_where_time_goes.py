"""Where a step's time goes, what the job uses, and derived series, as a client reads them."""

import json
import re
from typing import Any

import pytest

import glasshouse as gh
from tests.acceptance.services import ROOT, LocalService
from tests.acceptance.specs import digits_example, lasting, small

PARTS = (
    *("data", "forward", "backward", "optimizer"),
    *("probes", "derived", "checkpoint", "evaluate"),
)
LAYERS: list[dict[str, Any]] = [
    {"name": "flat", "type": "Flatten"},
    {"name": "left", "type": "Linear", "args": {"out_features": 10}},
    {"name": "right", "type": "Linear", "args": {"out_features": 10}, "inputs": ["flat"]},
    {"name": "fc", "type": "add", "inputs": ["left", "right"]},
]


def test_a_job_says_where_its_time_goes_and_what_it_uses(
    client: gh.Client, local_service: LocalService, digits: str
):
    probes = [{"layers": ["conv1"], "kinds": ["output"], "every": 5}]
    job = client.jobs.create(lasting(digits, 600, probes=probes)).wait(timeout=110)
    series = job.metrics()
    for part in (*PARTS, "step"):
        assert series[f"time/{part}"]["last"] >= 0
    steps = dict(job.metrics("time/step"))
    assert max(steps) == 599
    for step, seconds in steps.items():
        told = sum(
            dict(job_series)[step] for job_series in job.series([f"time/{p}" for p in PARTS])
        )
        assert told <= seconds * 1.000001
    plan = client.plan(lasting(digits, 600, probes=probes))
    rate = series["throughput/samples_per_s"]["last"]
    assert series["throughput/flops_per_s"]["last"] == pytest.approx(
        3 * plan["flops"] / 100 * rate, rel=1e-9
    )
    assert 0 < series["throughput/flops_fraction"]["last"] < 1.5
    assert "loss" in job.summary
    assert not any(name.startswith(("time/", "throughput/", "system/")) for name in job.summary)
    assert "time/" not in local_service.command("watch", job.id)
    assert job.plot("throughput").startswith(b"\x89PNG")


def test_the_series_of_the_documents_own_example_is_two_lines_of_json(
    client: gh.Client, digits: str
):
    page = (ROOT / "docs" / "concepts" / "derived.md").read_text()
    block = re.search(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    metrics = json.loads(block[1])["metrics"]
    spec = small(digits, network={"layers": LAYERS}, stop={"steps": 60}, metrics=metrics)
    job = client.jobs.create(spec).wait(timeout=90)
    found = job.metrics("mean_abs_diff(left,right)")
    assert found.steps.tolist() == [0, 25, 50]
    assert found.values.min() > 0
    assert job.summary["mean_abs_diff(left,right)"]["last"] == found.values[-1]
    event = next(job.events(["metrics"]))
    assert {"loss", "lr", "mean_abs_diff(left,right)"} == set(event.values)


def test_a_derived_series_of_what_is_not_there_is_refused(client: gh.Client, digits: str):
    metrics = [{"type": "l2_ratio", "inputs": ["fc.weight/update", "fc.weigth/param"]}]
    with pytest.raises(gh.errors.APIStatusError) as refused:
        client.jobs.create(small(digits, metrics=metrics))
    assert refused.value.problem["errors"][0]["pointer"] == "/metrics/0/inputs/1"


def test_each_evaluation_keeps_predictions_of_the_same_rows(client: gh.Client, digits: str):
    spec = digits_example(digits, evaluate={"every_epochs": 1, "samples": 4}, stop={"epochs": 2})
    job = client.jobs.create(spec).wait(timeout=90)
    steps = job.sampled_steps()
    assert len(steps) == 2
    first, last = job.samples(steps[0]), job.samples()
    assert first["row"].tolist() == last["row"].tolist()
    assert first["label"].tolist() == last["label"].tolist()
    assert last["fc"].shape == (4, 10)
    assert (first["fc"] != last["fc"]).any()
    again = client.jobs.create(spec).wait(timeout=90)
    assert (again.samples()["fc"] == last["fc"]).all()
