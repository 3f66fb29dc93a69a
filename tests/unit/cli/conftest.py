from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.routing import Route

from glasshouse.cli import main
from tests.stub_api import Serve, connect, serve, server

__all__ = ["connect", "serve", "server"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Run:
    """Runs a command against these routes; returns exit code, stdout, stderr."""

    def run(*arguments: str, routes: list[Route]) -> tuple[int, str, str]:
        monkeypatch.setenv("GLASSHOUSE_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("GLASSHOUSE_URL", serve(routes))
        monkeypatch.setenv("GLASSHOUSE_API_KEY", "gh_test")
        monkeypatch.setattr("glasshouse.client.connection.requests.FIRST_DELAY_S", 0.0)
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return run
