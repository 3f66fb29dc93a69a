"""Why a job failed, data frames, tensors of torch, and streams of several jobs."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from safetensors.numpy import save
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import glasshouse as gh
from glasshouse.client.data.statistics import Captured
from tests.stub_api import answer, events, job, job_of, listing, problem
from tests.unit.client.test_stream import frame

Connect = Callable[..., gh.Client]
ERROR = {
    "code": "non_finite",
    "message": "The loss is NaN.",
    "category": "nonfinite",
    "retryable": False,
    "rank": 1,
    "layer": None,
    "step": 7,
    "hint": "Lower the learning rate.",
    "log_tail": "old\n",
}
FINDING = {
    "type": "finding",
    "job": "job_1",
    "seq": 9,
    "layer": "conv2",
    "step": 6,
    "message": "conv2's output has 3 NaN in step 6.",
    "causes": ["the learning rate is high", "the data has NaN"],
}


def service(document: dict[str, Any], asked: list[Request], *more: Route) -> list[Route]:
    """A job, its first finding and what it printed."""

    def log(request: Request) -> Response:
        asked.append(request)
        return PlainTextResponse("step 6\nstep 7\nboom\n")

    found = [FINDING] if document["error"] else []
    return [
        Route("/api/v1/jobs/job_1", lambda _: answer(document)),
        Route("/api/v1/jobs/job_1/events", lambda _: listing(*found)),
        Route("/api/v1/jobs/job_1/logs", log),
        *more,
    ]


def test_a_failure_is_explained_by_reason_place_hint_and_the_failing_ranks_last_lines(
    connect: Connect,
):
    asked: list[Request] = []
    document = job(state="failed", error=ERROR, attempt=2, warnings=[])
    client = connect(*service(document, asked))
    told = job_of(client).explain()
    assert (told.code, told.rank, told.layer, told.step) == ("non_finite", 1, "conv2", 7)
    assert dict(asked[0].query_params) == {"rank": "1", "tail": "20"}
    assert str(told).splitlines() == [
        "job_1 is failed: The loss is NaN.",
        "  where: layer conv2, step 7, rank 1",
        "  first finding: conv2's output has 3 NaN in step 6.",
        "  likely cause: the learning rate is high",
        "  likely cause: the data has NaN",
        "  hint: Lower the learning rate.",
        "  note: this is attempt 2",
        f"  see {client.url}/errors/non_finite",
        "",
        "last log lines:",
        "  step 6",
        "  step 7",
        "  boom",
    ]


def test_a_job_that_waits_is_explained_by_the_queue(connect: Connect):
    queue = listing(
        {"job": "job_0", "reason": "other"}, {"job": "job_1", "reason": "No device is free."}
    )
    document = job(state="queued", progress=None)
    client = connect(*service(document, [], Route("/api/v1/queue", lambda _: queue)))
    told = job_of(client).explain()
    assert told.reason == "No device is free."
    assert told.docs is None
    assert told.log == ("step 6", "step 7", "boom")


def test_a_job_that_runs_says_how_far_it_is(connect: Connect):
    told = job_of(connect(*service(job(warnings=[{"detail": "Odd."}]), []))).explain()
    assert told.reason == "step 410 of 1000"
    assert told.notes == ("Odd.",)
    assert told.finding is None


def metrics(connect: Connect) -> gh.Job:
    columns = {
        "step": [0, 1, 2],
        "epoch": [0, 0, 1],
        "values": {"loss": [2.0, "NaN", 1.0], "validation/loss": [None, 1.5, None]},
    }
    return job_of(connect(Route("/api/v1/jobs/job_1/metrics/query", lambda _: answer(columns))))


@pytest.mark.parametrize(("library", "module"), [("pandas", pd), ("polars", pl)])
def test_a_metric_comes_out_as_a_data_frame(connect: Connect, library: Any, module: Any):
    found = metrics(connect).metrics("loss").df(library)
    assert isinstance(found, module.DataFrame)
    assert list(found.columns) == ["step", "epoch", "loss"]
    assert found["step"].to_list() == [0, 1, 2]
    np.testing.assert_array_equal(found["loss"].to_numpy(), [2.0, np.nan, 1.0])


def test_several_metrics_are_one_frame_with_a_row_for_each_step(connect: Connect):
    table = metrics(connect).metrics(["loss", "validation/loss"])
    assert list(table) == ["loss", "validation/loss"]
    assert len(table["validation/loss"]) == 1
    found = table.df("pandas")
    assert list(found.columns) == ["step", "epoch", "loss", "validation/loss"]
    assert found["epoch"].tolist() == [0, 0, 1]
    np.testing.assert_array_equal(found["validation/loss"], [np.nan, 1.5, np.nan])


def test_a_missing_library_is_an_error(connect: Connect, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pandas or polars"):
        metrics(connect).metrics("loss").df()
    with pytest.raises(ImportError, match="needs polars"):
        metrics(connect).metrics("loss").df("polars")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float32, torch.float32),
        (ml_dtypes.bfloat16, torch.bfloat16),
        (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
        (ml_dtypes.float8_e5m2, torch.float8_e5m2),
        (np.int64, torch.int64),
    ],
)
def test_tensors_come_as_torchs_in_their_own_dtype(dtype: Any, expected: torch.dtype):
    values = np.array([[1, 2], [3, 0.5]]).astype(dtype)
    captured = Captured(3, values)
    found = captured.torch()
    assert found.dtype == expected
    assert found.float().tolist() == values.astype(np.float32).tolist()
    assert captured.numpy() is values
    both = gh.as_torch({"a": values, "b": values[0]})
    assert both["b"].shape == (2,)


def test_several_tensors_of_a_step_come_in_one_request(connect: Connect):
    asked: list[Request] = []

    def tensors(request: Request) -> Response:
        asked.append(request)
        return Response(save({"fc/output": np.ones(2, np.float32)}))

    client = connect(Route("/api/v1/jobs/job_1/tensors", tensors))
    found = job_of(client).tensors(["fc/output", "fc.weight/param"], step=3)
    assert found["fc/output"].tolist() == [1.0, 1.0]
    assert asked[0].query_params.getlist("name") == ["fc/output", "fc.weight/param"]
    assert asked[0].query_params["step"] == "3"


@pytest.mark.parametrize(("mode", "best"), [("min", "ckpt_2"), ("max", "ckpt_1"), (None, "ckpt_2")])
def test_the_best_checkpoint_is_the_one_with_the_best_finite_value(
    connect: Connect, mode: Any, best: str
):
    losses = {"ckpt_1": 3.0, "ckpt_2": 1.0, "ckpt_3": "NaN", "ckpt_4": None}
    made = [
        {"id": name, "step": step, "metrics": {} if loss is None else {"validation/loss": loss}}
        for step, (name, loss) in enumerate(losses.items())
    ]
    found = job_of(connect(Route("/api/v1/jobs/job_1/checkpoints", lambda _: listing(*made))))
    assert found.best_checkpoint(mode=mode).id == best
    with pytest.raises(gh.APIError, match=r"no checkpoint with a value of accuracy$"):
        found.best_checkpoint("accuracy")


def test_the_best_checkpoint_by_a_metric_of_a_named_source(connect: Connect):
    """The name of the source says nothing about the direction."""
    made = [
        {
            "id": f"ckpt_{step}",
            "step": step,
            "metrics": {
                "validation/error_cases/accuracy": value,
                "validation/error_cases/loss": 1 - value,
            },
        }
        for step, value in enumerate((0.5, 0.9, 0.7))
    ]
    found = job_of(connect(Route("/api/v1/jobs/job_1/checkpoints", lambda _: listing(*made))))
    assert found.best_checkpoint("validation/error_cases/accuracy").id == "ckpt_1"
    with pytest.raises(gh.APIError, match=r"did you mean validation/error_cases/loss\?"):
        found.best_checkpoint()


def test_the_best_checkpoint_by_accuracy_is_the_one_with_the_highest(connect: Connect):
    made = [
        {"id": f"ckpt_{step}", "step": step, "metrics": {"validation/accuracy": value, "q": value}}
        for step, value in enumerate((0.5, 0.9, 0.7))
    ]
    found = job_of(connect(Route("/api/v1/jobs/job_1/checkpoints", lambda _: listing(*made))))
    assert found.best_checkpoint("validation/accuracy").id == "ckpt_1"
    assert found.best_checkpoint("validation/accuracy", mode="min").id == "ckpt_0"
    with pytest.raises(
        ValueError, match=r"mode cannot be inferred .*'q'.* set mode='min' or mode='max'"
    ):
        found.best_checkpoint("q")
    assert found.best_checkpoint("q", mode="max").id == "ckpt_1"


def test_lines_are_followed_by_rank_until_the_end(connect: Connect):
    common = {"job": "job_1", "attempt": 1, "at": "2026-11-20T10:00:00.000Z"}
    records = [
        {"type": "log", "rank": 0, "stream": "stdout", "lines": ["a", "b"]},
        {"type": "log", "rank": 1, "stream": "stdout", "lines": ["c"]},
        {"type": "end", "state": "succeeded"},
    ]
    records = [{**common, "seq": seq, **one} for seq, one in enumerate(records, 1)]
    body = b"".join(frame(one["type"], one, one["seq"]) for one in records)

    def stream(request: Request) -> Response:
        return Response(body, media_type="text/event-stream")

    client = connect(Route("/api/v1/jobs/job_1/stream", stream))
    assert list(job_of(client).follow()) == ["a", "b", "c"]
    assert list(job_of(client).follow(rank=1)) == ["c"]


class TwoJobs:
    """Streams two jobs in turn, and cuts each connection after some events."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], str | None]] = []

    def stream(self, request: Request) -> Response:
        cursor = request.headers.get("last-event-id") or request.query_params["after"]
        self.asked.append((request.query_params.getlist("job"), cursor))
        seen = {pair.partition(":")[0]: int(pair.partition(":")[2]) for pair in cursor.split(",")}
        left = [
            {**record, "job": name}
            for name in ("job_1", "job_2")
            for record in events(8)
            if record["seq"] > seen[name]
        ]
        if not left:
            return Response(status_code=204)
        body = b""
        for record in left[:3]:
            seen[record["job"]] = record["seq"]
            ids = ",".join(f"{name}:{seq}" for name, seq in seen.items())
            body += f"id: {ids}\n".encode() + frame(record["type"], record, None)
        return Response(body, media_type="text/event-stream")


