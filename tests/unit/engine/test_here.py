"""A job in the caller's own process leaves the process as it was, however the job ends."""

import os
import resource
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.spool import read_frames
from engine.process import rank
from engine.process.in_process import carry_out
from tests.unit.engine.runs import is_real, losses, planned, spec, write_job

LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
CAPPED = {
    "guards": {"memory": {"cap_fraction": 0.5}},
    "deterministic": True,
    "matmul_precision": "medium",
    "scheduler": {"type": "StepLR", "args": {"step_size": 3}},
}


def state_of_the_process() -> dict[str, Any]:
    """What a job may have changed in the process that runs it."""
    return {
        "environment": dict(os.environ),
        "limits": {kind: resource.getrlimit(kind) for kind in LIMITS},
        "filters": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "matmul": torch.get_float32_matmul_precision(),
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "tf32": (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "generator": torch.get_rng_state().tolist(),
        "directory": Path.cwd(),
    }


@pytest.fixture(params=["torch's own", "the caller's"])
def _settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Also where the caller has settings of their own."""
    if request.param == "torch's own":
        yield
        return
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)


def run(directory: Path, table: Path, **changes: Any) -> list[dict[str, Any]]:
    """The records of a job; plans are made in another process, and are not inspected."""
    resolved = planned(spec(**changes))["spec"]
    before = state_of_the_process()
    try:
        carry_out(write_job(directory, resolved, table))
    finally:
        assert state_of_the_process() == before
    return read_frames(directory / "spool", 0, 10**6)[0]


@pytest.mark.usefixtures("_settings")
def test_a_job_that_succeeds_leaves_the_process_as_it_was(digits: Path, tmp_path: Path):
    records = run(tmp_path, digits, **CAPPED)
    assert records[-1]["state"] == "succeeded", records[-1]


@pytest.mark.usefixtures("_settings")
def test_a_job_that_fails_leaves_the_process_as_it_was(digits: Path, tmp_path: Path):
    optimizer = {"type": "SGD", "args": {"lr": 1e30}}
    guards = CAPPED["guards"] | {"nonfinite": {"action": "fail"}}
    records = run(tmp_path, digits, **CAPPED | {"guards": guards}, optimizer=optimizer)
    assert (records[-1]["state"], records[-1]["error"]["code"]) == ("failed", "non_finite")


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_job_that_is_interrupted_leaves_the_process_as_it_was(
    error: type[BaseException], digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As by Ctrl-C in a debugger, in the middle of it."""
    real = rank.train

    def interrupted(*args: Any, **more: Any) -> Any:
        real(*args, **more)
        raise error

    monkeypatch.setattr(rank, "train", interrupted)
    try:
        run(tmp_path, digits, **CAPPED)
    except (KeyboardInterrupt, SystemExit):
        assert error is not MemoryError


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_matrices_are_multiplied_as_precisely_as_the_spec_says(
    precision: str, digits: Path, tmp_path: Path
):
    seen: set[str] = set()

    def look(_module: Any, inputs: Any, _output: Any) -> None:
        if (
            inputs and isinstance(inputs[0], torch.Tensor) and is_real(inputs[0])
        ):  # the planner multiplies nothing
            seen.add(torch.get_float32_matmul_precision())

    hook = torch.nn.modules.module.register_module_forward_hook(look)
    before = torch.get_float32_matmul_precision()
    try:
        found = losses(run(tmp_path / "a", digits, matmul_precision=precision))
        assert seen == {precision}
        torch.set_float32_matmul_precision(precision)  # the caller's does not decide
        assert losses(run(tmp_path / "b", digits)) == losses(run(tmp_path / "c", digits))
        assert seen == {precision, "highest"}
        assert found[0] == pytest.approx(losses(run(tmp_path / "d", digits))[0], rel=1e-2)
    finally:
        hook.remove()
        torch.set_float32_matmul_precision(before)


def test_the_resolved_spec_says_how_precisely():
    assert planned(spec())["spec"]["matmul_precision"] == "highest"
    assert planned(spec(matmul_precision="high"))["spec"]["matmul_precision"] == "high"
