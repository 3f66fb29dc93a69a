"""Probes on stored jobs: attached, changed, removed, and what is refused."""

from typing import Any

import httpx2
import pytest

from api.schemas import inspection
from tests.running import Api, digits, small_job

FC = {"layers": ["fc"], "kinds": ["output"], "every": 2}


@pytest.fixture(scope="session")
def dora(each_service: Api) -> tuple[str, str]:
    """A key of an owner, and the id of that owner's dataset."""
    key = each_service.key("dora")
    with each_service.client(key) as client:
        return key, digits(client)


@pytest.fixture
def api(each_service: Api, dora: tuple[str, str]):
    with each_service.client(dora[0]) as client:
        yield client


@pytest.fixture
def job(api: httpx2.Client, dora: tuple[str, str]) -> str:
    """The path of a queued job with one probe in its spec."""
    answer = api.post("/api/v1/jobs", json=small_job(dora[1], probes=[FC]))
    assert answer.status_code == 201, answer.text
    return answer.headers["location"]


def attached(api: httpx2.Client, job: str, **changes: Any) -> dict[str, Any]:
    answer = api.post(f"{job}/probes", json=FC | changes)
    assert answer.status_code == 201, answer.text
    return inspection.AttachedProbe.model_validate_json(answer.content).model_dump()


def test_the_probes_of_the_spec_are_listed_with_what_they_match(api: httpx2.Client, job: str):
    answer = api.get(f"{job}/probes")
    (found,) = inspection.AttachedProbeList.model_validate_json(answer.content).data
    assert (found.state, found.applied_step, found.matched) == ("active", 0, ["fc"])
    assert found.bytes_per_step == 100 * 10 * 4
    assert found.every == 2
    assert api.get(job).json()["links"]["probes"] == f"{job}/probes"


def test_a_probe_is_attached_changed_and_removed(api: httpx2.Client, job: str):
    made = attached(api, job, layers=["fc*"], kinds=["param", "output_grad"], want=["full"])
    assert made["matched"] == ["fc.weight", "fc.bias", "fc"]
    assert (made["state"], made["position"], made["applied_step"]) == ("pending", 1, None)
    path = made["links"]["self"]
    assert api.get(path).json() == made
    merge = {"Content-Type": "application/merge-patch+json"}
    changed = api.patch(path, content='{"every":null,"at":[3,4],"layers":["fl*"]}', headers=merge)
    assert changed.status_code == 422  # a Flatten has no parameters
    assert changed.json()["errors"][0]["pointer"] == "/kinds/0"
    body = '{"every":null,"at":[3,4],"kinds":["param"],"want":null}'
    changed = api.patch(path, content=body, headers=merge)
    assert changed.status_code == 200, changed.text
    found = changed.json()
    assert (found["every"], found["at"], found["want"]) == (None, [3, 4], ["stats"])
    assert found["matched"] == ["fc.weight", "fc.bias"]
    gone = api.delete(path)
    assert (gone.status_code, gone.json()["state"]) == (202, "removed")
    assert api.delete(path).status_code == 202
    assert api.patch(path, json={"every": 3}).json()["code"] == "probe_not_found"
    assert [row["id"] for row in api.get(f"{job}/probes").json()["data"]] != [made["id"]]
    assert len(api.get(f"{job}/probes?removed=true").json()["data"]) == 2


def test_the_ranks_of_a_probe_are_checked_against_the_processes_of_the_job(
    api: httpx2.Client, dora: tuple[str, str]
):
    alone = api.post("/api/v1/jobs", json=small_job(dora[1])).headers["location"]
    refused = api.post(f"{alone}/probes", json=FC | {"ranks": "all"})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["pointer"] == "/ranks"
    assert "the job has one process" in refused.json()["errors"][0]["detail"]
    body = small_job(dora[1], parallel={"processes": 2}, probes=[FC | {"ranks": [1]}])
    several = api.post("/api/v1/jobs", json=body).headers["location"]
    (of_spec,) = api.get(f"{several}/probes").json()["data"]
    assert of_spec["ranks"] == [1]
    made = attached(api, several, ranks=[0, 1], want=["full"])
    assert made["ranks"] == [0, 1]
    rows = 2 * 100 * 10 * 4
    assert made["bytes_per_step"] == rows + rows
    path = made["links"]["self"]
    refused = api.patch(path, json={"ranks": [1, 2]})
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/ranks/1")
    assert "the job has no rank 2: it has 2 processes" in refused.json()["errors"][0]["detail"]
    for sent, kept in (("all", "all"), ([1], [1]), (None, "merged")):
        changed = api.patch(path, json={"ranks": sent})
        assert (changed.status_code, changed.json()["ranks"]) == (200, kept), changed.text
    assert attached(api, several)["ranks"] == "merged"


