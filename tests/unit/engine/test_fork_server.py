import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from engine.core.spool import read_frames
from engine.process import fork_server as serving
from glasshouse.processes import SHOW_STACKS
from tests.unit.engine.runs import losses, of_type, planned, run, spec, write_job
from tests.waiting import until

FOR_EVER = {"stop": {"steps": 10**9}}


class Client:
    """The worker's side of the socket of the fork server."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(90)
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.getcwd(),
            "GLASSHOUSE_FORK_SERVER_FD": str(theirs.fileno()),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "engine.process.fork_server"]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self.lines = self.socket.makefile("rb")
        self.lifelines: list[int] = []
        assert self.read()["ready"]

    def read(self) -> dict:
        said = json.loads(self.lines.readline())
        if "exited" in said:
            assert said.pop("peak_bytes") > 50 * 2**20  # torch alone takes more
        return said

    def fork(self, job_dir: Path, **env: str) -> dict:
        reading, writing = os.pipe()
        request = {
            "id": 1,
            "do": "fork",
            "job_dir": str(job_dir),
            "env": env,
            "stacks": str(job_dir / "stacks.txt"),
            "stdout": str(job_dir / "stdout"),
            "stderr": str(job_dir / "stderr"),
        }
        socket.send_fds(self.socket, [json.dumps(request).encode() + b"\n"], [reading])
        os.close(reading)
        self.lifelines.append(writing)
        return self.read()

    def close(self) -> int:
        for descriptor in self.lifelines:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.lines.close()
        self.socket.close()
        return self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def fork_server():
    client = Client()
    yield client
    assert client.close() == 0


def _gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False
    return state == "Z"


def _started(job_dir: Path) -> bool:
    return bool(of_type(read_frames(job_dir / "spool", 0)[0], "metrics"))


@pytest.mark.long
def test_a_forked_rank_trains_as_a_process_of_its_own_would(fork_server, digits, tmp_path):
    job = spec()
    here = run(tmp_path / "here", job, digits)
    there = write_job(tmp_path / "there", planned(job)["spec"], digits)
    answer = fork_server.fork(there)
    assert fork_server.read() == {"exited": answer["pid"], "code": 0, "signal": None}
    records, _ = read_frames(there / "spool", 0, 10**6)
    assert records[-1]["state"] == "succeeded"
    assert losses(records) == losses(here)


@pytest.mark.long
def test_a_rank_that_sees_a_gpu_is_a_new_program(fork_server, digits, tmp_path):
    """torch does not support GPUs in a fork of a process whose autograd engine has started."""
    job = spec()
    here = run(tmp_path / "here", job, digits)
    there = write_job(tmp_path / "there", planned(job)["spec"], digits)
    answer = fork_server.fork(there, CUDA_VISIBLE_DEVICES="GPU-0")
    assert fork_server.read() == {"exited": answer["pid"], "code": 0, "signal": None}
    records, _ = read_frames(there / "spool", 0, 10**6)
    assert records[-1]["state"] == "succeeded"
    assert losses(records) == losses(here)


def test_a_new_program_is_the_rank_that_was_forked(fork_server, digits, tmp_path):
    job = write_job(tmp_path, planned(spec(**FOR_EVER))["spec"], digits)
    pid = fork_server.fork(job, CUDA_VISIBLE_DEVICES="GPU-0")["pid"]
    until(lambda: _started(job), 60)
    assert b"fresh_rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert os.getsid(pid) == pid
    os.kill(pid, SHOW_STACKS)
    until(lambda: "loop.py" in (job / "stacks.txt").read_text())
    os.close(fork_server.lifelines.pop())
    assert fork_server.read() == {"exited": pid, "code": 75, "signal": None}


def test_two_ranks_run_beside_each_other_with_two_threads_each(fork_server, digits, tmp_path):
    resolved = planned(spec())["spec"]
    jobs = [
        write_job(tmp_path / name, resolved, digits, device={"type": "cpu", "threads": 2})
        for name in "ab"
    ]
    pids = {fork_server.fork(job)["pid"] for job in jobs}
    ended = [fork_server.read() for _ in jobs]
    assert {item["exited"] for item in ended} == pids
    assert {item["code"] for item in ended} == {0}


def test_a_rank_ends_at_a_step_boundary_when_asked(fork_server, digits, tmp_path):
    job = write_job(tmp_path, planned(spec(**FOR_EVER))["spec"], digits)
    fork_server.fork(job)
    until(lambda: _started(job))
    os.write(fork_server.lifelines[-1], b'{"do":"cancel"}\n')
    assert fork_server.read()["code"] == 0
    records, _ = read_frames(job / "spool", 0, 10**6)
    assert records[-1]["state"] == "cancelled"
    assert of_type(records, "checkpoint")[-1]["step"] == len(losses(records))


def test_a_rank_ends_when_its_lifeline_is_cut(fork_server, digits, tmp_path):
    job = write_job(tmp_path, planned(spec(**FOR_EVER))["spec"], digits)
    answer = fork_server.fork(job)
    until(lambda: _started(job))
    os.close(fork_server.lifelines.pop())
    assert fork_server.read() == {"exited": answer["pid"], "code": 75, "signal": None}


def test_a_killed_rank_is_reported_with_its_signal(fork_server, digits, tmp_path):
    job = write_job(tmp_path, planned(spec(**FOR_EVER))["spec"], digits)
    answer = fork_server.fork(job)
    until(lambda: _started(job))
    os.kill(answer["pid"], signal.SIGKILL)
    assert fork_server.read() == {"exited": answer["pid"], "code": None, "signal": 9}


def test_a_rank_writes_to_its_own_files(fork_server, tmp_path):
    (tmp_path / "job.json").write_text("{}")
    fork_server.fork(tmp_path)
    assert fork_server.read()["code"] == 0
    assert "SpecFailed" in (tmp_path / "stderr").read_text()
    assert (tmp_path / "stdout").read_text() == ""
    assert read_frames(tmp_path / "spool", 0)[0][-1]["error"]["code"] == "spec_failed"


@pytest.mark.long
def test_ranks_end_with_the_worker_and_with_the_fork_server(digits, tmp_path):
    job = write_job(tmp_path / "a", planned(spec(**FOR_EVER))["spec"], digits)
    client = Client()
    pid = client.fork(job)["pid"]
    until(lambda: _started(job))
    lifelines, client.lifelines = client.lifelines, []
    assert client.close() == 0  # the socket closes, the lifeline stays open
    until(lambda: _gone(pid))
    for descriptor in lifelines:
        os.close(descriptor)


def test_only_the_threads_that_counting_devices_starts_are_accepted(monkeypatch):
    """As the CUDA driver starts one in the first backward pass, where there is one."""
    backward, ended = torch.Tensor.backward, threading.Event()
    of_driver = threading.Thread(target=ended.wait)

    def first_backward(x: torch.Tensor) -> None:
        of_driver.start()
        backward(x)

    monkeypatch.setattr(torch.Tensor, "backward", first_backward)
    num_before = serving.num_threads()
    try:
        assert serving.load_driver() == 1
        serving.check_threads(num_before + 1)
        with pytest.raises(SystemExit, match="a fork of it could hang"):
            serving.check_threads(num_before)
    finally:
        ended.set()
        of_driver.join()


def test_a_thread_that_ends_takes_no_rank_along(fork_server, digits, tmp_path):
    job = write_job(tmp_path, planned(spec(**FOR_EVER))["spec"], digits)
    asking = threading.Thread(target=fork_server.fork, args=(job,))
    asking.start()
    asking.join()
    until(lambda: _started(job))
    before = len(read_frames(job / "spool", 0, 10**6)[0])
    until(lambda: len(read_frames(job / "spool", 0, 10**6)[0]) > before + 10)
    os.close(fork_server.lifelines.pop())
    assert fork_server.read()["code"] == 75


DYING_PARENT = """
import os, time
from engine.process.fork_server import _die_with
if os.fork() == 0:  # the parent
    parent = os.getpid()
    if os.fork() == 0:  # the rank, which is late
        while os.getppid() == parent:
            time.sleep(0.01)
        _die_with(parent)
        print("it lives", flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a death signal is Linux's")
@pytest.mark.long
def test_a_parent_that_died_before_the_rank_was_armed_takes_it_along():
    ended = subprocess.run(
        [sys.executable, "-c", DYING_PARENT],
        capture_output=True,  # until the last that could write has ended
        env={"PYTHONPATH": os.getcwd()},
        timeout=200,
        check=True,
    )
    assert ended.stdout == b"", ended
    assert ended.stderr == b""


@pytest.mark.skipif(sys.platform != "linux", reason="a death signal is Linux's")
@pytest.mark.long
def test_killing_the_fork_server_kills_its_ranks(digits, tmp_path):
    job = write_job(tmp_path, planned(spec(**FOR_EVER))["spec"], digits)
    client = Client()
    pid = client.fork(job)["pid"]
    until(lambda: _started(job))
    client.process.kill()
    until(lambda: _gone(pid))
    assert client.close() == -9
