"""Waiting for a job, and reading what came of it."""

import json
import math
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import glasshouse as gh
from glasshouse import jsonio
from glasshouse.client.training.probe_specs import as_probe
from tests.stub_api import answer, events, job, job_of, listing, problem

Connect = Callable[..., gh.Client]
SAFETENSORS = "application/vnd.safetensors"


def route(path: str, *responses: Response, keep: list[Request] | None = None) -> Route:
    """Answers in turn; the last one again and again."""
    left = list(responses)

    async def endpoint(request: Request) -> Response:
        if keep is not None:
            keep.append(request)
        return left.pop(0) if len(left) > 1 else left[0]

    return Route(f"/api/v1{path}", endpoint, methods=["GET", "POST", "PATCH", "DELETE"])


def test_waiting_ends_when_the_job_has_succeeded(connect: Connect):
    asked: list[Request] = []
    responses = [
        answer(job(state="queued"), ETag='"1"'),
        answer(job(), ETag='"2"'),
        Response(status_code=304),
        answer(job(state="succeeded"), ETag='"3"'),
    ]
    client = connect(route("/jobs/job_1", *responses, keep=asked))
    assert job_of(client).wait(timeout=60).state == "succeeded"
    assert [request.headers.get("if-none-match") for request in asked] == [
        None,
        '"1"',
        '"2"',
        '"2"',
    ]
    assert asked[1].headers["prefer"].startswith("wait=")


def test_a_failed_job_raises_its_reason(connect: Connect):
    error = {
        "code": "nonfinite_found",
        "message": "the loss is NaN",
        "category": "nonfinite",
        "rank": 0,
        "layer": "fc",
        "step": 17,
        "hint": "Lower the learning rate.",
        "log_tail": "last words",
    }
    client = connect(route("/jobs/job_1", answer(job(state="failed", error=error))))
    with pytest.raises(gh.JobFailed) as caught:
        job_of(client).wait()
    assert caught.value.error["step"] == 17
    for told in ("the loss is NaN", "layer fc", "step 17", "Lower the"):
        assert told in str(caught.value)
    assert "last words" not in str(caught.value)  # where the engine raised it says nothing more
    user_code = error | {"category": "user_code"}
    client = connect(route("/jobs/job_1", answer(job(state="failed", error=user_code))))
    with pytest.raises(gh.JobFailed, match="last words"):
        job_of(client).wait()


def test_a_cancelled_job_raises(connect: Connect):
    client = connect(route("/jobs/job_1", answer(job(state="cancelled"))))
    with pytest.raises(gh.JobCancelled):
        job_of(client).wait()


def test_waiting_gives_up_in_time_and_the_job_continues(connect: Connect):
    client = connect(route("/jobs/job_1", answer(job())))
    with pytest.raises(gh.WaitTimeout, match="not canceled"):
        job_of(client).wait(timeout=0.1, progress=True)


def test_unknown_fields_are_kept(connect: Connect):
    client = connect(route("/jobs/job_1", answer(job(mood="sunny"))))
    found = client.jobs.get("job_1")
    assert found.mood == "sunny"
    assert found.data["mood"] == "sunny"
    assert "job_1" in repr(found)
    with pytest.raises(AttributeError, match="tempo"):
        _ = found.tempo


def test_figures_that_are_nan_or_inf_are_numbers(connect: Connect):
    summary = {"loss": {"last": "NaN", "min": "-Infinity"}}
    client = connect(route("/jobs/job_1", answer(job(summary=summary))))
    loss = client.jobs.get("job_1").summary["loss"]
    assert math.isnan(loss["last"])
    assert loss["min"] == -math.inf


def test_a_metric_is_a_series_of_float64_with_its_steps(connect: Connect):
    columns = {
        "step": [0, 1, 2, 3],
        "values": {"loss": [2.5, "NaN", None, "Infinity"]},
        "epoch": [0, 0, 0, 1],
    }
    client = connect(route("/jobs/job_1/metrics/query", answer(columns)))
    series = job_of(client).metrics("loss")
    assert series.steps.tolist() == [0, 1, 3]
    assert series.epochs.tolist() == [0, 0, 1]
    values = series.numpy()
    assert values.dtype == np.float64
    np.testing.assert_array_equal(values, [2.5, math.nan, math.inf])
    np.testing.assert_array_equal(np.asarray(series), values)
    assert len(series) == 3
    assert next(iter(series)) == (0, 2.5)
    assert "last inf at step 3" in repr(series)


def test_the_table_of_metrics_has_a_row_per_name(connect: Connect):
    row = {"name": "loss", "last": "NaN", "min": 0.1, "max": 2.0, "count": 9}
    client = connect(route("/jobs/job_1/metrics", listing(row)))
    table = job_of(client).metrics()
    assert table["loss"]["count"] == 9
    assert math.isnan(table["loss"]["last"])


