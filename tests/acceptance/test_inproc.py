"""``Client("inproc://")``: the service in the caller's process, for a debugger."""

import os
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import glasshouse as gh
from tests.acceptance.services import ROOT

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 4)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int64)
LAYERS = [{"name": "scores", "type": "Linear", "args": {"out_features": 2}}]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Generator[gh.Client]:
    """A client of this process, which must not touch a service that the environment names."""
    with pytest.MonkeyPatch.context() as patch:
        elsewhere = tmp_path_factory.mktemp("elsewhere") / "other.db"
        patch.setenv("GLASSHOUSE_DATABASE_URL", f"sqlite:///{elsewhere}")
        with gh.Client("inproc://") as client:
            yield client
        assert not elsewhere.exists()


def train(client: gh.Client, **options: Any) -> gh.Job:
    named = {"optimizer": "SGD", "epochs": 2, "seed": 1, "devices": {"type": "cpu", "threads": 1}}
    return client.train(LAYERS, (X, Y), **{**named, **options})


def test_a_job_runs_in_this_process_and_this_thread_and_is_over_when_it_is_submitted(
    here: gh.Client,
):
    seen: set[tuple[int, int]] = set()

    def look(module: torch.nn.Module, *_: Any) -> None:
        seen.add((os.getpid(), threading.get_ident()))

    hook = register_module_forward_hook(look)
    try:
        job = train(here)
    finally:
        hook.remove()
    assert seen == {(os.getpid(), threading.get_ident())}
    assert job.refresh().state == "succeeded"


def test_its_numbers_are_those_of_the_service_bit_for_bit(here: gh.Client, client: gh.Client):
    probes = [{"layers": ["*"], "kinds": ["output"], "every": 3, "want": ["stats", "full"]}]
    jobs = [train(one, validation=0.2, probes=probes).wait(timeout=200) for one in (here, client)]
    mine, theirs = (list(job.metrics("loss")) for job in jobs)
    assert mine == theirs
    outputs = [job.layers["scores"].output(step=3) for job in jobs]
    assert outputs[0].tobytes() == outputs[1].tobytes()
    weights = [job.weights()["scores.weight"].tobytes() for job in jobs]
    assert weights[0] == weights[1]


def test_everything_else_of_the_client_works_there_too(here: gh.Client):
    job = train(here)
    seqs = [event.seq for event in job.stream()]
    assert seqs == list(range(1, len(seqs) + 1))
    assert here.infer(job, X[:3])["scores"].shape == (3, 2)
    assert job.fork({"stop": {"epochs": 3}}).wait(timeout=60).parent == job.id
    assert job.id in {one.id for one in here.jobs.list(state="succeeded")}
    with pytest.raises(gh.ConflictError):
        job.pause()
    with pytest.raises(gh.UnprocessableEntityError, match="optimizer"):
        train(here, optimizer="Nothing")


def test_a_job_that_fails_says_why(here: gh.Client):
    guards = {"nonfinite": {"check": ["loss"], "action": "fail"}}
    job = here.train(
        LAYERS,
        (X, X[:, :2]),  # squares of what grows by 1e30 in each step are soon infinite
        optimizer={"type": "SGD", "args": {"lr": 1e30}},
        guards=guards,
        steps=5,
    )
    with pytest.raises(gh.JobFailed):
        job.wait(timeout=60)
    assert job.explain().code == "non_finite"


def test_a_job_that_never_ends_is_refused(here: gh.Client):
    here.models.publish("served", train(here))
    with pytest.raises(gh.JobFailed, match="A serve job never ends"):
        here.serve("served").wait()


def test_torch_is_left_as_it_was(here: gh.Client):
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    train(here, deterministic=True)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()


def test_its_home_goes_with_the_client():
    with gh.Client("inproc://") as client:
        home: Path = client._transport._http._home  # pyright: ignore
        assert (home / "glasshouse.db").exists()
    assert not home.exists()


def test_a_user_module_with_the_name_of_a_package_is_named(tmp_path: Path):
    (tmp_path / "models.py").write_text("")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import glasshouse as gh\n"
        "try: gh.Client('inproc://')\n"
        "except gh.APIConnectionError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"{tmp_path}/models.py shadows its package 'models': rename yours" in done.stdout


def test_the_async_client_says_that_it_has_no_inproc_mode():
    with pytest.raises(gh.APIConnectionError, match=r"use gh\.Client"):
        gh.AsyncClient("inproc://")
