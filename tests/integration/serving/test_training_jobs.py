"""Predictions with the current weights of jobs that train, are killed, paused, canceled or end."""

import io
import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load
from sqlalchemy import select, update

import glasshouse as gh
from models.jobs import pausing
from models.tables import Checkpoint, Job
from tests.integration.serving.service import ROW, Service
from tests.integration.worker.harness import endless, train_spec
from tests.waiting import until

BODY = {"inputs": {"x": [ROW, ROW[::-1]]}, "outputs": ["act", "fc2"]}
SLOW = {"misbehave": "be-slow", "at": "forward", "hit": "each"}
"""Labels of a job whose steps take 0.05 s more."""
SLOWER = SLOW | {"misbehave": "pause"}
"""0.3 s."""


@pytest.fixture(scope="module")
def dataset(shared_service: Service) -> str:
    return shared_service.harness.dataset()


def start(service: Service, dataset: str, **changes: Any) -> str:
    """Submit a job that trains until it is stopped, and wait for its first step."""
    threads = {"type": "cpu", "threads": 1}
    job = service.harness.submit(endless(dataset, **{"devices": threads, **changes}))
    service.harness.wait_step(job)
    return job


def ask(
    service: Service, job: str, body: Any = None, *, key: str | None = None, **query: Any
) -> httpx2.Response:
    """Send one request, as JSON."""
    headers = {"Authorization": f"Bearer {key or service.key}", "Content-Type": "application/json"}
    return httpx2.post(
        f"{service.api.url}/api/v1/jobs/{job}/predict",
        content=json.dumps(body or BODY),
        headers=headers,
        params=query,
        timeout=120,
    )


