"""A job that is steered through the client and the command line: paused, changed, forked."""

import json

import pytest

import glasshouse as gh
from tests.acceptance.services import LocalService
from tests.acceptance.specs import lasting, small
from tests.waiting import until

STEPS = 300


def began(client: gh.Client, digits: str, steps: int = STEPS, **changes) -> gh.Job:
    """A job that has done some steps."""
    job = client.jobs.create(lasting(digits, steps, **changes))
    until(lambda: job.refresh().progress.get("step"), what="the first step")
    return job


def is_paused(job: gh.Job) -> bool:
    return job.refresh().state == "paused"


def test_a_job_that_is_paused_and_changed_and_its_twin_that_is_forked(
    client: gh.Client, digits: str
):
    job = began(client, digits, checkpoint={"every_steps": 1_000_000})
    command = job.set(lr=0.05).wait(90)
    assert (command.state, command.old, command.new) == (
        "applied",
        {"optimizer.lr": 0.1},
        {"optimizer.lr": 0.05},
    )
    job.pause()
    until(lambda: is_paused(job), what="the pause")
    assert job.devices == []
    job.resume()
    job.wait(timeout=200)
    assert job.paused_s > 0
    assert list(job.metrics("loss").steps) == list(range(STEPS))
    rates = job.metrics("lr").values
    assert list(rates) == [0.1] * command.step + [0.05] * (STEPS - command.step)
    (told,) = job.events(["command"])
    assert (told.command, told.step) == (command.id, command.step)

    undisturbed = client.jobs.create(lasting(digits, command.step))
    undisturbed.wait(timeout=200)
    forked = undisturbed.fork({"optimizer": {"args": {"lr": 0.05}}, "stop": {"steps": STEPS}})
    assert forked.parent == undisturbed.id
    forked.wait(timeout=200)
    assert forked.spec()["init"]["load"] == "all"
    assert list(forked.metrics("loss").steps) == list(range(command.step, STEPS))
    assert (forked.metrics("loss").values == job.metrics("loss").values[command.step :]).all()
    assert all((value == job.weights()[name]).all() for name, value in forked.weights().items())


def test_a_stream_stays_open_over_a_pause(client: gh.Client, digits: str):
    job = began(client, digits)
    states = []
    with job.stream(types=["state", "end"]) as stream:
        for event in stream:
            states.append(event.to if event.type == "state" else event.type)
            if states[-1] == "running" and "paused" not in states:
                job.pause()
            if states[-1] == "paused":
                job.resume()
    kept = ["pausing", "paused", "queued", "starting", "running", "succeeded", "end"]
    assert states[-7:] == kept


def test_a_weights_only_fork_begins_anew_and_a_retry_is_the_same_again(
    client: gh.Client, digits: str
):
    job = client.jobs.create(small(digits))
    job.wait(timeout=200)
    warm = job.fork({"optimizer": {"type": "Adam", "args": {"lr": 0.01}}})
    again = job.retry()
    warm.wait(timeout=200)
    again.wait(timeout=200)
    assert warm.spec()["init"]["load"] == "model"
    assert list(warm.metrics("loss").steps) == list(range(5))
    assert warm.metrics("loss").values[0] < job.metrics("loss").values[0]
    assert (again.metrics("loss").values == job.metrics("loss").values).all()
    assert again.spec(resolved=False) == job.spec(resolved=False)


def test_the_command_line_steers(client: gh.Client, digits: str, local_service: LocalService):
    job = began(client, digits, 1_000_000)
    try:
        told = json.loads(local_service.command("set", job.id, "lr=0.01", "--wait", "--json"))
        assert (told["state"], told["new"]) == ("applied", {"optimizer.lr": 0.01})
        assert json.loads(local_service.command("pause", job.id, "--json"))["state"] == "pausing"
        until(lambda: is_paused(job), what="the pause")
        changes = ("-s", "stop.steps=1000001", "-s", "priority=-5")
        forked = local_service.command("fork", job.id, *changes).strip()
        client.jobs.cancel(forked)
        assert json.loads(local_service.command("resume", job.id, "--json"))["state"] == "queued"
    finally:
        job.cancel(force=True)
    with pytest.raises(gh.JobCancelled):
        job.wait(timeout=90)
    again = client.jobs.get(local_service.command("retry", job.id).strip())
    assert again.parent == job.id
    again.cancel(force=True)
    with pytest.raises(gh.UnprocessableEntityError) as refused:
        client.jobs.create(small(digits)).set(speed=1)
    assert refused.value.problem["errors"][0]["pointer"] == "/set/optimizer.speed"
