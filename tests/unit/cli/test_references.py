"""What may stand for an id on the command line; and commands of what it stands for."""

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import glasshouse as gh
from glasshouse.cli import main
from glasshouse.cli.service.broker import StackError
from glasshouse.cli.service.stack import make_home
from glasshouse.cli.terminal import durations
from glasshouse.client.connection.address import find_service
from tests.stub_api import answer, job, listing, problem
from tests.unit.cli.conftest import Run
from tests.unit.cli.test_commands import fixed

A, B, C = (f"job_0{letter}" + "0" * 24 for letter in "abc")
JOBS = [
    job(id=C, name="mlp-2"),
    job(id=B, name="mlp-1"),
    job(id=A, name="mlp-1"),
    job(id="job_0a1", name="old"),
]


class Service:
    """Lists jobs, datasets and checkpoints as the service does, and deletes."""

    def __init__(self) -> None:
        self.deleted: list[str] = []
        self.num_asked = 0

    async def jobs(self, request: Request) -> Response:
        self.num_asked += 1
        asked = request.query_params
        found = [one for one in JOBS if asked.get("name") in (None, one["name"])]
        q = asked.get("q", "")
        found = [one for one in found if q in one["id"] or q in one["name"]]
        return listing(*found[: int(asked["limit"])])

    async def one(self, request: Request) -> Response:
        name = request.path_params["id"]
        if request.method == "DELETE":
            self.deleted.append(name)
            return Response(status_code=204)
        found = [one for one in JOBS if one["id"] == name]
        return answer(found[0]) if found else problem(404, "job_not_found", detail=f"No {name}.")

    @property
    def routes(self) -> list[Route]:
        rows = {"state": "ready", "columns": [], "splits": {}}
        datasets = [{"id": "ds_2", "name": "b", **rows}, {"id": "ds_1", "name": "a", **rows}]
        saved = {"state": "complete", "step": 3, "job": None}
        pages = [
            listing({"id": "ckpt_2", "name": None, **saved}, next="ckpt_2"),
            listing({"id": "ckpt_1", "name": "LeNet", **saved}),
        ]

        async def checkpoints(request: Request) -> Response:
            return pages[1 if "after" in request.query_params else 0]

        return [
            Route("/api/v1/jobs", self.jobs),
            Route("/api/v1/jobs/{id}", self.one, methods=["GET", "DELETE"]),
            fixed("/datasets", listing(*datasets)),
            *(fixed(f"/datasets/{one['id']}", answer(one)) for one in datasets),
            Route("/api/v1/checkpoints", checkpoints),
            Route("/api/v1/checkpoints/{id}", self.one, methods=["DELETE"]),
        ]


def shown(run: Run, service: Service, given: str) -> str:
    code, out, err = run("show", given, "--json", routes=service.routes)
    assert code == 0, err
    return json.loads(out)["id"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (A, A),
        ("last", C),
        ("mlp-2", C),
        ("old", "job_0a1"),
        ("job_0b", B),
        ("0b", B),
        ("job_0a1", "job_0a1"),
        ("job_0a00", A),
    ],
)
def test_a_job_is_meant_by_its_id_its_beginning_its_name_or_as_the_last(
    run: Run, given: str, meant: str
):
    assert shown(run, Service(), given) == meant


def test_a_whole_id_is_not_looked_for(run: Run):
    service = Service()
    shown(run, service, A)
    assert service.num_asked == 0


@pytest.mark.parametrize(("given", "meant"), [("mlp-1", [B, A]), ("job_0a", [A, "job_0a1"])])
def test_several_that_may_be_meant_are_listed_and_nothing_is_done(
    run: Run, given: str, meant: list[str]
):
    service = Service()
    code, out, err = run("delete", "last", given, routes=service.routes)
    assert (code, out) == (1, "")
    assert re.findall(r"^  (job_\w+)", err, re.MULTILINE) == meant
    assert service.deleted == []


def test_an_unknown_id_is_exit_code_5(run: Run):
    code, _, err = run("show", "mlp-9", routes=Service().routes)
    assert code == 5
    assert "no job has the name or id prefix 'mlp-9'; did you mean mlp-2 or mlp-1?" in err
    assert run("show", "job_none", routes=Service().routes)[0] == 5
    assert run("jobs", "--json", routes=Service().routes)[0] == 0