def tensors(**arrays: np.ndarray) -> Response:
    return Response(save(arrays), media_type=SAFETENSORS, headers={"X-Tensor-Step": "25"})


def test_a_layers_output_is_an_array(connect: Connect):
    asked: list[Request] = []
    made = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = "/jobs/job_1/layers/conv1/output"
    client = connect(route(path, tensors(tensor=made), keep=asked))
    output = job_of(client).layers["conv1"].output(step=25, slice="0:2")
    np.testing.assert_array_equal(output, made)
    output[0, 0] = 7  # it is the caller's own
    query = {"step": "25", "slice": "0:2", "format": "safetensors"}
    assert dict(asked[0].query_params) == query
    assert job_of(client).layers["conv1"].tensor("output").step == 25


def test_a_parameter_is_asked_for_by_torchs_name(connect: Connect):
    grad = np.ones((2, 2), np.float32)
    path = "/jobs/job_1/layers/fc.weight/param_grad"
    client = connect(route(path, tensors(tensor=grad)))
    layers = job_of(client).layers
    np.testing.assert_array_equal(layers["fc"].param_grad("weight"), grad)
    np.testing.assert_array_equal(layers["fc.weight"].param_grad(), grad)


def test_a_step_that_was_not_captured_is_not_found(connect: Connect):
    missing = problem(404, "step_not_captured", nearest=[0, 25])
    client = connect(route("/jobs/job_1/layers/conv1/output", missing))
    with pytest.raises(gh.NotFoundError) as caught:
        job_of(client).layers["conv1"].output(step=3)
    assert caught.value.problem["nearest"] == [0, 25]


def test_statistics_are_columns_over_steps(connect: Connect):
    entry = {
        "layer": "conv1",
        "kind": "output",
        "phase": "train",
        "step": [0, 25],
        "values": {"mean": [0.5, "NaN"], "nan": [0, 3]},
    }
    client = connect(route("/jobs/job_1/stats", listing(entry)))
    stats = job_of(client).layers["conv1"].stats("output")
    assert stats.steps.tolist() == [0, 25]
    np.testing.assert_array_equal(stats["mean"], [0.5, math.nan])
    assert list(stats) == ["mean", "nan"]


def test_outputs_come_in_their_own_dtypes(connect: Connect):
    made = {
        "fc/value": np.array([[1.5]], ml_dtypes.bfloat16),
        "fc/id": np.array([3], np.int64),
        "fc/prob": np.array([0.5], np.float16),
        "eight/value": np.array([1.0], ml_dtypes.float8_e4m3fn),
    }
    body = Response(save(made), media_type=SAFETENSORS)
    client = connect(route("/jobs/job_1/artifacts/outputs.safetensors", body))
    found = job_of(client).outputs()
    assert {name: array.dtype for name, array in found.items()} == {
        name: array.dtype for name, array in made.items()
    }
    assert found["fc/value"][0, 0] == 1.5


def test_damaged_tensors_are_an_error_of_ours(connect: Connect):
    client = connect(route("/jobs/job_1/artifacts/outputs.safetensors", Response(b"no")))
    with pytest.raises(gh.APIError, match="not a valid safetensors file"):
        job_of(client).outputs()


def test_the_newest_checkpoint_gives_the_weights(connect: Connect):
    found = listing({"id": "ckpt_b", "step": 20}, {"id": "ckpt_a", "step": 10})
    client = connect(
        route("/jobs/job_1/checkpoints", found),
        route("/checkpoints/ckpt_b/weights", tensors(**{"fc.weight": np.zeros(2, np.float32)})),
    )
    assert list(job_of(client).weights()) == ["fc.weight"]
    assert [one.id for one in client.checkpoints.list("job_1")] == ["ckpt_a", "ckpt_b"]


def test_a_job_without_a_checkpoint_says_so(connect: Connect):
    client = connect(route("/jobs/job_1/checkpoints", listing()))
    with pytest.raises(gh.APIError, match="no complete checkpoint"):
        job_of(client).weights()


def test_statistics_of_a_layer_that_gives_several_tensors_name_them(connect: Connect):
    asked: list[Request] = []
    entry = {"layer": "gru.0", "kind": "output", "phase": "train", "step": [0], "values": {}}
    client = connect(route("/jobs/job_1/stats", listing(), listing(entry), keep=asked))
    with pytest.raises(gh.APIError, match=r"gru has statistics of output for: gru\.0"):
        job_of(client).layers["gru"].stats("output")
    assert [request.query_params["layer"] for request in asked] == ["gru", "gru.*"]


