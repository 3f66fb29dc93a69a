"""What is called for which event, and what is done about the answers."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import glasshouse as gh
from glasshouse import jsonio
from glasshouse.client.monitoring.callbacks import NAMES
from glasshouse.client.training.early_stop import StopLimit
from tests.stub_api import Serve, answer, job, job_of, problem
from tests.unit.client.test_stream import Streamed

Connect = Callable[..., gh.Client]


def log_of_two_epochs() -> list[dict[str, Any]]:
    """Two epochs of two steps, each judged at its end."""
    made: list[dict[str, Any]] = [
        {"type": "state", "from": "queued", "to": "running", "reason": None},
    ]
    for step in range(4):
        values = {"loss": 4.0 - step, "lr": 0.1, "time/step_s": 0.1}
        made.append({"type": "metrics", "step": step, "epoch": step // 2, "values": values})
        if step % 2:
            judged = {"validation/loss": 8.0 - step}
            made.append({"type": "metrics", "step": step, "epoch": step // 2, "values": judged})
    made.append({"type": "end", "state": "succeeded"})
    common = {"job": "job_1", "attempt": 1, "at": "2026-11-20T10:00:00.000Z"}
    return [{**common, "seq": seq, **event} for seq, event in enumerate(made, 1)]


class Notes:
    """Records the calls and returns the configured answers."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.answers = answers

    def _note(self, name: str, *given: Any) -> Any:
        self.calls.append((name, given))
        return self.answers.get(name)


def _method(name: str) -> Any:
    return lambda self, *given: self._note(name, *given)


for _name in NAMES:
    setattr(Notes, _name, _method(_name))


class StubService:
    """A service with one job: it streams events and records the commands that it receives."""

    def __init__(self, records: list[dict[str, Any]], state: str = "succeeded") -> None:
        self.received: list[tuple[str, Any]] = []
        self.streamed = Streamed(records, [])
        self.state = state
        self.refusal: Response | None = None

    @property
    def routes(self) -> list[Route]:
        async def command(request: Request) -> Response:
            self.received.append((request.url.path, jsonio.loads(await request.body() or b"{}")))
            if self.refusal is not None:
                return self.refusal
            return answer({"id": "cmd_1", "job": "job_1", "state": "applied", "step": 3}, 201)

        async def act(request: Request) -> Response:
            self.received.append((request.url.path, None))
            return answer(job())

        ended = answer(job(state=self.state, error={"message": "no"}))
        return [
            self.streamed.route,
            Route("/api/v1/jobs/job_1", lambda _: ended),
            Route("/api/v1/jobs/job_1/commands", command, methods=["POST"]),
            Route("/api/v1/jobs/job_1/{verb}", act, methods=["POST"]),
        ]


def test_the_calls_of_two_epochs_come_in_keras_order_with_their_logs(connect: Connect):
    service = StubService(log_of_two_epochs())
    notes = Notes()
    assert job_of(connect(*service.routes)).watch(notes).state == "succeeded"
    names = [name for name, _ in notes.calls if name != "on_event"]
    epoch = ["on_train_batch_end", "on_train_batch_end", "on_eval_end", "on_test_end"]
    assert names == [
        *("on_train_begin", "on_epoch_begin", *epoch, "on_epoch_end"),
        *("on_epoch_begin", *epoch, "on_epoch_end", "on_train_end"),
    ]
    told = dict(notes.calls)
    assert told["on_train_batch_end"] == (3, {"loss": 1.0, "lr": 0.1})
    assert told["on_eval_end"] == ({"loss": 5.0},)
    assert told["on_epoch_end"] == (1, {"loss": 1.0, "lr": 0.1, "validation/loss": 5.0})
    assert told["on_train_end"] == told["on_epoch_end"][1:]
    events = [given[0].seq for name, given in notes.calls if name == "on_event"]
    assert events == list(range(1, 9))


def test_steps_that_come_again_after_a_restart_are_called_again(connect: Connect):
    records = log_of_two_epochs()
    again = [{**record, "attempt": 2} for record in records[1:]]
    records = [*records[:6], *again]  # the first attempt was lost in its second epoch
    records = [{**record, "seq": seq} for seq, record in enumerate(records, 1)]
    notes = Notes()
    job_of(connect(*StubService(records).routes)).watch(notes)
    begun = [given[0] for name, given in notes.calls if name == "on_epoch_begin"]
    over = [given[0] for name, given in notes.calls if name == "on_epoch_end"]
    assert begun == [0, 1, 0, 1]
    assert over == [0, 0, 1]


def test_a_loss_that_is_no_number_arrives_as_one(connect: Connect):
    records = log_of_two_epochs()
    records[1]["values"]["loss"] = "NaN"
    notes = Notes()
    job_of(connect(*StubService(records).routes)).watch(notes)
    first = next(given for name, given in notes.calls if name == "on_train_batch_end")
    assert math.isnan(first[1]["loss"])


@pytest.mark.parametrize(
    ("wish", "path", "body"),
    [
        ("cancel", "cancel", None),
        ("pause", "pause", None),
        ("checkpoint", "commands", {"do": "checkpoint"}),
        ("evaluate", "commands", {"do": "evaluate"}),
        ({"set": {"optimizer.lr": 0.5}}, "commands", {"set": {"optimizer.lr": 0.5}}),
    ],
)
def test_the_action_that_a_callback_returns_is_carried_out(
    connect: Connect, wish: Any, path: str, body: Any
):
    service = StubService(log_of_two_epochs())
    job_of(connect(*service.routes)).watch(Notes(on_train_begin=wish))
    assert service.received == [(f"/api/v1/jobs/job_1/{path}", body)]


