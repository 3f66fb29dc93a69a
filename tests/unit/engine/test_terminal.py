import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.__main__ import main
from tests.unit.engine.runs import spec


def _engine(*arguments, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "engine", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )


@pytest.mark.long
def test_a_job_file_trains_and_infers_with_no_service(digits, tmp_path):
    job = spec()
    job["data"]["train"]["dataset"] = str(digits)
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = _engine("job.json", "--out", "result", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["state"] == "succeeded"
    assert summary["metrics"]["loss"] > 0
    assert "step" in done.stderr
    checkpoint = tmp_path / "result" / "checkpoints" / "step-10"
    data = {"dataset": str(digits), "split": "test"}
    infer = {"kind": "infer", "job": "job_x", "data": data}
    (tmp_path / "infer.json").write_text(json.dumps(infer))
    done = _engine("infer.json", "--checkpoint", checkpoint, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "artifacts" / "outputs.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"optimizer": {"type": "SGD", "args": {"speed": 1}}}, "/optimizer/args/speed"),
        ({"guards": {"memory": {"on_oom": "halve_batch"}}}, "/guards/memory/on_oom"),
    ],
)
def test_a_bad_job_file_is_refused_with_the_place(
    changes, place, digits, tmp_path, monkeypatch, capsys
):
    job = spec(**changes)
    job["data"]["train"]["dataset"] = str(digits)
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = ["engine", str(tmp_path / "job.json"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 2
    assert place in capsys.readouterr().err


@pytest.mark.long
def test_the_engine_needs_nothing_of_the_service():
    code = (
        "import sys, engine.plan.plan;"
        "import engine.process.rank, engine.process.planner, engine.process.fork_server;"
        "bad = {'fastapi', 'sqlalchemy', 'redis', 'celery', 'httpx', 'httpx2', 'api', 'models',"
        " 'worker'} & {name.partition('.')[0] for name in sys.modules};"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_terminal_keeps_the_last_checkpoints_only(tmp_path, digits):
    job = tmp_path / "job.json"
    data = {"train": {"dataset": str(digits), "split": "train"}}
    saving = {"every_steps": 1, "keep_last": 2}
    job.write_text(json.dumps(spec(data=data, stop={"steps": 4}, checkpoint=saving)))
    command = [sys.executable, "-m", "engine", str(job), "--out", str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True)
    kept = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert kept == ["step-3", "step-4"]


@pytest.mark.long
def test_the_terminal_refuses_a_worker(tmp_path, digits):
    job = tmp_path / "job.json"
    data = {"train": {"dataset": str(digits), "split": "train"}}
    job.write_text(json.dumps(spec(data=data, devices={"worker": "w1"})))
    command = [sys.executable, "-m", "engine", str(job), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "/devices/worker" in done.stderr