@pytest.mark.usefixtures("quick")
def test_the_events_of_several_jobs_come_each_once_over_cut_connections(connect: Connect):
    two = TwoJobs()
    client = connect(Route("/api/v1/stream", two.stream))
    stream = client.stream(["job_1", "job_2"])
    found = [(event.job, event.seq) for event in stream]
    assert found == [(name, seq) for name in ("job_1", "job_2") for seq in range(1, 9)]
    assert two.asked[0] == (["job_1", "job_2"], "job_1:0,job_2:0")
    assert two.asked[1][1] == "job_1:3,job_2:0"
    assert len(two.asked) == 6
    assert stream.last_seqs == {"job_1": 8, "job_2": 8}
    rest = client.stream(["job_1", "job_2"], after={"job_1": 8, "job_2": 6})
    assert [(event.job, event.seq) for event in rest] == [("job_2", 7), ("job_2", 8)]


STATUSES = {
    405: gh.MethodNotAllowedError,
    406: gh.NotAcceptableError,
    408: gh.RequestTimeoutError,
    421: gh.MisdirectedRequestError,
    431: gh.HeadersTooLargeError,
    502: gh.BadGatewayError,
    504: gh.GatewayTimeoutError,
}


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_of_its_own_is_still_of_its_family(connect: Connect, status: int):
    client = connect(Route("/api/v1/jobs/job_1", lambda _: problem(status)), max_retries=0)
    family = gh.BadRequestError if status < 500 else gh.InternalServerError
    with pytest.raises(family) as caught:
        client.jobs.get("job_1")
    assert type(caught.value) is STATUSES[status]
    assert caught.value.problem["status"] == status


def test_an_answer_of_a_proxy_has_the_request_id_of_its_header(connect: Connect):
    page = PlainTextResponse("<html>", 500, {"X-Request-Id": "req-7"})
    with pytest.raises(gh.InternalServerError) as caught:
        connect(Route("/api/v1/jobs/job_1", lambda _: page)).jobs.get("job_1")
    assert caught.value.request_id == "req-7"
