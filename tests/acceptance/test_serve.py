"""Served models, as a client, the command line and HTTP see them."""

import io
import json
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, save

import glasshouse as gh
from glasshouse.cli import main
from glasshouse.client import Job
from tests.acceptance.services import LocalService
from tests.acceptance.specs import small
from tests.waiting import until

NAME = "digits-served"
Array = NDArray[Any]


@pytest.fixture(scope="module")
def trained(client: gh.Client, digits: str) -> list[Job]:
    """Two jobs with different weights."""
    specs = [small(digits, stop={"steps": steps}) for steps in (40, 5)]
    return [job.wait(timeout=120) for job in [client.jobs.create(spec) for spec in specs]]


@pytest.fixture(scope="module")
def served(client: gh.Client, trained: list[Job]) -> Generator[Job]:
    """A serve job of the first version, by an alias; the second one is published too."""
    for job, alias in zip(trained, ("production", "candidate"), strict=True):
        client.models.publish(NAME, job, aliases=[alias])
    job = client.serve(f"{NAME}@production", name="a-service").wait_ready(timeout=120)
    yield job
    job.cancel()
    with pytest.raises(gh.JobCancelled):
        job.wait(timeout=60)


@pytest.fixture(scope="module")
def x(client: gh.Client, digits: str) -> Array:
    """Some images."""
    rows = client.datasets.rows(digits, split="test", limit=7)
    return np.array([row["image"] for row in rows], np.float32).reshape(7, 1, 8, 8)


@pytest.fixture
def command(
    local_service: LocalService,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """Runs a command in this process; returns what it prints."""
    monkeypatch.setenv("GLASSHOUSE_URL", local_service.url)
    monkeypatch.setenv("GLASSHOUSE_API_KEY", local_service.key)

    def run(*arguments: str) -> str:
        code = main(arguments)
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out

    return run


def by_hand(job: Job, x: Array) -> Array:
    """The scores of torch's own layers with the weights of a job."""
    linear = torch.nn.Linear(64, 10)
    linear.load_state_dict(
        {name.rpartition(".")[2]: value for name, value in job.state_dict().items()}
    )
    return linear(torch.from_numpy(x).flatten(1)).detach().numpy()


def test_the_client_predicts_what_torch_computes(
    client: gh.Client, served: Job, trained: list[Job], x: Array
):
    expected = by_hand(trained[0], x)
    found = client.predict(f"{NAME}@production", x)
    np.testing.assert_allclose(found["fc"], expected, rtol=1e-5, atol=1e-6)
    assert (found.model, found.version, found.non_finite) == (NAME, 1, ())
    assert found.classes.tolist() == expected.argmax(1).tolist() == found["fc/id"].tolist()
    assert found.timing.keys() == {"queue_ms", "compute_ms"}
    named = client.predict(f"{NAME}@production", {"image": x}, outputs=["flat", "fc"], top_k=3)
    np.testing.assert_array_equal(named["flat"], x.reshape(7, 64))
    np.testing.assert_array_equal(named["fc/top_k"], np.argsort(-expected, axis=1)[:, :3])
    rows = client.predict(f"{NAME}@production", rows=[{"image": row} for row in x])
    np.testing.assert_allclose(rows["fc"], found["fc"], rtol=1e-6)
    assert rows["fc"].dtype == np.float32
    alone = client.predict(f"{NAME}@production", rows=list(x), fields="id", priority=5)
    assert list(alone.outputs) == ["fc/id"]
    strange = client.predict(f"{NAME}@production", np.full_like(x[:1], np.nan), fields="value")
    assert strange.non_finite == ("fc/value",)
    assert np.isnan(strange["fc"]).all()


def test_plain_http_in_each_format(http: httpx2.Client, served: Job, trained: list[Job], x: Array):
    path = f"/models/{NAME}@production/predict"
    expected = by_hand(trained[0], x)
    answered = http.post(path, json={"inputs": {"image": x.tolist()}, "fields": ["value", "id"]})
    assert answered.status_code == 200, answered.text
    document = answered.json()
    assert (document["model"], document["version"]) == (NAME, 1)
    np.testing.assert_allclose(document["outputs"]["fc/value"], expected, rtol=1e-5, atol=1e-6)
    assert document["outputs"]["fc/id"] == expected.argmax(1).tolist()
    assert answered.headers["X-Model-Version"] == f"{NAME}:1"
    file = io.BytesIO()
    np.save(file, x)
    npy = {"Content-Type": "application/x-npy", "Accept": "application/x-npy"}
    answered = http.post(path, content=file.getvalue(), headers=npy, params={"fields": "id"})
    assert np.load(io.BytesIO(answered.content)).tolist() == expected.argmax(1).tolist()
    media = "application/vnd.safetensors"
    headers = {"Content-Type": media, "Accept": media}
    answered = http.post(path, content=save({"image": x}), headers=headers)
    np.testing.assert_allclose(load(answered.content)["fc/value"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "headers", "status", "code", "pointer"),
    [
        ({"inputs": {"image": [[1.0]]}}, {}, 422, "invalid_request", "/inputs/image"),
        ({"rows": [{"picture": 1}]}, {}, 422, "invalid_request", "/rows/0/picture"),
        ({"rows": []}, {}, 422, "invalid_request", "/rows"),
        ({"rows": [{}], "outputs": ["fcc"]}, {}, 422, "invalid_request", "/outputs/0"),
        ({"rows": [{}]}, {"Accept": "text/html"}, 406, "not_acceptable", ""),
        ({"rows": [{}]}, {"Content-Type": "text/csv"}, 415, "unsupported_media", ""),
    ],
)
def test_a_wrong_request_names_the_place(
    http: httpx2.Client,
    served: Job,
    *,
    body: Any,
    headers: Any,
    status: int,
    code: str,
    pointer: str,
):
    answered = http.post(f"/models/{NAME}@production/predict", json=body, headers=headers)
    problem = answered.json()
    assert (answered.status_code, problem["code"]) == (status, code)
    assert pointer in [one["pointer"] for one in problem["errors"]]


def test_what_is_not_served_and_what_does_not_exist(client: gh.Client, served: Job, x: Array):
    with pytest.raises(gh.NotFoundError) as caught:
        client.predict(NAME, x)  # the newest version: the job serves an alias
    assert caught.value.code == "model_not_served"
    with pytest.raises(gh.NotFoundError) as caught:
        client.predict("nothing-like-this", x)
    assert caught.value.code == "model_not_found"


def test_the_job_and_the_model_show_each_other(http: httpx2.Client, served: Job):
    listed = http.get("/jobs", params={"kind": "serve"}).json()["data"]
    (shown,) = [one for one in listed if one["id"] == served.id]
    assert shown["serving"]["models"] == [
        {"reference": f"{NAME}@production", "model": NAME, "version": 1}
    ]
    assert not {"address", "token"} & shown["serving"].keys()
    expected = {"job": served.id, "reference": f"{NAME}@production", "version": 1}
    expected |= {"state": "running"}
    assert http.get(f"/models/{NAME}").json()["served_by"] == [expected]
    (model,) = [one for one in http.get("/models").json()["data"] if one["name"] == NAME]
    assert model["served_by"] == [expected]
    tag = http.get(f"/models/{NAME}").headers["etag"]
    assert http.get(f"/models/{NAME}", headers={"If-None-Match": tag}).status_code == 304
    for known, status in ((tag, 200), (re.sub(r"\+\w+", "", tag), 200), ('"mdl_x-1-0"', 412)):
        changed = http.patch(f"/models/{NAME}", json={}, headers={"If-Match": known})
        assert changed.status_code == status, known  # what serves it is none of its own state
    others = http.get("/jobs", params={"kind": "train"}).json()["data"]
    assert {one["serving"] for one in others} == {None}


def test_a_model_that_is_served_is_not_deleted(client: gh.Client, served: Job):
    with pytest.raises(gh.ConflictError) as caught:
        client.models.delete(NAME)
    assert caught.value.code == "model_in_use"


def test_the_command_line_predicts_and_shows(
    command: Callable[..., str], served: Job, trained: list[Job], x: Array, tmp_path: Path
):
    reference = f"{NAME}@production"
    classes = by_hand(trained[0], x).argmax(1).tolist()
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "x.safetensors").write_bytes(save({"image": x}))
    lines = [json.dumps({"image": row.tolist()}) for row in x]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    for option in (
        ("--input", str(tmp_path / "x.npy")),
        ("--input", str(tmp_path / "x.safetensors")),
        ("--rows", str(tmp_path / "x.jsonl")),
    ):
        found = json.loads(command("predict", reference, *option, "--json"))
        assert found["outputs"]["fc/id"] == classes
        assert found["version"] == 1
    value = f"image={json.dumps(x[0].tolist())}"
    printed = command("predict", reference, "--row", value, "--fields", "id,prob")
    heading, row = printed.splitlines()
    assert heading.split() == ["row", "fc/id", "fc/prob"]
    assert row.split()[:2] == ["0", str(classes[0])]
    assert reference in command("show", "a-service")
    until(lambda: "answered" in command("show", "a-service"), what="the counts of requests")
    assert NAME in command("models")
    assert served.id in command("models", "show", NAME)


