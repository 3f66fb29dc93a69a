import json
import os
import subprocess
import sys
from pathlib import Path

from engine.__main__ import main
from tests.unit.engine.making import spec


def _engine(*arguments, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "engine", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )


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


def test_a_bad_job_file_is_refused_with_the_place(digits, tmp_path, monkeypatch, capsys):
    job = spec(optimizer={"type": "SGD", "args": {"speed": 1}})
    job["data"]["train"]["dataset"] = str(digits)
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = ["engine", str(tmp_path / "job.json"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 2
    assert "/optimizer/args/speed" in capsys.readouterr().err


def test_the_engine_needs_nothing_of_the_service():
    code = (
        "import sys, engine.rank, engine.plan, engine.planner, engine.nursery;"
        "bad = {'fastapi', 'sqlalchemy', 'redis', 'celery', 'httpx', 'httpx2', 'api', 'models',"
        " 'worker'} & {name.partition('.')[0] for name in sys.modules};"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
