"""What the shell is offered when the tab key is pressed."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from glasshouse.cli import main
from glasshouse.cli.arguments import completion
from tests.stub_api import Serve, job, listing

Complete = Callable[..., list[str]]


@pytest.fixture
def complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Complete:
    """The completions that bash gets for the last of these words."""
    monkeypatch.setenv("GLASSHOUSE_HOME", str(tmp_path))
    monkeypatch.setenv("GLASSHOUSE_API_KEY", "gh_test")
    monkeypatch.setattr("sys.argv", ["glasshouse"])
    monkeypatch.setenv("_GLASSHOUSE_COMPLETE", "complete_bash")

    def complete(*words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", " ".join(["glasshouse", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        main([])
        told = capsys.readouterr()
        assert told.err == ""
        return told.out.split()

    return complete


def listed(*entries: dict[str, object]) -> Callable[[Request], Response]:
    return lambda _: listing(*entries)


def test_ids_and_names_are_completed_by_prefix(
    complete: Complete, serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    routes = [
        Route("/api/v1/jobs", listed(job(id="job_1a"), job(id="job_2b"))),
        Route("/api/v1/datasets", listed({"id": "ds_1", "state": "ready", "name": None})),
        Route("/api/v1/checkpoints", listed({"id": "ckpt_1", "state": "complete"})),
        Route("/api/v1/jobs/job_1a/metrics", listed({"name": "loss"}, {"name": "lr"})),
        Route("/api/v1/jobs/job_1a/layers", listed({"name": "conv1", "type": "Conv2d"})),
    ]
    monkeypatch.setenv("GLASSHOUSE_URL", serve(routes))
    assert complete("watch", "") == ["job_1a", "job_2b"]
    assert complete("set", "job_2") == ["job_2b"]
    assert complete("datasets", "show", "d") == ["ds_1"]
    assert complete("checkpoints", "delete", "") == ["ckpt_1"]
    assert complete("checkpoints", "list", "--job", "") == ["job_1a", "job_2b"]
    assert complete("infer", "ck") == ["ckpt_1"]
    assert complete("infer", "jo") == ["job_1a", "job_2b"]
    assert complete("metrics", "job_1a", "lo") == ["loss"]
    assert complete("layers", "job_1a", "") == ["conv1"]
    assert complete("wat") == ["watch"]
    assert complete("datasets", "upload", "--format", "idx") == ["idx", "idx.gz", "idx.zip"]
    assert complete("datasets", "upload", "--format", "digits") == []


def test_a_service_that_is_unavailable_or_refuses_offers_nothing_and_says_nothing(
    complete: Complete, serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    assert complete("watch", "") == []
    monkeypatch.setenv("GLASSHOUSE_URL", serve([]))
    assert complete("watch", "") == []


def test_a_service_that_does_not_answer_is_not_waited_for(
    complete: Complete, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(completion, "WITHIN_S", 0.02)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("GLASSHOUSE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert complete("watch", "") == []