def test_jobs_are_deleted_each_once(run: Run):
    service = Service()
    assert run("delete", "last", "mlp-2", A, routes=service.routes)[0] == 0
    assert service.deleted == [C, A]
    _, out, _ = run("delete", "old", "--json", routes=service.routes)
    assert json.loads(out) == [{"id": "job_0a1", "deleted": True}]


@pytest.mark.parametrize(("given", "meant"), [("last", "ds_2"), ("a", "ds_1"), ("ds_1", "ds_1")])
def test_a_dataset_reference_is_resolved_the_same_way(run: Run, given: str, meant: str):
    _, out, _ = run("datasets", "show", given, "--rows", "0", "--json", routes=Service().routes)
    assert json.loads(out)["id"] == meant


@pytest.mark.parametrize(("given", "meant"), [("last", "ckpt_2"), ("LeNet", "ckpt_1")])
def test_a_checkpoint_reference_is_resolved_the_same_way_on_every_page(
    run: Run, given: str, meant: str
):
    service = Service()
    run("checkpoints", "delete", given, routes=service.routes)
    assert service.deleted == [meant]


@pytest.mark.parametrize("group", ["datasets", "checkpoints"])
def test_a_group_without_a_command_lists(run: Run, group: str):
    alone = run(group, routes=Service().routes)
    assert alone == run(group, "list", routes=Service().routes)
    assert alone[0] == 0
    assert json.loads(run(group, "--json", routes=Service().routes)[1])[0]["id"].endswith("_2")
    assert run(group, "nope", routes=Service().routes)[0] == 2


def test_the_checkpoints_of_a_job_are_asked_for_by_the_job(run: Run):
    one = {"id": "ckpt_1", "state": "complete", "step": 7, "job": A, "name": None}
    routes = [*Service().routes, fixed(f"/jobs/{B}/checkpoints", listing(one))]
    for given in (["job_0b"], ["--job", "job_0b"]):
        assert "ckpt_1" in run("checkpoints", "list", *given, routes=routes)[1]
    assert run("checkpoints", "list", "job_0b", "--job", "job_0b", routes=routes)[0] == 2


def spec_of(**args: Any) -> dict[str, Any]:
    layers = [{"name": "fc", "type": "Linear", "args": args}]
    return {"kind": "train", "name": "x", "network": {"layers": layers}, "stop": {"epochs": 2}}


def test_jobs_are_compared_side_by_side(run: Run):
    routes = [
        *(fixed(f"/jobs/{A}/spec", answer(spec_of(out_features=3))),),
        *(fixed(f"/jobs/{B}/spec", answer(spec_of(out_features=4, bias=False))),),
        *Service().routes,
    ]
    code, out, _ = run("compare", A, B, routes=routes)
    assert code == 0
    rows = {line[:35].split("  ")[0].strip(): line for line in out.splitlines()}
    assert re.search(r" 3 +4$", rows["network.layers.fc.args.out_features"])
    assert re.search(r" None +False$", rows["network.layers.fc.args.bias"])
    assert "stop.epochs" not in rows
    assert re.search(r"0\.29 +0\.29$", rows["loss min"])
    _, out, _ = run("compare", A, B, "--json", routes=routes)
    told = json.loads(out)
    assert told["settings"]["network.layers.fc.args.out_features"] == [3, 4]
    assert [one["id"] for one in told["jobs"]] == [A, B]
    assert run("compare", A, routes=routes)[0] == 2


def stats_of(layer: str, kind: str, mean: Any) -> dict[str, Any]:
    values = {"mean": [1.0, mean], "std": [0.5, 0.25], "nan": [0, 2]}
    return {"layer": layer, "kind": kind, "phase": "train", "step": [0, 25], "values": values}


def test_a_layer_shows_its_newest_statistics(run: Run):
    async def stats(request: Request) -> Response:
        if request.query_params["layer"] == "fc":
            return listing(stats_of("fc", "output", "NaN"))
        return listing(stats_of("fc.weight", "param_grad", 0.125))

    routes = [fixed("/jobs/job_1", answer(job())), Route("/api/v1/jobs/job_1/stats", stats)]
    code, out, _ = run("layers", "job_1", "fc", routes=routes)
    assert code == 0
    head, first, second = (line.split() for line in out.splitlines())
    assert head[:6] == ["tensor", "kind", "phase", "step", "mean", "std"]
    assert first[:6] == ["fc", "output", "train", "25", "nan", "0.25"]
    assert second[:6] == ["fc.weight", "param_grad", "train", "25", "0.125", "0.25"]
    _, out, _ = run("layers", "job_1", "fc", "--json", routes=routes)
    told = json.loads(out)
    assert told[0]["mean"] == "NaN"
    assert (told[1]["step"], told[1]["nan"]) == (25, 2.0)


NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (99, "99 s"), (100, "2 min"), (7199, "120 min"), (7200, "2 h"), (172_800, "2 d")],
)
def test_a_time_is_shown_in_its_largest_unit(seconds: float, text: str):
    assert durations.short(seconds) == text


def test_a_duration_leaves_pauses_out_and_ends_with_the_job():
    times: dict[str, Any] = {"started_at": "2026-11-20T11:00:00.000Z", "paused_s": 600.0}
    assert durations.lasted(times, NOW) == "50 min"
    assert durations.lasted(times | {"ended_at": "2026-11-20T11:20:00.000Z"}, NOW) == "10 min"
    assert durations.lasted(times | {"paused_at": "2026-11-20T11:30:00.000Z"}, NOW) == "20 min"
    assert durations.lasted({"started_at": None}) is None
    assert durations.age("2026-11-20T11:59:00.000Z", NOW) == "60 s"


@pytest.mark.parametrize(
    ("summary", "best"),
    [
        ({"loss": {"min": 0.25}}, "loss 0.25"),
        ({"loss": {"min": 0.2}, "validation/loss": {"min": 0.5}}, "validation/loss 0.5"),
        ({"validation/loss": {"min": 0.5}, "validation/accuracy": {"max": 0.75}}, "accuracy 0.75"),
        (
            {
                "validation/hits/loss": {"min": 0.5},
                "validation/errors/loss": {"min": 0.25},
                "validation/hits/rmse": {"min": 0.75, "max": 2.0},
            },
            "hits/rmse 0.75",
        ),
        (
            {"validation/a/loss": {"min": 0.5}, "validation/b/loss": {"min": 0.25}},
            "validation/a/loss 0.5",
        ),
        ({"loss": {"min": "NaN"}}, "loss nan"),
        ({}, None),
    ],
)
def test_the_best_of_a_job_is_of_its_evaluations(summary: dict[str, Any], best: str | None):
    assert durations.best(summary) == best


def test_submit_says_the_name_and_the_page(run: Run, tmp_path: Path):
    (tmp_path / "job.json").write_text("{}")
    routes = [fixed("/jobs", answer(job(name="mlp-7"), 201), "POST")]
    code, out, err = run("submit", str(tmp_path / "job.json"), routes=routes)
    assert (code, out) == (0, "job_1\n")
    url = os.environ["GLASSHOUSE_URL"]
    assert err == f"mlp-7: {url}/jobs/job_1\nwatch it: glasshouse watch job_1\n"


@pytest.mark.parametrize("command", [["submit"], ["watch"], ["datasets", "list"], ["up"], []])
def test_flags_name_no_type(capsys: pytest.CaptureFixture[str], command: list[str]):
    assert main([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--help" in shown
    assert "bool" not in shown


def runtime(home: Path, **fields: Any) -> dict[str, str]:
    home.mkdir(mode=0o700, exist_ok=True)
    known = {"url": "http://127.0.0.1:8420", "api_key": "gh_k", "version": "0"}
    (home / "runtime.json").write_text(json.dumps(known | fields))
    return {"GLASSHOUSE_HOME": str(home)}


def test_a_service_that_was_stopped_is_reported_as_such(tmp_path: Path):
    environ = runtime(tmp_path, pid=None)
    with pytest.raises(gh.APIConnectionError, match="is stopped"):
        find_service(environ=environ)
    named = find_service("http://127.0.0.1:9", environ=environ)
    assert named.url == "http://127.0.0.1:9"
    assert find_service(environ=runtime(tmp_path, pid=1)).api_key == "gh_k"


def test_commands_of_a_home_say_so_too(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    runtime(tmp_path, pid=None)
    assert main(["status", "--home", str(tmp_path)]) == 8
    assert "is stopped" in capsys.readouterr().err


@pytest.mark.parametrize("inner", ["", "run", "runtime.json"])
def test_up_refuses_a_home_that_the_doctor_reports(tmp_path: Path, inner: str):
    home = tmp_path / "home"
    make_home(home)
    (home / "runtime.json").touch(0o600)
    make_home(home)
    (home / inner).chmod(0o755)
    with pytest.raises(StackError, match=f"chmod go= {re.escape(str(home / inner))}$"):
        make_home(home)
