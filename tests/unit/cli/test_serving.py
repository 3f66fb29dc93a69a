"""The commands that serve models and predict, against a real little server."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save_file
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.stub_api import answer, job, listing, problem
from tests.unit.cli.conftest import Run
from tests.unit.client.test_predictions import looked_up
from tests.unit.client.test_transport import Scripted

PATH = "/api/v1/models/{name}/predict"
SERVING: dict[str, Any] = {
    "models": [{"reference": "m@production", "model": "m", "version": 3}],
    "requests": 12,
    "requests_per_s": 1.5,
    "latency_ms": {"p50": 1.25, "p99": 9.0},
    "queue_ms": None,
    "waiting": 2,
    "answered": {"m:3": 10},
    "refused": {"queue_full": 1},
    "failed": {},
    "shadows": {"m:4": {"requests": 5, "same_classes": 4, "max_difference": 0.125}},
    "drift": [
        {
            "model": "m",
            "version": 3,
            "state": "watching",
            "detail": None,
            "rows": 1000,
            "at": "2026-11-27T10:00:00Z",
            "series": [
                {"of": "field", "name": "x", "measure": "rooms", "psi": 0.1}
                | {"threshold": 0.2, "drifted": False},
                {"of": "field", "name": "x", "measure": "price", "psi": 1.25}
                | {"threshold": 0.2, "drifted": True},
            ],
        },
        {"model": "n", "version": 1, "state": "unavailable", "detail": "Its rows are gone."}
        | {"rows": 0, "at": None, "series": []},
    ],
}


def predicted() -> Response:
    outputs = {"fc/value": [[0.5, "NaN"], [1.0, 2.0]], "fc/id": [0, 1], "fc/class": ["cat", "dog"]}
    outputs["fc/prob"] = [[0.1] * 20] * 2
    body = {"outputs": outputs, "model": "m", "version": 3, "non_finite": ["fc/value"]}
    headers = {"x-model-version": "m:3", "server-timing": "queue;dur=0.2, compute;dur=1"}
    return Response(json.dumps(body), headers=headers, media_type="application/json")


def test_predictions_are_a_table_or_a_document(run: Run):
    script = Scripted(predicted(), predicted())
    routes = [script.route(PATH, "POST")]
    given = ("predict", "m", "--row", "a=1", "--row", "b=x y", "--row", 'c="3"', "--top-k", "2")
    code, out, err = run(*given, "--outputs", "fc", "--fields", "value,id", routes=routes)
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["row", "fc/class", "fc/id", "fc/prob", "fc/value"],
        ["0", "cat", "0", "[20]", "0.5", "nan"],
        ["1", "dog", "1", "[20]", "1", "2"],
    ]
    assert err == "m:3  queue 0.2 ms, compute 1 ms\nNaN or Inf in fc/value\n"
    assert json.loads(script.bodies[0]) == {
        "rows": [{"a": 1, "b": "x y", "c": "3"}],
        "outputs": ["fc"],
        "fields": ["value", "id"],
        "top_k": 2,
    }
    code, out, err = run(*given, "--json", routes=routes)
    found = json.loads(out)
    assert (code, err, found["version"]) == (0, "", 3)
    assert found["outputs"]["fc/value"][0] == [0.5, "NaN"]
    assert found["timing"] == {"queue_ms": 0.2, "compute_ms": 1.0}


def test_a_training_job_predicts(run: Run):
    async def found(_request: Request) -> Response:
        return answer(job(id="job_1"))

    body = json.dumps({"outputs": {"fc/id": [1]}, "job": "job_1", "step": 120})
    headers = {"x-job-step": "job_1:120", "server-timing": "queue;dur=0.2, compute;dur=1"}
    media = {"headers": headers, "media_type": "application/json"}
    script = Scripted(Response(body, **media), Response(body, **media))
    routes = [
        Route("/api/v1/jobs", lambda _: listing(job(id="job_1"))),
        Route("/api/v1/jobs/job_1", found),
        script.route("/api/v1/jobs/job_1/predict", "POST"),
    ]
    given = ("predict", "job_1", "--row", "a=1", "--top-k", "2")
    code, out, err = run(*given, routes=routes)
    assert (code, err) == (0, "job_1 step 120  queue 0.2 ms, compute 1 ms\n")
    assert [line.split() for line in out.splitlines()] == [["row", "fc/id"], ["0", "1"]]
    assert json.loads(script.bodies[0]) == {"rows": [{"a": 1}], "top_k": 2}
    code, out, _ = run(*given, "--json", routes=routes)
    assert (code, json.loads(out)["job"], json.loads(out)["step"]) == (0, "job_1", 120)


def test_rows_and_inputs_are_read_from_files(run: Run, tmp_path: Path):
    (tmp_path / "x.csv").write_text("a,b,c\n1,x,\n2.5,3,y\n")
    (tmp_path / "x.jsonl").write_text('{"a": [1, 2]}\n\n{"a": [3]}\n')
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float32))
    save_file({"a": np.ones((2, 1), np.float32)}, tmp_path / "x.safetensors")
    (tmp_path / "x.png").write_bytes(b"pixels")
    script = Scripted(*(predicted() for _ in range(6)))
    routes = [script.route(PATH, "POST"), *looked_up()]
    for option, file in (
        ("--rows", "x.csv"),
        ("--rows", "x.jsonl"),
        ("--input", "x.npy"),
        ("--input", "x.safetensors"),
        ("--image", "x.png"),
    ):
        given = ("predict", "m@production", option, str(tmp_path / file))
        assert run(*given, routes=routes)[0] == 0
    assert run("predict", "m", "--row", f"p=@{tmp_path / 'x.png'}", routes=routes)[0] == 0
    rows = [{"a": 1, "b": "x", "c": None}, {"a": 2.5, "b": 3, "c": "y"}]
    assert json.loads(script.bodies[0]) == {"rows": rows}
    assert json.loads(script.bodies[1]) == {"rows": [{"a": [1, 2]}, {"a": [3]}]}
    assert script.bodies[2].startswith(b"\x93NUMPY")
    assert [*load(script.bodies[3])] == ["a"]
    image = {"image": {"base64": "cGl4ZWxz"}}
    assert json.loads(script.bodies[4]) == {"rows": [{"text": image}]}
    assert json.loads(script.bodies[5]) == {"rows": [{"p": image}]}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "exactly one of --row, --rows, --input, --image,"),
        (("--text", "a", "--row", "a=1"), "exactly one"),
        (("--row", "a"), "not of the form column=value"),
        (("--rows", "x.parquet"), "use .jsonl or .csv"),
        (("--input", "x.csv"), "use .npy or .safetensors"),
    ],
)
def test_wrong_usage_of_predict(run: Run, arguments: tuple[str, ...], says: str):
    code, out, err = run("predict", "m", *arguments, routes=[])
    assert (code, out) == (2, "")
    assert says in " ".join(err.replace("│", "").split())


@pytest.mark.parametrize(("status", "code"), [(404, 5), (422, 1), (500, 1), (504, 6)])
def test_errors_of_predictions_have_exit_codes(run: Run, status: int, code: int):
    script = Scripted(*(problem(status) for _ in range(3)))
    given = ("predict", "m", "--row", "a=1")
    assert run(*given, routes=[script.route(PATH, "POST")])[0] == code


def test_serve_builds_a_spec(run: Run):
    script = Scripted(answer(job(kind="serve"), 201))
    given = ["serve", "m@production", "n", "--name", "s", "--device", "cuda:1", "--min", "0"]
    given += ["--idle", "60", "--max-queue", "9", "--max-batch", "8", "--max-delay", "2.5"]
    given += ["--canary", "m@candidate=0.05", "--shadow", "n:4=1"]
    given += ["--log", "0.5", "--redact", "name", "--redact", "a*"]
    code, out, _ = run(*given, routes=[script.route("/api/v1/jobs", "POST")])
    assert (code, out) == (0, "job_1\n")
    assert json.loads(script.bodies[0]) == {
        "kind": "serve",
        "models": [
            {"model": "m@production", "canary": {"model": "m@candidate", "share": 0.05}},
            {"model": "n", "shadow": {"model": "n:4", "share": 1.0}},
        ],
        "name": "s",
        "devices": {"type": "cuda", "ids": [1]},
        "replicas": {"min": 0},
        "idle_s": 60.0,
        "max_queue": 9,
        "max_batch_size": 8,
        "max_delay_ms": 2.5,
        "request_log": {"share": 0.5, "redact": ["name", "a*"]},
    }
    code, _, err = run("serve", "m", "--redact", "name", routes=[])
    assert code == 2
    assert "--redact" in err


RECORDED: dict[str, Any] = {
    "id": "rec_2",
    "at": "2026-01-02T03:04:05.678Z",
    "model": "m",
    "version": 3,
    "status": 200,
    "code": None,
    "num_rows": 2,
    "queue_ms": 0.25,
    "compute_ms": 1.5,
    "inputs": {"age": [1, 2], "text": ["a" * 100, "b"]},
    "outputs": {"fc/id": [0, 1]},
    "redacted": ["name"],
    "too_large": [],
}


def test_recorded_requests_are_a_table_or_a_document_and_can_be_deleted(run: Run):
    bare = dict.fromkeys(("num_rows", "queue_ms", "compute_ms", "inputs", "outputs"))
    refused = RECORDED | bare | {"id": "rec_1", "status": 429, "code": "queue_full"}
    large = RECORDED | {"inputs": None, "too_large": ["inputs"]}
    script = Scripted(*(listing(RECORDED, large, refused) for _ in range(3)))
    found = Scripted(*(answer(job(kind="serve")) for _ in range(9)))
    path = "/api/v1/jobs/{job}/requests"
    routes = [script.route(path), found.route("/api/v1/jobs/{job}")]
    code, out, err = run("requests", "job_1", "--model", "m", "--status", "200", routes=routes)
    assert (code, err) == (0, "")
    first, second, third, fourth = [line.split() for line in out.splitlines()]
    assert first[:4] == ["at", "model", "status", "rows"]
    assert second[1:6] == ["m:3", "200", "2", "0.25", "1.5"]
    assert '{"age":[1,2],"text":["aaa' in second[6]
    assert third[6:8] == ["(too", "large)"]
    assert fourth[1:] == ["m:3", "429", "queue_full", *"-----"]
    assert dict(script.requests[0].query_params) == {"model": "m", "status": "200", "limit": "20"}
    code, out, _ = run("requests", "job_1", "--limit", "1", "--json", routes=routes)
    assert [one["id"] for one in json.loads(out)["requests"]] == ["rec_2"]
    deleted = Scripted(Response(status_code=204))
    routes = [deleted.route(path, "DELETE"), found.route("/api/v1/jobs/{job}")]
    code, out, err = run("requests", "job_1", "--delete", routes=routes)
    assert (code, out) == (0, "")
    assert err == "the recorded requests of job_1 are deleted\n"
    assert run("requests", "job_1", "--delete", "--status", "200", routes=[])[0] == 2


def test_serve_waits_until_requests_are_answered(run: Run):
    jobs = Scripted(
        answer(job(kind="serve", state="starting", serving={"models": []})),
        answer(job(kind="serve", serving=SERVING)),
    )
    created = Scripted(answer(job(kind="serve", state="queued"), 201))
    routes = [created.route("/api/v1/jobs", "POST"), jobs.route("/api/v1/jobs/job_1")]
    code, out, _ = run("serve", "m@production", "--wait", "--json", routes=routes)
    assert code == 0
    assert json.loads(out)["serving"]["models"][0]["version"] == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--canary", "m@c"), "not of the form mnist@candidate=0.05"),
        (("--canary", "m@c=2"), "the share is a number above 0, at most 1"),
        (("--shadow", "x@c=0.5"), "x@c is a version of none of the models"),
        (("m:2", "--canary", "m@c=0.5"), "a version of several of the models (m, m:2)"),
        (("--timeout", "3"), "it limits --wait"),
    ],
)
def test_wrong_usage_of_serve(run: Run, arguments: tuple[str, ...], says: str):
    code, out, err = run("serve", "m", *arguments, routes=[])
    assert (code, out) == (2, "")
    assert says in " ".join(err.replace("│", "").split())


def test_show_and_the_lists_say_what_is_served(run: Run):
    async def one(request: Request) -> Response:
        return answer(job(kind="serve", progress={"requests": 12}, summary={}, serving=SERVING))

    shown = run("show", "job_1", routes=[Route("/api/v1/jobs/job_1", one)])[1]
    for text in ("m@production", "12, now 1.5/s", "p50 1.25 ms, p99 9 ms", "m:3 10"):
        assert text in shown
    assert "drift of m:3: watching, 1 of 2 series have drifted in the last 1000 rows" in shown
    assert ["field", "x", "price", "1.25", "0.2"] in [line.split() for line in shown.splitlines()]
    assert "rooms" not in shown
    assert "drift of n:1: unavailable (Its rows are gone.)" in shown
    assert "4 of 5 with the same classes, largest difference 0.125" in shown
    jobs = listing(job(kind="serve", progress={"requests": 12}))
    assert "12 requests" in run("jobs", routes=[Route("/api/v1/jobs", lambda _: jobs)])[1]
    served = [
        {"job": "job_a", "reference": "m@x", "version": 3, "state": "running"},
        {"job": "job_b", "reference": "m:1", "version": None, "state": "paused"},
    ]
    model: dict[str, Any] = {
        "name": "m",
        "num_versions": 2,
        "latest": 3,
        "aliases": {"x": 3},
        "served_by": served,
    }
    route = Route("/api/v1/models", lambda _: listing(model, {**model, "served_by": served[1:]}))
    rows = [line.split() for line in run("models", routes=[route])[1].splitlines()]
    assert [row[-1] for row in rows] == ["served", "3", "paused"]
    version = {"checkpoint": "ckpt_1", "step": 5, "aliases": [], "created_at": "2026-11-20"}
    whole = {**model, "versions": [{**version, "version": 3}, {**version, "version": 1}]}
    route = Route("/api/v1/models/m", lambda _: answer(whole))
    _, out, err = run("models", "show", "m", routes=[route])
    assert [line.split()[4] for line in out.splitlines()[1:]] == ["job_a", "-"]
    assert err == "job_b serves m:1, and is paused\n"
