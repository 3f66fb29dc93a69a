"""Steering a job through the client and the command line, against a real little server."""

from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import glasshouse as gh
from glasshouse import Client, jsonio
from tests.stub_api import answer, job, job_of, listing, problem

Connect = Callable[..., Client]
COMMAND = {
    "id": "cmd_1",
    "object": "command",
    "job": "job_1",
    "body": {"set": {"optimizer.lr": 0.5}},
    "state": "pending",
    "step": None,
    "problem": None,
}


def route(
    path: str, *responses: Response, asked: list[Any] | None = None, method: str = "POST"
) -> Route:
    """Answers in turn, the last for ever; keeps what it was sent."""
    left = list(responses)

    async def endpoint(request: Request) -> Response:
        body = await request.body()
        if asked is not None:
            asked.append(
                (request.url.path.removeprefix("/api/v1"), jsonio.loads(body) if body else None)
            )
            if "idempotency-key" in request.headers:
                asked.append("once")
        return left.pop(0) if len(left) > 1 else left[0]

    return Route(f"/api/v1{path}", endpoint, methods=[method])


def test_a_job_is_paused_resumed_retried_and_forked(connect: Connect):
    asked: list[Any] = []
    client = connect(
        route("/jobs/job_1/pause", answer(job(state="pausing"), 202), asked=asked),
        route("/jobs/job_1/resume", answer(job(state="queued"), 202), asked=asked),
        route("/jobs/job_1/retry", answer(job(id="job_2"), 201), asked=asked),
        route("/jobs/job_1/fork", answer(job(id="job_3"), 201), asked=asked),
    )
    found = job_of(client)
    assert found.pause().state == "pausing"
    assert found.resume().state == "queued"
    assert found.retry().id == "job_2"
    patch = {"optimizer": {"args": {"lr": 1.0}}}
    forked = found.fork(patch, step=4, load="model")
    assert isinstance(forked, gh.Job)
    assert (forked.id, client.jobs.fork("job_1").id) == ("job_3", "job_3")
    assert asked == [
        ("/jobs/job_1/pause", None),
        ("/jobs/job_1/resume", None),
        ("/jobs/job_1/retry", {}),
        "once",
        ("/jobs/job_1/fork", {"spec": patch, "step": 4, "load": "model"}),
        "once",
        ("/jobs/job_1/fork", {}),
        "once",
    ]


def test_settings_are_named_by_their_paths_or_as_arguments_of_the_optimizer(connect: Connect):
    asked: list[Any] = []
    applied = {**COMMAND, "state": "applied", "step": 7}
    client = connect(
        route("/jobs/job_1/commands", answer(COMMAND, 201), asked=asked),
        route("/jobs/job_1/commands/cmd_1", answer(COMMAND), answer(applied), method="GET"),
    )
    command = job_of(client).set({"grad_clip.max": 1.0}, lr=0.5)
    assert isinstance(command, gh.Command)
    assert (command.state, command.step, command.problem) == ("pending", None, None)
    assert (command.wait(60).state, command.step) == ("applied", 7)
    job_of(client).checkpoint()
    job_of(client).evaluate()
    sent = [entry[1] for entry in asked if entry != "once"]
    assert sent == [
        {"set": {"grad_clip.max": 1.0, "optimizer.lr": 0.5}},
        {"do": "checkpoint"},
        {"do": "evaluate"},
    ]
    assert asked.count("once") == 3


def test_commands_are_listed_and_read(connect: Connect):
    client = connect(
        route("/jobs/job_1/commands", listing(COMMAND), method="GET"),
        route("/jobs/job_1/commands/cmd_1", answer(COMMAND), method="GET"),
    )
    assert [one.id for one in job_of(client).commands(state="pending")] == ["cmd_1"]
    assert job_of(client).get_command("cmd_1").state == "pending"


def test_a_wrong_state_raises_the_error_class_of_its_status(connect: Connect):
    client = connect(route("/jobs/job_1/resume", problem(409, "job_not_paused")))
    with pytest.raises(gh.ConflictError) as refused:
        client.jobs.resume("job_1")
    assert refused.value.code == "job_not_paused"
