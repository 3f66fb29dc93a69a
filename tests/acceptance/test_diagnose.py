"""Diagnose jobs and the hardware of workers, as a client sees them."""

import json
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

import glasshouse as gh
from tests.acceptance.services import LocalService

ROOT = Path(__file__).parents[2]
EXAMPLE: dict[str, Any] = json.loads((ROOT / "examples" / "diagnose.json").read_text())
OPS = ["all_reduce", "all_gather", "broadcast", "send_recv"]


def test_the_example_measures_two_processes(client: gh.Client, http: httpx2.Client):
    job = client.jobs.create(EXAMPLE).wait(timeout=120)
    shown = http.get(f"/jobs/{job.id}").json()
    assert (shown["state"], shown["kind"]) == ("succeeded", "diagnose")
    assert len(shown["ranks"]) == 2
    result = shown["result"]
    expected = [(op, size) for op in OPS for size in EXAMPLE["sizes_bytes"]]
    assert [(item["op"], item["size_bytes"]) for item in result["collectives"]] == expected
    for item in result["collectives"]:
        assert item["correct"] is True
        rate = item["bandwidth_bytes_per_s"]
        assert rate * item["time_s"] == pytest.approx(item["size_bytes"])
    assert {copy["rank"] for copy in result["memory"]["copies"]} == {0, 1}
    assert isinstance(result["verdict"], str)
    assert all({"id", "rule", "severity", "evidence"} < one.keys() for one in result["findings"])
    assert shown["progress"]["step"] == shown["progress"]["num_steps"] == 4 + len(expected)
    spec = http.get(f"/jobs/{job.id}/spec", params={"resolved": True}).json()
    assert spec["sizes_bytes"] == EXAMPLE["sizes_bytes"]
    listed = http.get("/jobs", params={"kind": "diagnose"}).json()["data"]
    assert job.id in [one["id"] for one in listed]
    again = client.jobs.create(spec).wait(timeout=120)
    assert again.result()["collectives"]


def test_the_client_diagnoses_one_process_and_several(client: gh.Client):
    alone = client.diagnose(device="cpu")
    assert alone["collectives"] == []
    assert "set parallel to test it" in alone["verdict"]
    both = client.diagnose(2, sizes_bytes=[1024], devices={"type": "cpu"}, name="pair")
    assert [item["op"] for item in both["collectives"]] == OPS


def test_the_command_line_prints_the_measurements_and_the_verdict(
    local_service: LocalService, http: httpx2.Client
):
    path = str(ROOT / "examples" / "diagnose.json")
    local_service.command("submit", path, "--watch", "-s", "name=printed")
    (job,) = http.get("/jobs", params={"name": "printed"}).json()["data"]
    verdict = job["result"]["verdict"]
    printed = local_service.command("show", "printed")
    assert verdict in printed
    assert [line.split()[0] for line in printed.splitlines() if line.startswith(tuple(OPS))] == [
        op for op in OPS for _ in EXAMPLE["sizes_bytes"]
    ]
    assert verdict in local_service.command("watch", "printed")


def test_the_command_line_prints_the_hardware(local_service: LocalService):
    printed = local_service.command("system")
    assert "torch" in printed
    assert "NUMA nodes: " in printed


@pytest.mark.parametrize(
    ("change", "pointer", "said"),
    [
        ({"sizes_bytes": []}, "/sizes_bytes", ""),
        ({"sizes_bytes": [0]}, "/sizes_bytes/0", "change it"),
        ({"sizes_bytes": [-4]}, "/sizes_bytes/0", "-4"),
        ({"sizes_bytes": [1024, 1023]}, "/sizes_bytes/1", "1020"),
        ({"sizes_bytes": [1024, 2 << 30]}, "/sizes_bytes/1", "1 GiB"),
        ({"sizes_bytes": [1024, 1024]}, "/sizes_bytes/1", "twice"),
        ({"sizes_bytes": [4 * n for n in range(1, 18)]}, "/sizes_bytes", "16"),
        ({"sizes_bytes": [True]}, "/sizes_bytes/0", ""),
        ({"size_bytes": [4]}, "/size_bytes", "sizes_bytes"),
        ({"parallel": {"strategy": "data"}}, "/parallel/processes", "set parallel.processes"),
        ({"parallel": {"strategy": "data", "processes": 500}}, "/parallel/processes", "256"),
        ({"parallel": {"strategy": "data", "processes": 200}}, None, "200"),
        ({"devices": {"type": "cpu", "count": 2}}, "/devices/count", "cuda"),
        ({"network": {"layers": []}}, "/network", ""),
        ({"devices": {"min_memory_gib": 0}}, "/devices/min_memory_gib", "greater than 0"),
        ({"devices": {"min_memory_gib": 1e5}}, "/devices/min_memory_gib", "ask for less"),
    ],
)
def test_a_wrong_spec_names_the_field(
    http: httpx2.Client, change: dict[str, Any], pointer: str | None, said: str
):
    answer = http.post("/jobs", json=EXAMPLE | change)
    assert answer.status_code == 422, answer.json()
    (problem,) = answer.json()["errors"]
    assert pointer is None or problem["pointer"] == pointer, problem
    assert said in problem["detail"], problem


def test_messages_that_exceed_the_memory_of_the_host_are_refused(http: httpx2.Client):
    total = psutil.virtual_memory().total
    processes = total // (4 << 30) + 1
    parallel = {"strategy": "data", "processes": processes}
    changed = {"sizes_bytes": [1 << 30], "parallel": parallel, "devices": {"type": "auto"}}
    answer = http.post("/plan", json=EXAMPLE | changed)
    assert answer.status_code == 422, answer.json()
    pointers = {problem["pointer"] for problem in answer.json()["errors"]}
    assert pointers <= {"/sizes_bytes", "/parallel/processes"}, answer.json()


def test_the_plan_of_a_diagnose_job_has_memory_and_devices(http: httpx2.Client):
    plan = http.post("/plan", json=EXAMPLE).json()
    assert plan["layers"] == []
    assert plan["memory"]["total_bytes"] > 0
    assert plan["devices"][0]["kind"] == "cpu"


def test_the_system_has_versions_processors_and_memory(client: gh.Client, http: httpx2.Client):
    (found,) = http.get("/system").json()["data"]
    import torch

    assert found["versions"]["torch"] == torch.__version__
    assert (found["versions"]["mkl"] is not None) == torch.backends.mkl.is_available()
    assert (found["versions"]["onednn"] is not None) == torch.backends.mkldnn.is_available()
    assert found["versions"]["glasshouse"] == gh.__version__
    assert found["cpu"]["logical_cores"] == psutil.cpu_count()
    assert found["cpu"]["job_cores"] >= 1
    assert found["memory"]["total_bytes"] == psutil.virtual_memory().total
    assert [one.data["worker"] for one in client.system()] == [found["worker"]]
    (core, *_) = http.get("/devices").json()["data"]
    assert core["utilization_percent"] is None
    assert core["interconnect"] is None


def test_a_minimum_of_memory_that_the_host_has_is_met(client: gh.Client):
    devices = {"type": "cpu", "threads": 1, "min_memory_gib": 0.5}
    job = client.jobs.create({"kind": "diagnose", "devices": devices}).wait(timeout=120)
    assert job.state == "succeeded"
