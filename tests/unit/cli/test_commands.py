"""The commands against a real little server: exit codes, documents, what goes where."""

import io
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import glasshouse
from api.submission.start import merged
from engine.datasets.formats import formats
from glasshouse.cli import main
from glasshouse.cli.service import doctor
from glasshouse.cli.service.processes import ROOT
from glasshouse.client.training.arguments import device_of
from tests.stub_api import Serve, answer, events, job, listing, problem
from tests.unit.cli.conftest import Run
from tests.unit.client.test_stream import Streamed


def fixed(path: str, response: Response, method: str = "GET") -> Route:
    async def endpoint(request: Request) -> Response:
        return response

    return Route(f"/api/v1{path}", endpoint, methods=[method])


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (answer(job()), 0),
        (problem(400), 1),
        (problem(401), 4),
        (problem(403), 4),
        (problem(404), 5),
        (problem(409), 1),
        (problem(422), 1),
        (problem(500), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_code(run: Run, response: Response, code: int):
    route = fixed("/jobs/job_1/cancel", response, "POST")
    assert run("cancel", "job_1", routes=[route])[0] == code


def test_an_error_is_reported_to_people_and_with_json_also_to_programs(run: Run):
    routes = [fixed("/jobs", problem(422, "invalid_spec", detail="No."), "POST")]
    spec = ROOT / "examples" / "digits.json"
    code, out, err = run("submit", str(spec), "-s", "data=1", "--json", routes=routes)
    told = json.loads(out)["error"]
    assert (code, told["kind"], told["exit_code"]) == (1, "UnprocessableEntityError", 1)
    assert told["problem"]["code"] == "invalid_spec"
    assert err == "error: No.\n"


def test_wrong_usage_is_exit_code_2(run: Run):
    for arguments in (["--nope"], ["submit"], ["cancel"], ["up", "--port", "70000"], ["fly"]):
        code, out, err = run(*arguments, routes=[])
        assert (code, out) == (2, "")
        assert err


def test_an_unreachable_service_is_exit_code_8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("glasshouse.client.connection.requests.FIRST_DELAY_S", 0.0)
    monkeypatch.delenv("GLASSHOUSE_URL", raising=False)
    monkeypatch.setenv("GLASSHOUSE_HOME", str(tmp_path))
    assert main(["jobs"]) == 8
    monkeypatch.setenv("GLASSHOUSE_URL", "http://127.0.0.1:9")
    assert main(["jobs"]) == 8


def test_a_missing_file_is_exit_code_1(run: Run):
    code, _, err = run("submit", "nowhere.json", routes=[])
    assert code == 1
    assert "nowhere.json" in err


@pytest.mark.parametrize("text", ["{", "[]", '{"a": NaN}'])
def test_a_file_that_is_not_a_spec_is_reported(run: Run, tmp_path: Path, text: str):
    (tmp_path / "job.json").write_text(text)
    code, _, err = run("submit", str(tmp_path / "job.json"), routes=[])
    assert code == 1
    assert "job.json" in err


class Submitting:
    """Takes datasets and jobs, and keeps what came."""

    def __init__(self, state: str = "succeeded") -> None:
        self.bodies: list[Any] = []
        self.uploads: list[str] = []
        error = {"message": "the loss is NaN", "layer": "fc"} if state == "failed" else None
        self.job = job(state=state, error=error)
        self.stream = Streamed([*events(9)[:-1], {**events(9)[-1], "state": state}], [])

    @property
    def routes(self) -> list[Route]:
        capabilities = answer({"capabilities": {"builtin_datasets": ["digits"]}})
        splits = {"train": 5, "validation": 2}
        ready = answer({"id": "ds_1", "state": "ready", "columns": [], "splits": splits})
        return [
            Route("/api/v1/jobs", self.create, methods=["POST"]),
            fixed("/jobs", listing(self.job)),
            Route("/api/v1/datasets", self.upload, methods=["POST"]),
            fixed("/", capabilities),
            fixed("/datasets", listing({"id": "ds_1"})),
            fixed("/datasets/ds_1", ready),
            fixed("/jobs/job_1", answer(self.job)),
            self.stream.route,
        ]

    async def create(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        return answer(job(state="queued"), 201)

    async def upload(self, request: Request) -> Response:
        self.uploads.append(request.query_params.get("name") or (await request.body()).decode())
        return answer({"id": "ds_1", "state": "pending"}, 201)


def write_spec(folder: Path, **fields: Any) -> str:
    (folder / "job.json").write_text(json.dumps({"kind": "train", **fields}))
    return str(folder / "job.json")


def test_submit_prints_the_id_alone_on_stdout(run: Run, tmp_path: Path):
    service = Submitting()
    spec = write_spec(tmp_path, seed=1)
    code, out, err = run(
        "submit", spec, "-s", "seed=2", "-s", "stop.steps=5", routes=service.routes
    )
    assert (code, out) == (0, "job_1\n")
    assert "glasshouse watch job_1" in err
    assert service.bodies == [{"kind": "train", "seed": 2, "stop": {"steps": 5}}]


def test_submit_reads_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"kind": "train"}'))
    service = Submitting()
    code, out, _ = run("submit", "-", "--json", routes=service.routes)
    assert code == 0
    assert json.loads(out)["id"] == "job_1"


def test_submit_uploads_each_file_once_and_names_its_splits(run: Run, tmp_path: Path):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    service = Submitting()
    rows = str(tmp_path / "rows.csv")
    data = ["--data", f"train={rows}", "--data", f"validation={rows}"]
    run("submit", write_spec(tmp_path), *data, routes=service.routes)
    assert service.uploads == ["rows.csv"]
    assert service.bodies[0]["data"] == {
        "train": {"dataset": "ds_1", "split": "train"},
        "validation": {"dataset": "ds_1", "split": "validation"},
    }
    named = ["--data", f"validation/clean={rows}", "--data", "validation/noisy=digits"]
    run("submit", write_spec(tmp_path), *named, routes=service.routes)
    assert service.bodies[1]["data"]["validation"] == {
        "clean": {"dataset": "ds_1", "split": "validation"},
        "noisy": {"dataset": "ds_1", "split": "validation"},
    }


@pytest.mark.parametrize(
    ("device", "devices"),
    [
        ("cuda:1", {"worker": "host-a", "type": "cuda", "threads": 2, "ids": [1]}),
        ("cuda", {"worker": "host-a", "type": "cuda", "threads": 2}),
        ("auto", {"worker": "host-a", "type": "auto"}),
        ("cpu", {"worker": "host-a", "type": "cpu", "threads": 2}),
    ],
)
def test_each_command_that_makes_a_job_takes_a_device(
    run: Run, tmp_path: Path, device: str, devices: dict[str, Any]
):
    service = Submitting()
    given = {"type": "cpu", "threads": 2, "worker": "host-a"}
    spec = write_spec(tmp_path, devices=given)
    assert run("submit", spec, "--device", device, routes=service.routes)[0] == 0
    forks: list[Any] = []
    fork = sent("/jobs/job_1/fork", answer(job(id="job_3"), 201), forks)
    assert run("fork", "job_1", "--device", device, routes=[fork])[0] == 0
    assert [service.bodies[0]["devices"], merged(given, forks[0]["spec"]["devices"])] == [
        devices,
        devices,
    ]
    outputs = Response(save({"fc/value": np.ones((2, 3), np.float32)}))
    file = fixed("/jobs/job_1/artifacts/outputs.safetensors", outputs)
    inferred = ("infer", "job_1", "--data", "ds_1", "--device", device)
    assert run(*inferred, routes=[*service.routes, file])[0] == 0
    assert service.bodies[1]["devices"] == device_of(device)


@pytest.mark.parametrize("command", ["submit", "fork", "infer"])
def test_a_device_that_does_not_exist_is_wrong_usage(run: Run, tmp_path: Path, command: str):
    words = [command, write_spec(tmp_path) if command == "submit" else "job_1", "--device", "gpu"]
    words += ["--data", "ds_1"] if command == "infer" else []
    code, out, err = run(*words, routes=[])
    assert (code, out) == (2, "")
    assert "--device" in err
    assert "did you mean cuda?" in err


def test_submit_makes_a_built_in_dataset_that_the_spec_names(run: Run, tmp_path: Path):
    service = Submitting()
    data = {"train": {"dataset": "digits", "split": "train", "fraction": [0, 1]}}
    run("submit", write_spec(tmp_path, data=data), routes=service.routes)
    assert service.uploads == ['{"builtin":"digits"}']
    assert service.bodies[0]["data"]["train"]["dataset"] == "ds_1"
    code, _, err = run(
        "submit",
        write_spec(tmp_path, data={"train": {"dataset": "mist"}}),
        routes=service.routes,
    )
    assert code == 1
    assert "digits" in err


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 3), ("cancelled", 7)])
def test_watching_ends_with_the_jobs_own_code(run: Run, tmp_path: Path, state: str, code: int):
    service = Submitting(state)
    ended, out, err = run("submit", write_spec(tmp_path), "--watch", routes=service.routes)
    assert ended == code
    last_step = out.index("step 4 (1000 in all)  loss 0.4\n")
    assert last_step < out.index(f"job_1 {state}")
    assert ("the loss is NaN" in err) == (state == "failed")


