"""Published models over HTTP: publish, read, move aliases, delete, and use them in specs."""

from collections.abc import Callable, Generator
from typing import Any

import httpx2
import pytest

from api.schemas import inspection
from glasshouse.cli import main
from glasshouse.cli.terminal import exit_codes
from tests.running import Api, digits, small_job

from .test_weights import sent

MODELS = "/api/v1/models"


@pytest.fixture(scope="module")
def checkpoint_of() -> Callable[[Api], str]:
    """The checkpoint that Mo has uploaded to a service."""
    made: dict[str, str] = {}

    def find(service: Api) -> str:
        if service.url not in made:
            with service.client(service.key("mo")) as client:
                made[service.url] = sent(client, params={"name": "linear"})["id"]
        return made[service.url]

    return find


@pytest.fixture
def checkpoint(each_service: Api, checkpoint_of: Callable[[Api], str]) -> str:
    return checkpoint_of(each_service)


@pytest.fixture
def api(each_service: Api) -> Generator[httpx2.Client]:
    """A client of Mo, who has no models yet."""
    with each_service.client(each_service.key("mo")) as client:
        for model in client.get(MODELS).json()["data"]:
            assert client.delete(f"{MODELS}/{model['name']}").status_code == 204
        yield client


def publish(api: httpx2.Client, checkpoint: str, name: str = "mnist", **more: Any) -> Any:
    made = api.post(MODELS, json={"name": name, "checkpoint": checkpoint, **more})
    assert made.status_code == 201, made.text
    inspection.ModelVersion.model_validate_json(made.content)
    assert api.get(made.headers["location"]).json() == made.json()
    return made.json()


def refused(answer: httpx2.Response, status: int, code: str) -> Any:
    """The problem document of a refused request: its first field problem, or its detail."""
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (status, code), answer.text
    return problem["errors"][0] if problem.get("errors") else problem["detail"]


def test_a_checkpoint_is_published_listed_and_read(api: httpx2.Client, checkpoint: str):
    first = publish(api, checkpoint, aliases=["production"])
    assert (first["model"], first["version"], first["aliases"]) == ("mnist", 1, ["production"])
    assert (first["checkpoint"], first["job"], first["created_by"]) == (checkpoint, None, "test")
    second = publish(api, checkpoint)
    publish(api, checkpoint, "other")
    listed = api.get(MODELS, params={"limit": 1}).json()
    assert [one["name"] for one in listed["data"]] == ["other"]
    rest = api.get(MODELS, params={"after": listed["next"]}).json()
    inspection.ModelList.model_validate(rest)
    (mnist,) = rest["data"]
    assert (mnist["latest"], mnist["num_versions"]) == (2, 2)
    assert mnist["aliases"] == {"production": 1}
    shown = api.get(f"{MODELS}/mnist")
    inspection.Model.model_validate_json(shown.content)
    assert shown.json() == mnist | {"versions": [second, first]}
    assert api.get(f"{MODELS}/{mnist['id']}").json() == shown.json()
    seen = {"If-None-Match": shown.headers["etag"]}
    assert api.get(f"{MODELS}/mnist", headers=seen).status_code == 304
    for version, number in (("1", 1), ("production", 1), ("latest", 2)):
        found = api.get(f"{MODELS}/mnist/versions/{version}").json()
        assert found["version"] == number
    answer = api.get(f"{MODELS}/mnist/versions/prodution")
    assert "did you mean production" in refused(answer, 404, "model_version_not_found")
    assert "did you mean mnist" in refused(api.get(f"{MODELS}/mnst"), 404, "model_not_found")


def test_the_same_request_publishes_once(api: httpx2.Client, checkpoint: str):
    body, once = {"name": "mnist", "checkpoint": checkpoint}, {"Idempotency-Key": "one version"}
    first, again = (api.post(MODELS, json=body, headers=once) for _ in range(2))
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json() == first.json()
    assert api.get(f"{MODELS}/mnist").json()["num_versions"] == 1
    assert api.post(MODELS, json=body | {"name": "b"}, headers=once).status_code == 422