def test_an_alias_moves_to_another_version_and_back(
    client: gh.Client, served: Job, trained: list[Job], x: Array
):
    """Each request is answered by one of the two versions, and none is lost."""
    expected = {number: by_hand(job, x) for number, job in enumerate(trained, 1)}
    tag = client.request("GET", f"/api/v1/models/{NAME}").headers["etag"]
    for version in (2, 1):
        client.models.set_alias(NAME, "production", version)

        def is_answered_by(wanted: int = version) -> bool:
            found = client.predict(f"{NAME}@production", x)
            np.testing.assert_allclose(found["fc"], expected[found.version], rtol=1e-5, atol=1e-6)
            return found.version == wanted

        until(is_answered_by, what=f"answers of version {version}")
        served_by = client.models.get(NAME).served_by
        until(
            lambda wanted=version: client.models.get(NAME).served_by[0]["version"] == wanted,
            what="what serves the model",
        )
        assert [one["job"] for one in served_by] == [served.id]
    stale = client.request("GET", f"/api/v1/models/{NAME}", headers={"If-None-Match": tag})
    assert stale.status_code == 200  # the aliases have changed


def test_the_command_line_serves_and_the_job_ends_when_it_is_canceled(
    client: gh.Client, command: Callable[..., str], served: Job
):
    given = (f"{NAME}:1", f"{NAME}:2", "--max-queue", "5", "--idle", "60", "--min", "0", "--json")
    shown = json.loads(command("serve", *given))
    job = client.jobs.get(shown["id"])
    spec = job.spec(resolved=False)
    assert spec["models"] == [f"{NAME}:1", f"{NAME}:2"]
    assert (spec["max_queue"], spec["idle_s"], spec["replicas"]) == (5, 60, {"min": 0})
    job.cancel()
    with pytest.raises(gh.JobCancelled):
        job.wait(timeout=60)