def test_watching_with_json_prints_one_document(run: Run):
    code, out, err = run("watch", "job_1", "--json", routes=Submitting().routes)
    assert code == 0
    assert json.loads(out)["state"] == "succeeded"
    assert "step 4 (1000 in all)" in err


def test_ctrl_c_detaches_and_the_job_continues(serve: Serve, tmp_path: Path):
    reached, release = threading.Event(), threading.Event()

    def endless():
        yield b"id: 1\nevent: state\n"
        yield b'data: {"job":"job_1","seq":1,"type":"state","to":"running"}\n\n'
        reached.set()
        release.wait(120)

    async def stream(request: Request) -> Response:
        return StreamingResponse(endless(), media_type="text/event-stream")

    url = serve([fixed("/jobs/job_1", answer(job())), Route("/api/v1/jobs/job_1/stream", stream)])
    process = subprocess.Popen(
        [sys.executable, "-m", "glasshouse.cli", "watch", "job_1"],
        cwd=ROOT,
        env={"GLASSHOUSE_URL": url, "GLASSHOUSE_API_KEY": "k", "GLASSHOUSE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "job_1 running\n"
    assert reached.wait(60)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    release.set()
    assert process.returncode == 130
    assert (out, err) == ("", "detached; the job continues: glasshouse watch job_1\n")


def test_jobs_are_listed_as_a_table_or_as_one_document(run: Run):
    listed = listing(
        job(), job(id="job_2", state="failed", progress=None, name=None, created_by=None)
    )
    code, out, err = run("jobs", routes=[fixed("/jobs", listed)])
    assert (code, err) == (0, "")
    head, first, second = (re.split("  +", line.strip()) for line in out.splitlines())
    assert head == ["id", "name", "state", "steps", "age", "duration", "best", "by"]
    assert first[:4] == ["job_1", "mnist", "running", "410/1000"]
    assert first[-2:] == ["loss 0.29", "laptop"]
    assert second[:4] == ["job_2", "-", "failed", "-"]
    _, out, _ = run("jobs", "--json", "--limit", "1", routes=[fixed("/jobs", listed)])
    assert [one["id"] for one in json.loads(out)] == ["job_1"]


def test_the_version_is_reported_without_a_service(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"glasshouse {glasshouse.__version__}\n", "")
    assert main(["--version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": glasshouse.__version__}
    assert main(["--help"]) == 0
    assert "--version" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--json"], ["--json", "jobs"], []])
def test_an_unknown_command_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
):
    assert main(arguments) == 2
    assert "put it after the command" in capsys.readouterr().err or not arguments


def test_logs_are_printed_as_they_are(run: Run):
    routes = [
        fixed("/jobs/job_1", answer(job())),
        fixed("/jobs/job_1/logs", PlainTextResponse("a\nb\n")),
    ]
    assert run("logs", "job_1", routes=routes) == (0, "a\nb\n", "")
    _, out, _ = run("logs", "job_1", "--json", routes=routes)
    assert json.loads(out) == {"job": "job_1", "lines": ["a", "b"]}


def test_logs_are_followed_to_the_end_of_the_job(run: Run):
    records = events(6)
    records[1] = {**records[1], "type": "log", "rank": 0, "stream": "stdout", "lines": ["x", "y"]}
    records[2] = {**records[2], "type": "log", "rank": 1, "stream": "stdout", "lines": ["z"]}
    routes = [fixed("/jobs/job_1", answer(job())), Streamed(records, []).route]
    assert run("logs", "job_1", "-f", "--rank", "0", routes=routes) == (0, "x\ny\n", "")


def test_the_filters_of_a_log_are_those_of_the_request(run: Run):
    asked: list[Request] = []

    async def log(request: Request) -> Response:
        asked.append(request)
        return PlainTextResponse("a\u2028b\n", headers={"X-Last-Seq": "1"})

    routes = [fixed("/jobs/job_1", answer(job())), Route("/api/v1/jobs/job_1/logs", log)]
    given = ["--rank", "0", "--rank", "3", "--level", "warning", "--grep", "a|b", "--since", "10m"]
    code, out, _ = run("logs", "job_1", *given, "--tail", "5", "--json", routes=routes)
    assert (code, json.loads(out)) == (0, {"job": "job_1", "lines": ["a\u2028b"]})
    assert asked[0].query_params.multi_items() == [
        ("rank", "0"),
        ("rank", "3"),
        ("level", "warning"),
        ("grep", "a|b"),
        ("since", "10m"),
        ("tail", "5"),
    ]
    code, _, said = run("logs", "job_1", "--level", "loud", routes=routes)
    assert code == 2
    assert "debug, info, warning, error" in said


def test_a_filtered_log_is_followed(run: Run):
    record = {"seq": 3, "type": "log", "rank": 1, "stream": "stderr", "lines": ["x", "y"]}
    pages = [[record], [], []]

    async def log(request: Request) -> Response:
        found = listing(*pages.pop(0))
        found.headers["X-Last-Seq"] = "3"
        return found

    ended = fixed("/jobs/job_1", answer(job(state="succeeded")))
    routes = [ended, Route("/api/v1/jobs/job_1/logs", log)]
    assert run("logs", "job_1", "-f", "--level", "info", routes=routes) == (0, "x\ny\n", "")
    pages[:] = [[record], [], []]
    _, out, _ = run("logs", "job_1", "-f", "--json", "--grep", "x", routes=routes)
    assert json.loads(out) == record


def test_a_metric_is_printed_with_its_steps(run: Run):
    columns = {"step": [0, 1], "values": {"loss": [0.1, "NaN"]}, "epoch": [0, 0]}
    routes = [
        fixed("/jobs/job_1", answer(job())),
        fixed("/jobs/job_1/metrics/query", answer(columns)),
    ]
    assert run("metrics", "job_1", "loss", routes=routes) == (0, "0\t0.1\n1\tnan\n", "")
    _, out, _ = run("metrics", "job_1", "loss", "--json", routes=routes)
    assert json.loads(out) == {
        "job": "job_1",
        "name": "loss",
        "step": [0, 1],
        "values": [0.1, "NaN"],
    }


def test_the_metrics_of_a_job_are_a_table(run: Run):
    entry = {"name": "loss", "last": 0.5, "min": 0.5, "max": "Infinity", "count": 3}
    routes = [fixed("/jobs/job_1", answer(job())), fixed("/jobs/job_1/metrics", listing(entry))]
    code, out, _ = run("metrics", "job_1", routes=routes)
    assert code == 0
    assert out.splitlines()[1].split() == ["loss", "0.5", "0.5", "inf", "3"]
    _, out, _ = run("metrics", "job_1", "--json", routes=routes)
    assert json.loads(out) == [entry]


def captured(array: np.ndarray) -> list[Route]:
    body = Response(save({"tensor": array}), headers={"X-Tensor-Step": "25"})
    return [fixed("/jobs/job_1", answer(job())), fixed("/jobs/job_1/layers/conv1/output", body)]


def test_a_captured_tensor_is_described_and_saved(run: Run, tmp_path: Path):
    array = np.array([[1, np.nan], [3, np.inf]], np.float32)
    for name in ("a.npy", "a.npz", "a.safetensors"):
        arguments = ["layers", "job_1", "conv1", "--step", "25", "--save", str(tmp_path / name)]
        code, out, _ = run(*arguments, "--json", routes=captured(array))
        assert code == 0
        told = json.loads(out)
        assert (told["step"], told["shape"], told["nan"], told["inf"]) == (25, [2, 2], 1, 1)
        assert (told["mean"], told["saved"]) == (2.0, str(tmp_path / name))
    for found in (
        np.load(tmp_path / "a.npy"),
        np.load(tmp_path / "a.npz")["conv1/output"],
        load_file(tmp_path / "a.safetensors")["conv1/output"],
    ):
        np.testing.assert_array_equal(found, array)
    code, _, err = run("layers", "job_1", "conv1", "--save", "a.doc", routes=captured(array))
    assert code == 1
    assert ".safetensors" in err


def test_the_layers_of_a_job_are_a_table(run: Run):
    layer = {
        "name": "fc",
        "type": "Linear",
        "output_shape": [10],
        "parameters": 650,
        "trainable": True,
    }
    routes = [fixed("/jobs/job_1", answer(job())), fixed("/jobs/job_1/layers", listing(layer))]
    code, out, _ = run("layers", "job_1", routes=routes)
    assert code == 0
    assert out.splitlines()[1].split() == ["fc", "Linear", "10", "650", "yes"]


def test_inference_saves_the_outputs(run: Run, tmp_path: Path):
    service = Submitting()
    content = save({"fc/value": np.ones((2, 3), np.float32)})
    routes = [
        *service.routes,
        fixed("/jobs/job_1/artifacts/outputs.safetensors", Response(content)),
    ]
    file = tmp_path / "out.safetensors"
    code, out, _ = run(
        "infer", "job_1", "--data", "ds_1", "--split", "test", "--outputs", "conv1,fc",
        "--save", str(file), "--json", routes=routes,
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["outputs"]["fc/value"]["shape"] == [2, 3]
    assert file.read_bytes() == content
    assert service.bodies[0] == {
        "kind": "infer",
        "job": "job_1",
        "data": {"dataset": "ds_1", "split": "test"},
        "outputs": ["conv1", "fc"],
    }


def test_inference_that_takes_too_long_is_exit_code_6(run: Run):
    routes = Submitting("running").routes
    code, _, err = run("infer", "job_1", "--data", "ds_1", "--timeout", "0.05", routes=routes)
    assert code == 6
    assert "it was not canceled" in err


def test_checkpoints_are_listed_uploaded_downloaded_and_deleted(run: Run, tmp_path: Path):
    one = {"id": "ckpt_1", "state": "complete", "step": 0, "job": None, "name": "mine"}
    bodies: list[bytes] = []

    async def upload(request: Request) -> Response:
        bodies.append(await request.body())
        assert request.query_params["name"] == "mine.safetensors"
        return answer(one, 201)

    routes = [
        Route("/api/v1/checkpoints", upload, methods=["POST"]),
        fixed("/checkpoints", listing(one)),
        fixed("/checkpoints/ckpt_1/weights", Response(b"weights")),
        fixed("/checkpoints/ckpt_1", answer(one)),
        fixed("/checkpoints/ckpt_1", Response(status_code=204), "DELETE"),
        fixed("/jobs/job_1/checkpoints", listing(one | {"job": "job_1", "step": 7})),
    ]
    file = tmp_path / "mine.safetensors"
    file.write_bytes(b"as it is")
    assert run("checkpoints", "upload", str(file), routes=routes)[:2] == (0, "ckpt_1\n")
    assert bodies == [b"as it is"]
    assert "ckpt_1  complete     0  mine" in run("checkpoints", "list", routes=routes)[1]
    of_job = run("checkpoints", "list", "--job", "job_1", "--json", routes=routes)[1]
    assert json.loads(of_job)[0]["step"] == 7
    saved = tmp_path / "saved.safetensors"
    assert run("checkpoints", "download", "ckpt_1", str(saved), routes=routes)[0] == 0
    assert saved.read_bytes() == b"weights"
    deleted = json.loads(run("checkpoints", "delete", "ckpt_1", "--json", routes=routes)[1])
    assert deleted == {"id": "ckpt_1", "deleted": True}


def test_formats_are_listed_with_their_file_name_suffixes(run: Run):
    lines = run("datasets", "formats", routes=[])[1].splitlines()
    assert any(line.startswith("idx.zip        .idx.zip .zip") for line in lines)
    listed = json.loads(run("datasets", "formats", "--json", routes=[])[1])
    assert [one["name"] for one in listed] == [*formats()]


def test_datasets_are_uploaded_listed_shown_and_deleted(run: Run, tmp_path: Path):
    (tmp_path / "rows.csv").write_text("a\n1\n")
    service = Submitting()
    code, out, _ = run("datasets", "upload", str(tmp_path / "rows.csv"), routes=service.routes)
    assert (code, out) == (0, "ds_1\n")
    one = {
        "id": "ds_1",
        "state": "ready",
        "name": "rows",
        "columns": [{"name": "a", "dtype": "int64", "shape": []}],
        "splits": {"all": 1},
    }
    routes = [
        fixed("/datasets", listing(one)),
        fixed("/datasets/ds_1", answer(one)),
        fixed("/datasets/ds_1", Response(status_code=204), "DELETE"),
        fixed("/datasets/ds_1/rows", answer({"data": [{"a": 1}]})),
    ]
    assert "ds_1  ready     1  all     rows" in run("datasets", "list", routes=routes)[1]
    assert "a=1" in run("datasets", "show", "ds_1", routes=routes)[1]
    assert json.loads(run("datasets", "show", "ds_1", "--json", routes=routes)[1])["rows"] == [
        {"a": 1}
    ]
    deleted = json.loads(run("datasets", "delete", "ds_1", "--json", routes=routes)[1])
    assert deleted == {"id": "ds_1", "deleted": True}


def test_devices_and_status_are_shown(run: Run):
    device = {"id": "cpu:0", "worker": "host-a", "kind": "cpu", "healthy": True, "job": None}
    workers = {"id": "host-a", "state": "active", "host": "host-a", "version": "0.1.0"}
    routes = [
        fixed("/devices", listing(device)),
        fixed("/workers", listing(workers)),
        Route("/readyz", lambda request: answer({"status": "ok", "checks": {"database": "ok"}})),
    ]
    assert json.loads(run("devices", "--json", routes=routes)[1]) == [device]
    head, row = (line.split() for line in run("devices", routes=routes)[1].splitlines())
    assert head == ["device", "worker", "healthy", "job", "name"]
    assert row == ["cpu:0", "host-a", "yes", "-", "-"]
    told = json.loads(run("status", "--json", routes=routes)[1])
    assert (told["status"], told["workers"]) == ("ok", [workers])
    assert "host-a" in run("status", routes=routes)[1]


def test_a_link_for_the_browser_can_be_printed(run: Run):
    link = "http://127.0.0.1:1/open?ticket=t"
    routes = [fixed("/tickets", answer({"url": link}, 201), "POST")]
    assert run("open", "--print", routes=routes) == (0, link + "\n", "")


@pytest.mark.parametrize("command", ["open", "status"])
def test_a_home_without_a_started_service_is_reported(run: Run, tmp_path: Path, command: str):
    code, out, said = run(command, "--home", str(tmp_path / "empty"), routes=[])
    assert (code, out) == (1, "")
    assert f"no service has been started in {tmp_path / 'empty'} yet" in said


def test_doctor_reports_whether_the_dashboard_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    found = doctor.dashboard(tmp_path)
    assert (found.state, found.detail) == ("warn", "is not built")
    assert "make page" in str(found.fix)
    index = tmp_path / "dashboard" / "dist" / "index.html"
    index.parent.mkdir(parents=True)
    index.touch()
    found = doctor.dashboard(tmp_path)
    assert (found.state, found.detail) == ("ok", str(index.parent))


@pytest.mark.long
def test_doctor_reports_each_problem_with_a_fix(run: Run, tmp_path: Path):
    home = tmp_path / "open"
    home.mkdir(mode=0o755)
    code, out, _ = run("doctor", "--home", str(home), "--json", routes=[])
    checks = {check["name"]: check for check in json.loads(out)}
    assert code == 1
    assert checks["home"]["state"] == "fail"
    assert checks["home"]["fix"] == f"chmod go= {home}"
    for name in (
        "python",
        "torch",
        "kernel",
        "cuda kernel",
        "dashboard",
        "broker",
        "sqlite",
        "disk",
        "socket",
        "service",
    ):
        assert checks[name]["state"] in ("ok", "warn"), checks[name]
    home.chmod(0o700)
    code, out, _ = run("doctor", "--home", str(home), routes=[])
    assert code == 0
    assert "ok    home:" in out


@pytest.mark.parametrize("command", ["up", "down", "doctor", "submit", "watch", "jobs", "open"])
def test_every_command_has_a_help_text(run: Run, command: str):
    code, out, _ = run(command, "--help", routes=[])
    assert code == 0
    assert "--json" in out


@pytest.mark.parametrize(
    ("command", "module"),
    [("api", "api"), ("worker", "worker"), ("migrate", "models.migrate")],
)
def test_the_processes_are_the_modules_with_all_their_options(
    monkeypatch: pytest.MonkeyPatch, command: str, module: str
):
    became: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, arguments: became.append(arguments))
    monkeypatch.setattr("os.chdir", lambda _: None)
    assert main([command, "--help", "--port", "1"]) == 0
    assert became == [[sys.executable, "-m", module, "--help", "--port", "1"]]


PROBE = {"id": "prb_1", "job": "job_1", "state": "active", "layers": ["fc"], "kinds": ["output"]}
PROBE |= {"on": None, "every_now": 40, "cost_s": 0.002}
PROBE |= {"every": 5, "at": None, "matched": ["fc"], "bytes_per_step": 4000}


def test_probe_attaches_lists_and_removes(run: Run):
    routes = [
        fixed("/jobs/job_1", answer(job())),
        fixed("/jobs/job_1/probes", answer(PROBE, 201), "POST"),
        fixed("/jobs/job_1/probes", listing(PROBE)),
        fixed("/jobs/job_1/probes/prb_1", answer(PROBE)),
        fixed("/jobs/job_1/probes/prb_1", answer(PROBE, 202), "DELETE"),
    ]
    code, out, err = run("probe", "job_1", "--layers", "fc", "--every", "5", routes=routes)
    assert (code, out) == (0, "prb_1\n")
    assert "3.9 KiB" in err
    parts = ["--want", "full,sample", "--slice", "0:4,::2", "--max-bytes", "4096", "--lossless"]
    sent: list[bytes] = []

    async def keep(request: Request) -> Response:
        sent.append(await request.body())
        return answer(PROBE, 201)

    keeping = Route("/api/v1/jobs/job_1/probes", keep, methods=["POST"])
    assert run("probe", "job_1", "--layers", "fc", *parts, routes=[routes[0], keeping])[0] == 0
    fields = {
        "want": ["full", "sample"],
        "slice": "0:4,::2",
        "max_bytes": 4096,
        "every": 1,
        "lossless": True,
    }
    assert json.loads(sent[0]).items() >= fields.items()
    for text, ranks in (("all", "all"), ("0,3", [0, 3]), ("merged", "merged")):
        arguments = ("probe", "job_1", "--layers", "fc", "--ranks", text)
        assert run(*arguments, routes=[routes[0], keeping])[0] == 0
        assert json.loads(sent[-1])["ranks"] == ranks
    code, _, err = run("probe", "job_1", "--layers", "fc", "--ranks", "0,x", routes=routes)
    assert code == 2
    assert "neither all nor a list of ranks" in " ".join(err.split())
    code, out, _ = run("probe", "job_1", "--list", routes=routes)
    assert code == 0
    assert "every 5, now every 40" in out
    code, out, _ = run("probe", "job_1", "--remove", "prb_1", "--json", routes=routes)
    assert (code, json.loads(out)["id"]) == (0, "prb_1")


@pytest.mark.parametrize("options", [[], ["--list", "--layers", "fc"]])
def test_probe_does_one_thing(run: Run, options: list[str]):
    assert run("probe", "job_1", *options, routes=[])[0] == 2


@pytest.mark.parametrize(("command", "state"), [("pause", "pausing"), ("resume", "queued")])
def test_a_job_is_paused_and_resumed(run: Run, command: str, state: str):
    route = fixed(f"/jobs/job_1/{command}", answer(job(state=state), 202), "POST")
    code, out, err = run(command, "job_1", routes=[route])
    assert (code, out, err) == (0, "", f"job_1 is {state}\n")
    code, out, _ = run(command, "job_1", "--json", routes=[route])
    assert (code, json.loads(out)["state"]) == (0, state)


def sent(path: str, response: Response, bodies: list[Any]) -> Route:
    async def endpoint(request: Request) -> Response:
        bodies.append(json.loads(await request.body()))
        return response

    return Route(f"/api/v1{path}", endpoint, methods=["POST"])


def test_a_job_is_retried_and_forked(run: Run):
    bodies: list[Any] = []
    routes = [
        sent("/jobs/job_1/retry", answer(job(id="job_2"), 201), bodies),
        sent("/jobs/job_1/fork", answer(job(id="job_3"), 201), bodies),
    ]
    assert run("retry", "job_1", routes=routes)[:2] == (0, "job_2\n")
    changes = ("-s", "optimizer.args.lr=0.5", "-s", "stop.epochs=null", "--step", "40")
    code, out, _ = run("fork", "job_1", *changes, "--json", routes=routes)
    assert (code, json.loads(out)["id"]) == (0, "job_3")
    spec = {"optimizer": {"args": {"lr": 0.5}}, "stop": {"epochs": None}}
    assert bodies == [{}, {"spec": spec, "step": 40}]


def test_settings_are_changed(run: Run):
    bodies: list[Any] = []
    command = {"id": "cmd_1", "job": "job_1", "state": "pending", "step": None}
    routes = [
        fixed("/jobs/job_1", answer(job())),
        sent("/jobs/job_1/commands", answer(command, 201), bodies),
    ]
    given = ("lr=0.5", "betas=[0.8, 0.9]", "grad_clip.max=1")
    code, out, err = run("set", "job_1", *given, routes=routes)
    assert (code, out) == (0, "cmd_1\n")
    assert "pending" in err
    changes = {"optimizer.lr": 0.5, "optimizer.betas": [0.8, 0.9], "grad_clip.max": 1}
    assert bodies == [{"set": changes}]
    assert run("set", "job_1", "lr", routes=routes)[0] == 2
    assert run("set", "job_1", routes=routes)[0] == 2


def test_quotas_are_shown_and_changed_one_by_one(run: Run):
    shown = {"object": "quotas", "owner": "ada", "own": {"devices": 2}}
    shown |= {"limits": {"devices": 2, "streams": 9}, "used": {"devices": 1, "streams": 0}}
    asked: list[dict[str, Any]] = []

    async def put(request: Request) -> Response:
        asked.append(await request.json())
        return answer(shown)

    routes = [fixed("/quotas", answer(shown)), Route("/api/v1/quotas", put, methods=["PUT"])]
    code, out, _ = run("quota", routes=routes)
    assert code == 0
    assert "devices" in out
    assert asked == []
    code, out, _ = run(
        "quota", "ada", "-s", "streams=5", "-s", "devices=null", "--json", routes=routes
    )
    assert code == 0
    assert json.loads(out) == shown
    assert asked == [{"owner": "ada", "devices": None, "streams": 5}]