def test_a_wish_that_comes_too_late_is_no_error(connect: Connect):
    service = StubService(log_of_two_epochs())
    service.refusal = problem(409, "job_ended")
    job_of(connect(*service.routes)).watch(Notes(on_train_end="checkpoint"))
    assert len(service.received) == 1
    service.refusal = problem(409, "other")
    with pytest.raises(gh.ConflictError):
        job_of(connect(*service.routes)).watch(Notes(on_train_end="checkpoint"))


@pytest.mark.parametrize("wrong", ["end", True, {"set": 3}, {"get": {}}, 0.1, ["stop"]])
def test_an_answer_that_nobody_can_grant_is_an_error(connect: Connect, wrong: Any):
    with pytest.raises(TypeError, match="a callback returned"):
        job_of(connect(*StubService(log_of_two_epochs()).routes)).watch(Notes(on_train_begin=wrong))


def test_a_method_that_would_never_be_called_is_an_error(connect: Connect):
    class Wrong:
        def on_batch_ended(self) -> None: ...

    found = job_of(connect(*StubService(log_of_two_epochs()).routes))
    with pytest.raises(
        TypeError, match="unknown method on_batch_ended; callback methods are: on_train_begin"
    ):
        found.watch(Wrong())
    with pytest.raises(TypeError, match="has no callback method"):
        found.watch(print)
    with pytest.raises(TypeError, match="at least one"):
        found.watch()


def test_the_base_class_has_every_method_and_wants_nothing(connect: Connect):
    service = StubService(log_of_two_epochs())
    assert job_of(connect(*service.routes)).watch(gh.Callback(), gh.Callback()).has_ended
    assert service.received == []


def test_a_job_that_failed_raises_after_the_last_call(connect: Connect):
    records = log_of_two_epochs()
    records[-1]["state"] = "failed"
    notes = Notes()
    with pytest.raises(gh.JobFailed):
        job_of(connect(*StubService(records, "failed").routes)).watch(notes)
    assert notes.calls[-1][0] == "on_train_end"


class Awaited:
    """A callback that is a coroutine."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    async def on_train_batch_end(self, step: int, logs: Any) -> str | None:
        await asyncio.sleep(0)
        self.steps.append(step)
        return "checkpoint" if step == 2 else None


def test_a_coroutine_is_awaited_by_the_async_client_only(serve: Serve):
    service = StubService(log_of_two_epochs())

    async def watch() -> list[int]:
        async with gh.AsyncClient(serve(service.routes), "k") as client:
            callback = Awaited()
            await (await client.jobs.get("job_1")).watch(callback)
            return callback.steps

    assert asyncio.run(watch()) == [0, 1, 2, 3]
    assert [body for _, body in service.received] == [{"do": "checkpoint"}]
    with (
        gh.Client(serve(service.routes), "k") as client,
        pytest.raises(TypeError, match="AsyncClient"),
    ):
        client.jobs.get("job_1").watch(Awaited())


@pytest.mark.parametrize(
    ("stop", "progress", "path", "limits"),
    [
        ({"steps": 1000}, {"step": 40}, "stop.steps", [41, 140, 240]),
        ({"steps": 100}, {"step": 40}, "stop.steps", [41, 100, 100]),
        ({"epochs": 10}, {"step": 40, "epoch": 2}, "stop.epochs", [3, 4, 6]),
        ({"seconds": 60}, {"step": 40, "eta_s": 48.0}, "stop.seconds", [13.0, 14.0, 16.0]),
        ({"steps": 5}, {}, "stop.steps", [1, 5, 5]),
    ],
)
def test_a_limit_is_the_soonest_and_then_further_ahead(
    stop: Any, progress: Any, path: str, limits: list[float]
):
    limit = StopLimit({"stop": stop})
    assert limit.path == path
    found: list[float] = []
    for step in (90, 100, None):
        found.append(limit.soonest(progress))
        limit.widen(step)
    assert found == limits


def test_stopping_tries_again_until_a_limit_lies_ahead(connect: Connect):
    sent: list[Any] = []

    async def command(request: Request) -> Response:
        sent.append(jsonio.loads(await request.body())["set"])
        state = "applied" if sent[-1]["stop.steps"] > 500 else "rejected"
        return answer({"id": "cmd_1", "job": "job_1", "state": state, "step": 480}, 201)

    def asked(request: Request) -> Response:
        state = "applied" if sent[-1]["stop.steps"] > 500 else "rejected"
        return answer({"id": "cmd_1", "job": "job_1", "state": state, "step": 480})

    client = connect(
        Route("/api/v1/jobs/job_1", lambda _: answer(job())),
        Route("/api/v1/jobs/job_1/spec", lambda _: answer({"stop": {"steps": 1000}})),
        Route("/api/v1/jobs/job_1/commands", command, methods=["POST"]),
        Route("/api/v1/jobs/job_1/commands/cmd_1", asked),
    )
    assert job_of(client).stop().id == "job_1"
    assert sent == [{"stop.steps": 411}, {"stop.steps": 550}]