def packed(*tokens: str) -> np.ndarray:
    return np.frombuffer(json.dumps(tokens).encode(), np.uint8)


def test_a_vocabulary_has_each_token_at_its_id(connect: Connect):
    learned = {"text.tokens": packed("bon", "jour"), "text.shift": np.zeros(1)}
    client = connect(
        route("/checkpoints/ckpt_a", answer({"id": "ckpt_a"})),
        route("/checkpoints/ckpt_a/data", tensors(**learned)),
    )
    checkpoint = client.checkpoints.get("ckpt_a")
    assert checkpoint.vocabulary() == ["<padding>", "<unknown>", "bon", "jour"]
    assert checkpoint.vocabulary("text") == checkpoint.vocabulary()
    with pytest.raises(gh.APIError, match="vocabularies of: text; name one"):
        checkpoint.vocabulary("words")


def test_of_several_vocabularies_one_must_be_named(connect: Connect):
    learned = tensors(**{"source.tokens": packed("bon"), "target.tokens": packed("good")})
    client = connect(
        route("/checkpoints/ckpt_a", answer({"id": "ckpt_a"})),
        route("/checkpoints/ckpt_a/data", learned),
    )
    checkpoint = client.checkpoints.get("ckpt_a")
    with pytest.raises(gh.APIError, match="source, target; name one"):
        checkpoint.vocabulary()
    assert checkpoint.vocabulary("target")[2:] == ["good"]


def test_statistics_that_were_not_recorded_say_why(connect: Connect):
    """Of the three reasons there may be; and a layer that there is not is named as such."""

    def explanation_of(*probes: dict[str, Any], form: str = "stats", layer: str = "fc") -> str:
        client = connect(
            route("/jobs/job_1/stats", *[listing()] * 2),
            route("/jobs/job_1/probes", listing(*probes)),
            route("/jobs/job_1/layers", listing({"name": "conv1"}, {"name": "fc"})),
        )
        found = job_of(client).layers[layer]
        with pytest.raises(gh.APIError) as caught:
            found.stats("param") if form == "stats" else found.history("param")
        return str(caught.value)

    watching = {"kinds": ["param"], "matched": ["fc.weight"], "want": ["stats"]}
    assert "no probe observes param of 'fc'" in explanation_of()
    assert 'job.probe("fc", kinds="param")' in explanation_of()
    assert 'want="histogram")' in explanation_of(form="history")
    others = [watching | {"kinds": ["output"]}, watching | {"matched": ["fc2.weight"]}]
    assert "no probe observes" in explanation_of(*others)
    assert "has no data yet" in explanation_of(watching)
    assert 'stores no histogram; add "histogram" to its want' in explanation_of(
        watching, form="history"
    )
    assert explanation_of(layer="fcc") == "the network has no layer 'fcc'; did you mean fc?"


def test_polled_events_are_those_of_the_stream(connect: Connect):
    records = events(6)
    pages = [listing(*records[:4], next="4"), listing(*records[4:])]
    client = connect(route("/jobs/job_1/events", *pages))
    found = list(job_of(client).events(types=["state", "metrics", "end", "attempt"]))
    assert [event.seq for event in found] == [1, 2, 3, 4, 5, 6]


def test_logs_are_text(connect: Connect):
    asked: list[Request] = []
    client = connect(route("/jobs/job_1/logs", PlainTextResponse("hällo\n"), keep=asked))
    assert job_of(client).logs(rank=0, tail=5) == "hällo\n"
    assert dict(asked[0].query_params) == {"rank": "0", "tail": "5"}


def text_page(text: str, **headers: str) -> PlainTextResponse:
    named = {f"X-{name.replace('_', '-')}": value for name, value in headers.items()}
    return PlainTextResponse(text, headers={"X-Last-Seq": "9"} | named)


def test_a_log_of_several_responses_is_put_together(connect: Connect):
    asked: list[Request] = []
    pages = [text_page("a\n", Has_More="true", Last_Seq="4"), text_page("b\n")]
    client = connect(route("/jobs/job_1/logs", *pages, keep=asked))
    since = datetime(2026, 11, 25, 10, tzinfo=timezone(timedelta(hours=2)))
    found = job_of(client).logs([0, 2], level="warning", grep="a|b", since=since)
    assert found == "a\nb\n"
    filters = [("rank", "0"), ("rank", "2"), ("level", "warning"), ("grep", "a|b")]
    for request, after in zip(asked, ([], [("after", "4")]), strict=True):
        *given, (name, at) = [
            pair for pair in request.query_params.multi_items() if pair not in after
        ]
        assert (given, name, datetime.fromisoformat(at)) == (filters, "since", since)
        assert [pair for pair in request.query_params.multi_items() if pair in after] == after