def test_the_same_request_again_attaches_one_probe(api: httpx2.Client, job: str):
    headers = {"Idempotency-Key": f"once-{job}"}
    first = api.post(f"{job}/probes", json=FC, headers=headers)
    again = api.post(f"{job}/probes", json=FC, headers=headers)
    assert first.headers["location"] == f"{job}/probes/{first.json()['id']}"
    assert again.json() == first.json()
    assert again.headers["idempotency-replayed"] == "true"
    assert len(api.get(f"{job}/probes").json()["data"]) == 2
    other = api.post(f"{job}/probes", json=FC | {"every": 3}, headers=headers)
    assert other.json()["code"] == "idempotency_key_reused"


WRONG: dict[str, tuple[Any, str, str]] = {
    "no object": ([], "", ""),
    "no layers": ({"kinds": ["output"], "every": 1}, "/layers", ""),
    "unknown field": (FC | {"often": 1}, "/often", ""),
    "a glob that matches nothing": (FC | {"layers": ["fc", "conv*"]}, "/layers/1", "conv*"),
    "a kind that the layer lacks": (FC | {"layers": ["flat"], "kinds": ["param"]}, "/kinds/0", ""),
    "a gradient that there is not": (
        FC | {"layers": ["flat"], "kinds": ["output_grad"]},
        "/kinds/0",
        "gradient",
    ),
    "no such kind": (FC | {"kinds": ["thoughts"]}, "/kinds/0", ""),
    "no steps": ({"layers": ["fc"], "kinds": ["output"]}, "/every", "every"),
    "an empty window": (FC | {"start": 5, "stop": 5}, "/stop", "stop"),
    "two ways to say when": (FC | {"on": "nonfinite"}, "/on", "only one"),
    "a budget of nothing": (FC | {"max_overhead": 0.0}, "/max_overhead", ""),
    "a recorder of evaluations": (
        {"layers": ["fc"], "kinds": ["output"], "on": "nonfinite", "phase": "evaluate"},
        "/phase",
        "training",
    ),
    "every 0": (FC | {"every": 0}, "/every", ""),
    "text for a number": (FC | {"every": "1"}, "/every", ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_watched_is_refused_by_its_place(api: httpx2.Client, job: str, name: str):
    body, pointer, word = WRONG[name]
    answer = api.post(f"{job}/probes", json=body)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, "invalid_request"), problem
    assert pointer in {entry["pointer"] for entry in problem["errors"]}, problem
    assert word in str(problem["errors"])
    assert len(api.get(f"{job}/probes").json()["data"]) == 1


def test_more_whole_tensors_than_a_step_may_keep_are_refused(
    api: httpx2.Client, dora: tuple[str, str]
):
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "wide", "type": "Linear", "args": {"out_features": 600_000}},
        {"name": "fc", "type": "AdaptiveAvgPool1d", "args": {"output_size": 10}},
    ]
    spec = small_job(dora[1], network={"layers": layers})
    job = api.post("/api/v1/jobs", json=spec).headers["location"]
    stats = attached(api, job, layers=["wide"], kinds=["output"])
    assert stats["bytes_per_step"] == 100 * 600_000 * 4
    attached(api, job, layers=["wide"], kinds=["output"], want=["full"])
    answer = api.post(f"{job}/probes", json=FC | {"layers": ["wide"], "want": ["full"]})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/want"
    merge = {"Content-Type": "application/merge-patch+json"}
    answer = api.patch(stats["links"]["self"], content='{"want":["full"]}', headers=merge)
    assert answer.json()["errors"][0]["code"] == "too_large"


def test_an_answer_says_what_it_may_cost_before_anything_was_measured(api: httpx2.Client, job: str):
    few, many = attached(api, job), attached(api, job, layers=["*"], want=["stats", "full"])
    assert 0 < few["estimated_cost_s"] < many["estimated_cost_s"] < 1
    assert (few["cost_s"], few["every_now"], few["max_overhead"]) == (None, 2, 0.03)
    assert api.get(job).json()["probe_overhead"] is None
    assert attached(api, job, every=None, at=[3])["every_now"] is None
    assert attached(api, job, every=None, on="nonfinite")["every_now"] == 1


def test_a_dry_run_says_what_a_probe_would_cost_and_attaches_nothing(api: httpx2.Client, job: str):
    wanted = FC | {"layers": ["fc*"], "kinds": ["param"], "want": ["full"]}
    answer = api.post(f"{job}/probes?dry_run=true", json=wanted)
    assert answer.status_code == 200, answer.text
    told = inspection.EstimatedProbe.model_validate_json(answer.content)
    assert len(api.get(f"{job}/probes").json()["data"]) == 1
    made = inspection.AttachedProbe.model_validate_json(
        api.post(f"{job}/probes", json=wanted).content
    )
    assert told.matched == made.matched == ["fc.weight", "fc.bias"]
    assert (told.bytes_per_step, told.estimated_cost_s) == (
        made.bytes_per_step,
        made.estimated_cost_s,
    )
    refused = api.post(f"{job}/probes?dry_run=true", json=wanted | {"layers": ["nothing*"]})
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/layers/0")


