"""A torchvision that does not fit torch breaks torchmetrics: what is reported and what still works.

torchmetrics imports torchvision wherever that is installed. Here it is a small package of that
name, whose import fails as the real one's does that was built for CUDA, beside torch for the CPU.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glasshouse.cli.service import doctor
from tests.unit.engine.runs import spec

ROOT = Path(__file__).parents[3]
ACCURACY = {"type": "accuracy", "inputs": ["fc", "label"]}
F1 = {"type": "MulticlassF1Score", "args": {"num_classes": 10}, "inputs": ["fc", "label"]}
JUDGED = {"validation": {"dataset": "ds_1", "split": "test"}}
COLUMNS = [
    {"name": "image", "dtype": "float32", "shape": [1, 8, 8], "file": "0.npy"},
    {"name": "label", "dtype": "int64", "shape": [], "file": "1.npy"},
]


@pytest.fixture
def unfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from here on find a torchvision that fails."""
    said = "operator torchvision::nms does not exist"
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(f"raise RuntimeError({said!r})\n")
    told = tmp_path / "torchvision-0.28.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")


def planner(*requests: dict[str, Any]) -> list[dict[str, Any]]:
    """What one planner, a process, says: that it is ready, and its answers."""
    done = subprocess.run(
        [sys.executable, "-m", "engine.process.planner"],
        input="".join(f"{json.dumps(request)}\n" for request in requests),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def planned(*metrics: dict[str, Any]) -> dict[str, Any]:
    datasets = {"ds_1": {"columns": COLUMNS, "splits": {"train": 100, "test": 20}}}
    job = spec(data={**JUDGED, "batch_size": 10}, metrics=list(metrics))
    return {"do": "plan", "spec": job, "datasets": datasets}


@pytest.mark.usefixtures("unfit")
@pytest.mark.long
def test_the_planner_refuses_what_needs_torchmetrics_by_name_and_answers_all_else():
    _, refused, fine, catalog = planner(
        planned(ACCURACY, F1), planned(ACCURACY), {"do": "catalog", "section": "metrics"}
    )
    assert not refused["ok"]
    (problem,) = refused["errors"]
    assert (problem["pointer"], problem["code"]) == ("/metrics/1/type", "unavailable")
    told = ("MulticlassF1Score", "torchvision 0.28.0", "nms does not exist", "pip uninstall")
    assert [part for part in told if part not in problem["detail"]] == []
    assert fine["ok"], fine
    assert {entry["name"] for entry in catalog["entries"]} >= {"accuracy", "l2_ratio"}
    assert "MulticlassF1Score" not in {entry["name"] for entry in catalog["entries"]}


@pytest.mark.usefixtures("unfit")
@pytest.mark.long
def test_the_doctor_says_which_package_fails_and_what_to_do(tmp_path: Path):
    found = doctor.metrics(tmp_path)
    assert (found.name, found.state) == ("metrics", "fail")
    assert "torchmetrics imports torchvision" in found.detail
    assert "operator torchvision::nms does not exist" in found.detail
    assert str(found.fix).startswith("pip uninstall torchvision, or install its build for torch 2")


@pytest.mark.long
def test_the_doctor_says_which_torchmetrics_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = doctor.metrics(tmp_path)
    assert (found.state, found.fix) == ("ok", None)
    assert found.detail.startswith("torchmetrics 1.")


def test_the_doctor_refuses_nothing_that_only_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor, "ENGINE_TIMEOUT_S", 0.01)
    found = doctor.metrics(tmp_path)
    assert found.state == "warn"
    assert "cannot be checked" in found.detail
