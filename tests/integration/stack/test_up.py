"""The service as ``glasshouse up`` runs it, while it runs."""

import contextlib
import json
import os
import signal
import stat
from pathlib import Path

import httpx2
import redis

from glasshouse import processes
from glasshouse.cli.service.processes import ROOT
from tests.integration.stack.conftest import RunningStack, command
from tests.running import NO_TLS
from tests.waiting import until

SPEC = ROOT / "examples" / "digits.json"


def test_the_runtime_file_is_complete_and_private(running: RunningStack):
    runtime = running.runtime
    assert set(runtime) == {"url", "api_key", "pid", "version"}
    assert runtime["pid"] == running.process.pid
    for name in ("runtime.json", "glasshouse.db", "run/stack.json", "run/valkey.conf"):
        assert stat.S_IMODE((running.home / name).stat().st_mode) == 0o600, name
    for name in (".", "run", "valkey", "artifacts", "work", "logs"):
        assert stat.S_IMODE((running.home / name).stat().st_mode) == 0o700, name


def test_the_key_is_printed_nowhere(running: RunningStack):
    key = running.runtime["api_key"]
    assert key not in running.log()
    assert key not in command(running.home, "status", "--json").stdout
    for log in (running.home / "logs").iterdir():
        assert key not in log.read_text(errors="replace"), log


def test_the_broker_is_private_and_forgets_nothing(running: RunningStack):
    socket = running.home / "run" / "valkey.sock"
    assert stat.S_IMODE(socket.stat().st_mode) == 0o700
    with redis.Redis(unix_socket_path=str(socket), decode_responses=True) as broker:
        found = {
            name: broker.config_get(name)[name]  # pyright: ignore
            for name in ("port", "appendonly", "maxmemory-policy", "dir")
        }
    assert found == {
        "port": "0",
        "appendonly": "yes",
        "maxmemory-policy": "noeviction",
        "dir": str(running.home / "valkey"),
    }


def test_a_second_up_says_where_the_first_runs(running: RunningStack):
    for more in ([], ["--detach"]):
        second = command(running.home, "up", "--port", "0", *more)
        assert second.returncode == 1
        assert f"already running at {running.runtime['url']}" in second.stderr
    assert running.process.poll() is None


def test_status_and_doctor_report_a_healthy_service(running: RunningStack):
    status = json.loads(command(running.home, "status", "--json").stdout)
    assert status["status"] == "ok"
    assert [worker["state"] for worker in status["workers"]] == ["active"]
    doctor = command(running.home, "doctor", "--json")
    checks = {check["name"]: check["state"] for check in json.loads(doctor.stdout)}
    assert checks["service"] == checks["home"] == "ok"


def test_a_job_is_submitted_watched_and_inspected(running: RunningStack, tmp_path: Path):
    changes = ["-s", "stop.epochs=2", "-s", 'probes.0.want=["stats","full"]']
    done = command(running.home, "submit", str(SPEC), *changes, "--watch")
    assert done.returncode == 0, done.stderr
    assert "validation/accuracy" in done.stdout
    job = json.loads(command(running.home, "jobs", "--json").stdout)[0]["id"]
    file = tmp_path / "conv1.npy"
    shown = command(
        running.home, "layers", job, "conv1", "--step", "10", "--save", str(file), "--json"
    )
    assert json.loads(shown.stdout)["shape"] == [32, 16, 8, 8]
    dataset = json.loads(command(running.home, "datasets", "list", "--json").stdout)[0]["id"]
    rows = ["--data", dataset, "--split", "test", "--outputs", "conv1,fc", "--json"]
    inferred = json.loads(command(running.home, "infer", job, *rows).stdout)
    assert inferred["outputs"]["fc/value"]["shape"] == [250, 10]
    assert inferred["outputs"]["conv1/value"]["shape"] == [250, 16, 8, 8]


def test_each_child_that_dies_starts_again(running: RunningStack):
    before = running.children
    for child in before.values():
        os.kill(child.pid, signal.SIGKILL)

    def all_are_new() -> bool:
        now = running.children
        return all(
            now[name].pid != child.pid and processes.alive(now[name])
            for name, child in before.items()
        )

    until(all_are_new)
    until(lambda: _is_ready(running))  # to start a command each time takes a whole core
    until(lambda: _is_well(running), longest_pause_s=2.0)


def _is_ready(running: RunningStack) -> bool:
    with contextlib.suppress(httpx2.TransportError):
        return httpx2.get(f"{running.runtime['url']}/readyz", verify=NO_TLS).status_code == 200
    return False


def _is_well(running: RunningStack) -> bool:
    status = command(running.home, "status", "--json")
    return status.returncode == 0 and json.loads(status.stdout)["status"] == "ok"
