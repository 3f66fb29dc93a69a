"""A job of several processes, as a client sees and steers it."""

from typing import Any

import httpx2
import pytest

import glasshouse as gh
from tests.acceptance.services import LocalService
from tests.acceptance.specs import FIELDS, lasting, small
from tests.waiting import until

TWO: dict[str, Any] = {"parallel": {"strategy": "data", "processes": 2}}


def test_a_running_job_shows_its_processes(
    client: gh.Client, http: httpx2.Client, local_service: LocalService, digits: str
):
    job = client.jobs.create(lasting(digits, 100_000, **TWO))
    until(lambda: (job.refresh().progress or {}).get("step"))
    shown = http.get(f"/jobs/{job.id}").json()
    assert [one["id"] for one in shown["devices"]] == ["cpu:0", "cpu:1"]
    assert [(one["rank"], one["device"], one["state"]) for one in shown["ranks"]] == [
        (0, "cpu:0", "running"),
        (1, "cpu:1", "running"),
    ]
    changed = job.set(lr=0.01).wait(timeout=60)
    assert changed.state == "applied"
    probe = job.probe("conv1", kinds=["output"], every=1)
    until(lambda: probe.refresh().state == "active", 30)
    probe.remove()
    job.cancel()
    until(lambda: job.refresh().state == "cancelled")
    ended = http.get(f"/jobs/{job.id}").json()["ranks"]
    assert [(one["rank"], one["state"]) for one in ended] == [(0, "cancelled"), (1, "cancelled")]


def test_a_fork_continues_with_another_number_of_processes(client: gh.Client, digits: str):
    """With the same global batch it is the same run: the rows of step 7 on are the same."""
    data = {"train": {"dataset": digits, "split": "train"}, "fields": FIELDS}
    spec = small(
        digits,
        **TWO,
        data={**data, "global_batch_size": 100},
        stop={"steps": 7},
        checkpoint={"every_steps": 7},
    )
    first = client.jobs.create(spec).wait(timeout=60)
    whole = client.jobs.create(small(digits, stop={"steps": 20})).wait(timeout=60)
    change = {"parallel": None, "data": {"global_batch_size": None, "batch_size": 100}}
    rest = first.fork({**change, "stop": {"steps": 20}}, load="all").wait(timeout=60)
    found, expected = dict(rest.metrics("loss")), dict(whole.metrics("loss"))
    assert [*found] == [*range(7, 20)]
    assert [*found.values()] == pytest.approx([expected[step] for step in found], rel=1e-5)


def test_what_several_processes_cannot_do_is_refused(http: httpx2.Client, digits: str):
    for change, pointer in (
        ({"tune": True}, "/tune"),
        ({"parallel": {"strategy": "dat"}}, "/parallel/strategy"),
        ({"parallel": {"strategy": "fsdp", "processes": 2}}, "/parallel/strategy"),
        ({"parallel": {"processes": 0}}, "/parallel/processes"),
        ({"parallel": {"processes": 900}}, "/parallel/processes"),
        ({"parallel": {"processes": 2, "workers": 1}}, "/parallel/workers"),
    ):
        answer = http.post("/jobs", json=small(digits, **TWO) | change)
        assert answer.status_code == 422, change
        assert answer.json()["errors"][0]["pointer"] == pointer, answer.json()
