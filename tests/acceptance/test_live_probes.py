"""Probes on a job that runs: attached, changed and removed through the client and the command line.

Whatever is done to them, the job computes what it computes without them.
"""

import json
from typing import Any

import httpx2
import pytest

import glasshouse as gh
from tests.acceptance.services import LocalService
from tests.acceptance.specs import lasting, small
from tests.waiting import until

ENDLESS = 1_000_000


def running(client: gh.Client, digits: str, **changes: Any) -> gh.Job:
    """A job that has done some steps."""
    job = client.jobs.create(lasting(digits, ENDLESS, **changes))
    until(lambda: job.refresh().progress.get("step"), what="the first step")
    return job


def rows_of(event: Any) -> set[tuple[str, str]]:
    return {(row[0], row[1]) for row in event.rows}


def test_a_layer_that_was_not_watched_is_seen_within_two_steps(client: gh.Client, digits: str):
    job = running(client, digits)
    try:
        assert job.probes() == []
        assert list(job.events(["stats"])) == []
        probe = job.probe("conv*", kinds=["output", "param_grad"], every=1)
        assert probe.state == "pending"
        assert probe.matched[:2] == ["conv1", "conv2"]
        since = probe.wait(timeout=90).applied_step
        assert probe.state == "active"
        first = until(lambda: next(job.events(["stats"]), None))
        assert first.step - since in (0, 1)
        assert ("conv2", "output") in rows_of(first)
        layers = {entry["name"]: entry for entry in job.layers.table()}
        assert layers["conv1"]["stats"]["output"]["step"] >= since
        assert job.layers["conv1"].stats("output").steps[0] == first.step
        (told,) = job.events(["probe"])
        assert (told.probe, told.action, told.step) == (probe.id, "attached", since)

        full = job.probe("fc", want="full", every=1).wait(timeout=90)
        capture = until(lambda: next(job.events(["capture"]), None))
        assert capture.layer == "fc"
        assert capture.step - full.applied_step in (0, 1)
        assert job.layers["fc"].output(step=capture.step).shape[1] == 10
        full.remove().wait(timeout=90)
        assert max(event.step for event in job.events(["capture"])) < full.applied_step
    finally:
        job.cancel(force=True)


def test_a_probe_is_changed_and_after_its_end_nothing_comes(client: gh.Client, digits: str):
    probes = [{"layers": ["conv1"], "kinds": ["output", "param"], "every": 1}]
    job = running(client, digits, probes=probes)
    try:
        (probe,) = job.probes()
        assert (probe.state, probe.applied_step) == ("active", 0)
        since = probe.update(every=50, kinds=["output"]).wait(timeout=90).applied_step
        later = until(lambda: [e for e in job.events(["stats"], after=1) if e.step >= since])
        assert all(event.step % 50 == 0 for event in later)
        assert {kind for event in later for _, kind in rows_of(event)} == {"output"}

        probe.remove().wait(timeout=90)
        done = job.refresh().progress["step"]
        until(lambda: job.refresh().progress["step"] > done + 120)
        assert [e for e in job.events(["stats"]) if e.step >= probe.applied_step] == []
        assert job.probes() == []
        assert [entry.state for entry in job.probes(removed=True)] == ["removed"]
    finally:
        job.cancel(force=True)
    told = [(event.probe, event.action, event.step) for event in job.events(["probe"])]
    assert told == [
        (probe.id, "changed", since),
        (probe.id, "removed", probe.applied_step),
    ]
    with pytest.raises(gh.JobCancelled):
        job.wait(timeout=90)
    with pytest.raises(gh.ConflictError) as refused:
        job.probe("conv1")
    assert refused.value.code == "job_ended"


def test_watching_meanwhile_changes_no_number(client: gh.Client, digits: str):
    watched = running(client, digits)
    try:
        for _ in range(4):
            probe = watched.probe(["*"], ["output", "output_grad", "param", "param_grad"])
            probe.wait(timeout=90)
            probe.remove().wait(timeout=90)
    finally:
        watched.cancel()
    with pytest.raises(gh.JobCancelled):
        watched.wait(timeout=90)
    assert len(list(watched.events(["probe"]))) == 8
    plain = client.jobs.create(lasting(digits, watched.refresh().progress["step"]))
    plain.wait(timeout=200)
    assert (plain.metrics("loss").values == watched.metrics("loss").values).all()
    weights = [job.weights() for job in (plain, watched)]
    assert all((value == weights[1][name]).all() for name, value in weights[0].items())


def test_a_queued_job_starts_with_what_was_attached_to_it(client: gh.Client, digits: str):
    spec = small(digits, probes=[{"layers": ["fc"], "kinds": ["output"], "every": 1}])
    job = running(client, digits)
    try:
        waits = client.jobs.create(spec | {"priority": -5, "devices": held(client)})
        (from_spec,) = waits.probes()
        made = waits.probe("flat", every=2)
        from_spec.remove()
    finally:
        job.cancel(force=True)
    waits.wait(timeout=200)
    seen = {(event.step, row[0]) for event in waits.events(["stats"]) for row in event.rows}
    made.refresh()
    assert (made.state, made.applied_step) == ("active", 0)
    assert seen == {(0, "flat"), (2, "flat"), (4, "flat")}
    assert [event.probe for event in waits.events(["probe"])] == [made.id]


def held(client: gh.Client) -> dict[str, Any]:
    """All CPU cores, so that the job waits while another has one."""
    cores = [device for device in client.devices.list() if device.kind == "cpu"]
    return {"type": "cpu", "threads": len(cores)}


def test_the_command_line_attaches_lists_and_removes(
    client: gh.Client, digits: str, local_service: LocalService, http: httpx2.Client
):
    job = running(client, digits)
    try:
        options = ("--layers", "conv*", "--kinds", "output,param", "--every", "5", "--json")
        made = json.loads(local_service.command("probe", job.id, *options))
        assert (made["every"], made["kinds"]) == (5, ["output", "param"])
        (listed,) = json.loads(local_service.command("probe", job.id, "--list", "--json"))
        assert listed["id"] == made["id"]
        assert made["id"] in local_service.command("probe", job.id, "--list")
        gone = json.loads(local_service.command("probe", job.id, "--remove", made["id"], "--json"))
        assert gone["state"] == "removed"
        assert http.get(f"/jobs/{job.id}/probes").json()["data"] == []
    finally:
        job.cancel(force=True)