def test_null_turns_governing_off_and_stays_so(api: httpx2.Client, job: str):
    made = attached(api, job, max_overhead=None)
    assert made["max_overhead"] is None
    path = made["links"]["self"]
    merge = {"Content-Type": "application/merge-patch+json"}
    assert api.patch(path, content='{"every":3}', headers=merge).json()["max_overhead"] is None
    changed = api.patch(path, content='{"max_overhead":0.1}', headers=merge)
    assert changed.json()["max_overhead"] == 0.1
    changed = api.patch(path, content='{"max_overhead":null}', headers=merge)
    assert changed.json()["max_overhead"] is None


def test_a_change_of_what_another_owner_has_changed_is_refused(api: httpx2.Client, job: str):
    path = attached(api, job)["links"]["self"]
    seen = api.get(path).headers["etag"]
    first = api.patch(path, json={"every": 3}, headers={"If-Match": seen})
    assert first.status_code == 200, first.text
    second = api.patch(path, json={"every": 4}, headers={"If-Match": seen})
    assert (second.status_code, second.json()["code"]) == (412, "precondition_failed")
    again = api.patch(path, json={"every": 4}, headers={"If-Match": first.headers["etag"]})
    assert again.json()["every"] == 4


def test_an_evaluation_is_watched_only_where_there_is_one(
    api: httpx2.Client, dora: tuple[str, str]
):
    looking = {**FC, "every": 1, "phase": "evaluate"}
    spec = small_job(dora[1])
    assert "evaluate" not in spec
    job = api.post("/api/v1/jobs", json=spec).headers["location"]
    answer = api.post(f"{job}/probes", json=looking)
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/phase")
    spec["data"]["validation"] = {"dataset": dora[1], "split": "validation"}
    made = api.post("/api/v1/jobs", json=spec | {"evaluate": {"every_steps": 2}})
    job = made.headers["location"]
    assert attached(api, job, every=1, phase="evaluate")["phase"] == "evaluate"
    answer = api.post(f"{job}/probes", json={**looking, "kinds": ["output", "param_grad"]})
    assert answer.json()["errors"][0]["pointer"] == "/kinds/1"


def test_a_job_of_another_owner_is_not_watched(each_service: Api, api: httpx2.Client, job: str):
    probe = api.get(f"{job}/probes").json()["data"][0]
    path = probe["links"]["self"]
    with each_service.client(each_service.key("eve")) as eve:
        answers = [
            eve.get(f"{job}/probes"),
            eve.post(f"{job}/probes", json=FC),
            eve.get(path),
            eve.patch(path, json={"every": 3}),
            eve.delete(path),
        ]
    assert {answer.json()["code"] for answer in answers} == {"job_not_found"}
    with each_service.client(each_service.key("dora", "read")) as reader:
        assert reader.get(path).json() == probe
        assert reader.post(f"{job}/probes", json=FC).json()["code"] == "scope_too_small"
        assert reader.delete(path).status_code == 403
    with each_service.client() as admin:
        assert admin.get(path).json() == probe
    assert api.get(f"{job}/probes/prb_x").json()["code"] == "probe_not_found"


def test_an_ended_job_is_watched_no_more(api: httpx2.Client, job: str):
    made = attached(api, job)
    api.post(f"{job}/cancel")
    assert api.get(made["links"]["self"]).json()["state"] == "rejected"
    first = api.get(f"{job}/probes").json()["data"][0]["links"]["self"]
    merge = {"Content-Type": "application/merge-patch+json"}
    for answer in (
        api.post(f"{job}/probes", json=FC),
        api.patch(first, content='{"every":3}', headers=merge),
        api.delete(first),
    ):
        assert (answer.status_code, answer.json()["code"]) == (409, "job_ended")


def test_a_part_of_a_tensor_is_asked_for_changed_and_refused(api: httpx2.Client, job: str):
    made = attached(api, job, want=["full", "histogram"], slice="0:8,::2", max_bytes=400)
    assert (made["slice"], made["max_bytes"], made["bytes_per_step"]) == ("0:8,::2", 400, 8 * 5 * 4)
    path, merge = made["links"]["self"], {"Content-Type": "application/merge-patch+json"}
    wrong = {
        '{"slice": "100"}': ("/slice", "out of range"),
        '{"slice": "a"}': ("/slice", "as in numpy"),
        '{"slice": "0:8,5000:6000"}': ("/slice", "5000:6000 has nothing of axis 1"),
        '{"max_bytes": 159}': ("/max_bytes", "smallest that works is 160"),
        '{"want": ["sample"]}': ("/slice", "add full to want"),
    }
    for body, (pointer, said) in wrong.items():
        answer = api.patch(path, content=body, headers=merge)
        assert answer.status_code == 422, answer.text
        (error,) = answer.json()["errors"]
        assert error["pointer"] == pointer
        assert said in error["detail"]
    sampled = '{"want": ["sample", "quantiles"], "slice": null, "max_bytes": 120}'
    changed = api.patch(path, content=sampled, headers=merge)
    assert changed.status_code == 200, changed.text
    assert changed.json()["slice"] is None
    assert changed.json()["bytes_per_step"] == 3 * 40
