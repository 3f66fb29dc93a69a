"""Starts a whole local service as a user does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import glasshouse as gh
from glasshouse.cli.service.processes import ROOT
from glasshouse.processes import Identity
from tests import leaks
from tests.waiting import until

UP_S = 180.0


@dataclass
class RunningStack:
    """A service that ``glasshouse up`` runs in the foreground."""

    home: Path
    process: subprocess.Popen[str]

    @property
    def runtime(self) -> dict[str, Any]:
        return json.loads((self.home / "runtime.json").read_text())

    @property
    def children(self) -> dict[str, Identity]:
        written = json.loads((self.home / "run" / "stack.json").read_text())
        return {
            child["name"]: Identity(child["pid"], child["started"]) for child in written["children"]
        }

    def client(self) -> gh.Client:
        return gh.Client(self.runtime["url"], self.runtime["api_key"])

    def log(self) -> str:
        return (self.home / "up.log").read_text()


def command(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``glasshouse`` for a home."""
    return subprocess.run(
        [sys.executable, "-m", "glasshouse.cli", *arguments],
        cwd=ROOT,
        env=environ(home),
        capture_output=True,
        text=True,
        timeout=UP_S,
        check=False,
    )


def environ(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GLASSHOUSE_")}
    return {**kept, "GLASSHOUSE_HOME": str(home)}


def up(home: Path) -> RunningStack:
    """Start a service and wait for its banner."""
    home.mkdir(exist_ok=True, mode=0o700)
    with (home / "up.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "glasshouse.cli", "up", "--port", "0"],
            cwd=ROOT,
            env=environ(home),
            stdout=log,
            stderr=log,
            text=True,
        )
    running = RunningStack(home, process)
    until(lambda: "/docs" in running.log() or process.poll() is not None)
    assert process.poll() is None, running.log()
    return running


def end(running: RunningStack) -> None:
    """Stop a service, whatever its state is."""
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGTERM)
        try:
            running.process.wait(60)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()
    command(running.home, "down")


@pytest.fixture(scope="module")
def home() -> Generator[Path]:
    """A home with a short path and a space in it."""
    folder = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))
    yield folder / "my home"
    leaks.check_home(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def running(home: Path) -> Generator[RunningStack]:
    """One service for the tests that do not change it."""
    started = up(home)
    yield started
    end(started)