def code_of(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def test_a_job_answers_as_its_checkpoint_of_the_same_step_does(service: Service, dataset: str):
    saves = {"every_steps": 1, "every_s": None, "keep_last": 1000}
    job = start(service, dataset, labels=SLOW, checkpoint=saves)
    first, second = ask(service, job), ask(service, job)
    assert first.status_code == 200, first.text
    found = first.json()
    assert found["job"] == job
    assert first.headers["x-job-step"] == f"{job}:{found['step']}"
    assert "queue;dur=" in first.headers["server-timing"]
    assert second.json()["step"] > found["step"]
    assert second.json()["outputs"] != found["outputs"]

    def saved() -> str | None:
        of_step = (Checkpoint.job == job, Checkpoint.step == found["step"])
        with service.harness.database.read() as tx:
            return tx.scalars(select(Checkpoint.id).where(*of_step)).one_or_none()

    checkpoint = until(saved)
    service.end(job)
    service.publish("of-job", checkpoint)
    service.serve("of-job")
    headers = {"Authorization": f"Bearer {service.key}", "Content-Type": "application/json"}
    url = f"{service.api.url}/api/v1/models/of-job/predict"
    served = httpx2.post(url, content=json.dumps(BODY), headers=headers, timeout=60)
    assert served.json()["outputs"] == found["outputs"]


def test_formats_and_refusals_are_those_of_models(service: Service, dataset: str):
    job = start(service, dataset)
    headers = {"Authorization": f"Bearer {service.key}"}
    url = f"{service.api.url}/api/v1/jobs/{job}/predict"
    buffer = io.BytesIO()
    np.save(buffer, np.array([ROW], np.float32))

    def post(content: bytes, kind: str, accept: str, **query: Any) -> httpx2.Response:
        own = headers | {"Content-Type": kind, "Accept": accept}
        return httpx2.post(url, content=content, headers=own, params=query, timeout=60)

    npy, tensors = "application/x-npy", "application/vnd.safetensors"
    array = np.load(io.BytesIO(post(buffer.getvalue(), npy, npy, fields="value").content))
    assert array.shape == (1, 2)
    both = post(buffer.getvalue(), npy, tensors, outputs="act,fc2", fields="value")
    assert load(both.content)["act/value"].shape == (1, 1024)
    assert code_of(post(b"a,b", "text/csv", "")) == (415, "unsupported_media")
    assert code_of(ask(service, job, {"inputs": {"z": [ROW]}})) == (422, "invalid_request")
    assert code_of(ask(service, job, timeout_s="never")) == (422, "invalid_request")
    with gh.Client(service.api.url, service.key) as client:
        one = client.jobs.get(job)
        by_client = one.predict(np.array([ROW], np.float32), outputs=["act", "fc2"])
        assert (by_client.job, by_client["act"].shape) == (job, (1, 1024))
        assert by_client.step > 0
        assert set(one.predict(rows=[ROW]).outputs) == {"fc2/value", "fc2/id", "fc2/prob"}
    reader = service.api.key("ada", "read")
    assert ask(service, job, key=reader).status_code == 200
    stranger = service.api.key("eve", "submit")
    assert code_of(ask(service, job, key=stranger)) == (404, "job_not_found")
    shown = httpx2.get(f"{service.api.url}/api/v1/jobs/{job}", headers=headers).json()
    assert shown["state"] == "running"
    assert shown["serving"] is None
    commands = httpx2.get(f"{service.api.url}/api/v1/jobs/{job}/commands", headers=headers).json()
    assert commands["data"] == [], "nobody sent a command"


def test_what_does_not_train_is_refused_with_what_to_do(service: Service, dataset: str):
    harness = service.harness
    ended = harness.submit(train_spec(dataset, stop={"steps": 2}))
    waiting = harness.submit(endless(dataset, devices={"type": "cuda"}), ring=False)
    sharded = harness.submit(
        endless(dataset, parallel={"strategy": "fsdp", "processes": 2}), ring=False
    )
    harness.wait(ended)
    found = ask(service, ended)
    assert code_of(found) == (409, "job_ended")
    assert f"glasshouse models publish NAME {ended}" in found.json()["detail"]
    assert code_of(ask(service, waiting)) == (409, "cannot_predict")
    assert "queued" in ask(service, waiting).json()["detail"]
    with harness.database.write() as tx:  # as if it ran
        tx.execute(update(Job).where(Job.id == sharded).values(state="running"))
    refused = ask(service, sharded)
    assert code_of(refused) == (409, "cannot_predict")
    assert "with fsdp, each process has a part of the network" in refused.json()["detail"]
    with harness.database.write() as tx:
        tx.execute(update(Job).where(Job.id == sharded).values(state="queued"))
    service.publish("other-kind", service.checkpoint())
    serving = service.serve("other-kind")
    assert code_of(ask(service, serving)) == (409, "cannot_predict")
    assert "kind serve" in ask(service, serving).json()["detail"]
    assert code_of(ask(service, "job_absent")) == (404, "job_not_found")


def test_process_0_of_several_answers(service: Service, dataset: str):
    job = start(service, dataset, parallel={"strategy": "data", "processes": 2})
    steps = [ask(service, job).json()["step"] for _ in range(2)]
    assert steps[0] < steps[1]


# --- jobs that stop while requests wait ----------------------------------------------------------


def all_of(
    service: Service, job: str, act: Callable[[], object], num: int = 6, **query: Any
) -> list[httpx2.Response]:
    """Send requests, and do something while they wait."""
    with ThreadPoolExecutor(num) as pool:
        asked = [pool.submit(ask, service, job, **query) for _ in range(num)]
        until(lambda: any(one.done() for one in asked))
        more = [pool.submit(ask, service, job, **query) for _ in range(num)]
        act()
        return [one.result() for one in asked + more]


def test_requests_wait_for_the_next_attempt_if_the_process_is_killed(
    service: Service, dataset: str
):
    job = start(service, dataset, labels=SLOWER)
    pid = service.harness.rank_pid(job)
    found = all_of(service, job, lambda: os.kill(pid, signal.SIGKILL), timeout_s=60)
    assert [one.text for one in found if one.status_code != 200] == []
    assert service.harness.job(job).attempt == 2
    assert ask(service, job, timeout_s=60).status_code == 200
    assert [one.exit_kind for one in service.harness.attempts(job)] == ["killed_from_outside", None]


def test_a_lost_process_that_is_not_back_in_time_is_reported(service: Service, dataset: str):
    job = start(service, dataset)
    assert ask(service, job).status_code == 200
    worker = service.harness.workers["w1"].pid
    os.kill(worker, signal.SIGSTOP)
    try:
        os.kill(service.harness.rank_pid(job), signal.SIGKILL)
        found = ask(service, job, timeout_s=1)
        assert code_of(found) == (503, "replica_unavailable")
        assert "try again" in found.json()["detail"]
    finally:
        os.kill(worker, signal.SIGCONT)


@pytest.mark.parametrize("ends", ["paused", "cancelled"])
def test_requests_to_a_job_that_is_stopped_are_answered_or_refused(
    service: Service, dataset: str, ends: str
):
    job = start(service, dataset, labels=SLOWER)

    def stop() -> None:
        if ends == "cancelled":
            service.harness.cancel(job)
            return
        with service.harness.database.write() as tx:
            pausing.request_pause(tx, tx.get_one(Job, job))

    found = all_of(service, job, stop, timeout_s=60)
    code = "job_ended" if ends == "cancelled" else "cannot_predict"
    assert found[0].status_code == 200
    assert {code_of(one) for one in found if one.status_code != 200} <= {(409, code)}
    service.harness.wait(job, ends)
    assert code_of(ask(service, job)) == (409, code)


def test_a_step_that_takes_longer_than_a_request_allows_is_named(service: Service, dataset: str):
    job = start(service, dataset, labels=SLOWER)
    assert ask(service, job).status_code == 200
    found = ask(service, job, timeout_s=0.01)
    assert code_of(found) == (504, "prediction_timeout")
    assert "between two steps of training" in found.json()["detail"]
    assert "each of which takes about 0.3" in found.json()["detail"]