@pytest.mark.parametrize(
    ("change", "pointer", "message"),
    [
        ({"name": "a/b"}, "/name", "letters, digits"),
        ({"name": "a@b"}, "/name", "letters, digits"),
        ({"name": ".."}, "/name", "letters, digits"),
        ({"name": ""}, "/name", "letters, digits"),
        ({"name": "a" * 101}, "/name", "at most 100"),
        ({"name": "ckpt_mine"}, "/name", "begins like an id"),
        ({"aliases": ["ok", "latest"]}, "/aliases/1", "always names the newest"),
        ({"aliases": ["12"]}, "/aliases/0", "only digits"),
        ({"aliases": ["a:b"]}, "/aliases/0", "letters, digits"),
        ({"checkpoint": None}, "/checkpoint", "exactly one"),
        ({"job": "job_1"}, "/job", "only one"),
        ({"checkpoint": "ckpt_1"}, "/checkpoint", "No checkpoint has the id ckpt_1"),
        ({"checkpoint": "nobody"}, "/checkpoint", "No model has the name 'nobody'"),
        ({"checkpoint": "a/b"}, "/checkpoint", "name@alias"),
        ({"checkpoint": None, "job": "job_1"}, "/job", "No job has the id job_1"),
        ({"stage": "x"}, "/stage", ""),
    ],
)
def test_what_cannot_be_published_is_refused_with_its_place(
    service: Api, change: dict[str, Any], pointer: str, message: str
):
    body = {"name": "mnist", "checkpoint": "ckpt_1", **change}
    body = {name: value for name, value in body.items() if value is not None}
    with service.client(service.key("nina")) as client:
        problem = refused(client.post(MODELS, json=body), 422, "invalid_request")
    assert problem["pointer"] == pointer
    assert message in problem["detail"]


def test_aliases_move_by_a_merge_patch_of_the_version_that_was_read(
    api: httpx2.Client, checkpoint: str
):
    publish(api, checkpoint, aliases=["production", "old"])
    publish(api, checkpoint)
    path = f"{MODELS}/mnist"
    read = api.get(path)
    moved = api.patch(path, json={"aliases": {"production": 2, "old": None}})
    assert moved.status_code == 200, moved.text
    assert moved.json()["aliases"] == {"production": 2}
    assert api.get(path).headers["etag"] == moved.headers["etag"] != read.headers["etag"]
    stale = {"If-Match": read.headers["etag"]}
    for answer in (
        api.patch(path, json={"aliases": {"production": 1}}, headers=stale),
        api.delete(path, headers=stale),
        api.delete(f"{path}/versions/1", headers=stale),
    ):
        refused(answer, 412, "precondition_failed")
    fresh = {"If-Match": moved.headers["etag"]}
    assert api.patch(path, json={"aliases": {"production": 1}}, headers=fresh).status_code == 200
    for changes, pointer in (
        ({"production": 3}, "/aliases/production"),
        ({"production": True}, "/aliases/production"),
        ({"production": 0}, "/aliases/production"),
        ({"latest": 1}, "/aliases/latest"),
    ):
        answer = api.patch(path, json={"aliases": changes})
        assert refused(answer, 422, "invalid_request")["pointer"].startswith(pointer), answer.text


def test_a_published_checkpoint_stays_until_its_version_is_deleted(
    each_service: Api, api: httpx2.Client, checkpoint: str
):
    publish(api, checkpoint, aliases=["production"])
    publish(api, checkpoint)
    detail = refused(api.delete(f"/api/v1/checkpoints/{checkpoint}"), 409, "checkpoint_in_use")
    assert "'mnist'" in detail
    version = f"{MODELS}/mnist/versions/1"
    assert "production" in refused(api.delete(version), 409, "model_in_use")
    refused(api.delete(f"{MODELS}/mnist/versions/latest"), 404, "model_version_not_found")
    assert api.patch(f"{MODELS}/mnist", json={"aliases": {"production": 2}}).status_code == 200
    assert api.delete(version).status_code == 204
    assert "only one" in refused(api.delete(f"{MODELS}/mnist/versions/2"), 409, "model_in_use")
    assert api.delete(f"{MODELS}/mnist").status_code == 204
    assert api.get(f"/api/v1/checkpoints/{checkpoint}").status_code == 200