def test_last_lines_of_several_responses_are_put_together(connect: Connect):
    asked: list[Request] = []
    pages = [
        text_page("d\ne\n", Has_More="true", First_Seq="7"),
        text_page("", Has_More="true", First_Seq="4"),
        text_page("c\n", Has_More="true", First_Seq="2"),
    ]
    client = connect(route("/jobs/job_1/logs", *pages, keep=asked))
    assert job_of(client).logs(tail=3, since="10m") == "c\nd\ne\n"
    assert [dict(request.query_params) for request in asked] == [
        {"since": "10m", "tail": "3"},
        {"since": "10m", "tail": "1", "before": "7"},
        {"since": "10m", "tail": "1", "before": "4"},
    ]


def printed(seq: int, *lines: str, more: str | None = None, seen: int = 9) -> Response:
    record = {"seq": seq, "type": "log", "rank": 0, "stream": "stdout", "lines": list(lines)}
    found = listing(*([record] if lines else []), next=more)
    found.headers["X-Last-Seq"] = str(seen)
    if more is not None:
        found.headers["X-Has-More"] = "true"
    return found


def test_a_filtered_log_is_followed_to_the_end_of_the_job(connect: Connect):
    asked: list[Request] = []
    pages = [
        printed(3, "a", "b", seen=5),  # the last lines
        printed(6, "c", more="6", seen=6),
        printed(7, "d", seen=8),
        printed(8, seen=12),  # nothing in time
        printed(13, "e", seen=13),
        printed(14, seen=14),
        printed(15, "f", seen=15),  # printed before the end that was seen
    ]
    client = connect(
        route("/jobs/job_1/logs", *pages, keep=asked),
        route("/jobs/job_1", answer(job(state="running")), answer(job(state="succeeded"))),
    )
    found = list(job_of(client).follow(level="info", tail=2))
    assert found == list("abcdef")
    given = [request.query_params.get("after") for request in asked]
    assert given == [None, "5", "6", "8", "12", "13", "14"]
    assert [request.query_params.get("tail") for request in asked[:2]] == ["2", None]
    assert asked[1].headers["prefer"] == "wait=20"


def test_a_job_is_cancelled_renamed_and_deleted(connect: Connect):
    asked: list[Request] = []
    client = connect(
        route("/jobs/job_1/cancel", answer(job(state="cancelling"), 202), keep=asked),
        route("/jobs/job_1", answer(job(name="new")), Response(status_code=204), keep=asked),
    )
    assert client.jobs.cancel("job_1", force=True).state == "cancelling"
    assert client.jobs.patch("job_1", name="new").name == "new"
    client.jobs.delete("job_1")
    assert [request.method for request in asked] == ["POST", "PATCH", "DELETE"]
    assert dict(asked[0].query_params) == {"force": "true"}
    assert asked[1].headers["content-type"] == "application/merge-patch+json"


PROBE = {"id": "prb_1", "object": "probe", "job": "job_1", "state": "pending", "applied_step": None}


def test_a_probe_is_attached_followed_changed_and_removed(connect: Connect):
    made: list[Request] = []
    seen: list[Request] = []
    bodies: list[bytes] = []

    async def create(request: Request) -> Response:
        bodies.append(await request.body())
        made.append(request)
        return answer(PROBE, 201)

    active = {**PROBE, "state": "active", "applied_step": 7}
    gone = {**PROBE, "state": "removed"}
    responses = [answer(PROBE), answer(active), answer(PROBE), answer(gone, 202)]
    client = connect(
        Route("/api/v1/jobs/job_1/probes", create, methods=["POST"]),
        route("/jobs/job_1/probes/prb_1", *responses, keep=seen),
    )
    probe = job_of(client).probe("conv*", "output", at=[3], start=2)
    assert jsonio.loads(bodies[0]) == {
        "layers": ["conv*"],
        "kinds": ["output"],
        "want": ["stats"],
        "at": [3],
        "start": 2,
    }
    assert "idempotency-key" in made[0].headers
    assert probe.wait(timeout=60).applied_step == 7
    assert probe.update(every=5).state == "pending"
    assert probe.remove().state == "removed"
    assert [request.method for request in seen] == ["GET", "GET", "PATCH", "DELETE"]


def test_a_probe_samples_every_step_by_default(connect: Connect):
    assert as_probe("fc", ("output", "param"), "full", {"every": None})["every"] == 1
    assert as_probe(["fc"], "output", "stats", {"every": 4})["every"] == 4


def test_the_probes_of_a_job_are_listed(connect: Connect):
    client = connect(route("/jobs/job_1/probes", listing(PROBE)))
    (found,) = job_of(client).probes()
    assert (found.id, found.state, found.path) == ("prb_1", "pending", "/jobs/job_1/probes/prb_1")