def test_a_name_is_that_of_its_owner(each_service: Api, api: httpx2.Client, checkpoint: str):
    publish(api, checkpoint, aliases=["production"])
    with each_service.client(each_service.key("eve")) as eve:
        for method, path, body in (
            ("GET", "mnist", None),
            ("GET", "mnist/versions/1", None),
            ("PATCH", "mnist", {"aliases": {"production": None}}),
            ("DELETE", "mnist", None),
            ("DELETE", "mnist/versions/1", None),
        ):
            answer = eve.request(method, f"{MODELS}/{path}", json=body)
            refused(answer, 404, "model_not_found")
        assert eve.get(MODELS).json()["data"] == []
        for source in (checkpoint, "mnist"):
            answer = eve.post(MODELS, json={"name": "mnist", "checkpoint": source})
            assert refused(answer, 422, "invalid_request")["pointer"] == "/checkpoint"
        mine = sent(eve)["id"]
        assert publish(eve, mine)["version"] == 1
    with each_service.client() as admin:
        listed = [one["id"] for one in admin.get(MODELS).json()["data"] if one["name"] == "mnist"]
        assert len(listed) == 2
        detail = refused(admin.get(f"{MODELS}/mnist"), 404, "model_not_found")
        assert all(one in detail for one in listed)
        for one in listed:
            assert admin.get(f"{MODELS}/{one}").json()["id"] == one
    with each_service.client(each_service.key("mo", "read")) as reader:
        assert reader.get(f"{MODELS}/mnist").status_code == 200
        refused(reader.post(MODELS, json={}), 403, "scope_too_small")
    with each_service.client(each_service.key("eve")) as eve:
        assert eve.delete(f"{MODELS}/mnist").status_code == 204


def test_a_spec_may_name_a_version_and_runs_its_checkpoint(service: Api, checkpoint_of: Any):
    checkpoint = checkpoint_of(service)
    image = {"image": [[[[0.0] * 8] * 8]]}
    with service.client(service.key("mo")) as api:
        publish(api, checkpoint, "linear", aliases=["production"])
        for reference in ("linear", "linear@production", "linear@latest", "linear:1"):
            spec = {"kind": "infer", "checkpoint": reference, "inputs": image}
            planned = api.post("/api/v1/plan", json=spec)
            assert planned.status_code == 200, planned.text
            assert planned.json()["spec"]["checkpoint"] == checkpoint
        made = api.post("/api/v1/jobs", json=spec)
        assert made.status_code == 201, made.text
        job = f"/api/v1/jobs/{made.json()['id']}"
        assert api.get(f"{job}/spec").json()["checkpoint"] == "linear:1"
        assert api.get(f"{job}/spec?resolved=true").json()["checkpoint"] == checkpoint
        detail = refused(api.delete(f"{MODELS}/linear"), 409, "model_in_use")
        assert "cancel the job" in detail
        assert api.post(f"{job}/cancel").status_code == 202
        training = small_job(digits(api), init={"checkpoint": "linear@production"})
        planned = api.post("/api/v1/plan", json=training).json()
        assert planned["spec"]["init"]["checkpoint"] == checkpoint
        for reference, message in (
            ("linaer", "did you mean linear"),
            ("linear@prod", "its aliases are latest, production"),
            ("linear:2", "no version 2; it has 1"),
        ):
            for spec, pointer in (
                ({"kind": "infer", "checkpoint": reference, "inputs": image}, "/checkpoint"),
                (training | {"init": {"checkpoint": reference}}, "/init/checkpoint"),
            ):
                problem = refused(api.post("/api/v1/plan", json=spec), 422, "invalid_spec")
                assert problem["pointer"] == pointer
                assert message in problem["detail"]
        assert api.delete(f"{MODELS}/linear").status_code == 204


def test_the_commands_publish_move_aliases_and_delete(
    service: Api,
    checkpoint_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    checkpoint = checkpoint_of(service)
    monkeypatch.setenv("GLASSHOUSE_URL", service.url)
    monkeypatch.setenv("GLASSHOUSE_API_KEY", service.key("mo"))

    def run(*words: str) -> tuple[int, str]:
        code = main(["models", *words])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    published = ("publish", "by-command")
    assert run(*published, checkpoint, "--alias", "candidate")[1].startswith("by-command:1\n")
    assert run(*published, "by-command@candidate")[1].startswith("by-command:2\n")
    moved = run("alias", "by-command", "production", "2")
    assert moved == (exit_codes.OK, "candidate 1, production 2\n")
    code, said = run("alias", "by-command", "candidat", "--remove")
    assert code == exit_codes.NOT_FOUND
    assert "did you mean candidate" in said
    assert run("alias", "by-command", "candidate")[0] == exit_codes.USAGE
    assert run("alias", "by-command", "candidate", "--remove")[0] == exit_codes.OK
    assert "alias 'production'" in run("delete", "by-command:2")[1]
    assert run("delete", "by-command:1")[0] == exit_codes.OK
    assert run("delete", "by-command@production")[0] == exit_codes.USAGE
    assert run("delete", "by-command") == (exit_codes.OK, "by-command deleted\n")
    assert run("show", "by-command")[0] == exit_codes.NOT_FOUND
