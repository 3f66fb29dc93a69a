"""X17: what a rank can see and reach of the machine that it runs on."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.worker.harness import Harness, endless
from tests.waiting import until
from worker.processes.fork_server import PASSED, environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "S3cret-of-a-cloud",
    "GLASSHOUSE_API_KEY": "S3cret-of-the-service",
    "DATABASE_URL": "postgresql://S3cret-of-sql@h/d",
    "SSH_AUTH_SOCK": "/run/S3cret-agent",
    "PYTHONSTARTUP": "/srv/S3cret.py",
    "LD_PRELOAD": "",
}


def limits_of(process: Path) -> dict[str, str]:
    lines = (process / "limits").read_text().splitlines()[1:]
    return {line[:26].strip(): line[26:].split()[1] for line in lines}


def files_of(process: Path) -> list[str]:
    """What a process has open; it may close some meanwhile."""
    found: list[str] = []
    for entry in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(entry))
    return found


def kept_in(directory: Path) -> Iterator[Path]:
    """The folders of a job that runs, and its logs; `os.walk` passes over what has gone."""
    for place, _, names in os.walk(directory):
        yield Path(place)
        if Path(place).name == "logs":
            yield from (Path(place, name) for name in names)


def test_a_rank_sees_no_secret_and_reaches_neither_database_nor_broker(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    harness.start_worker()
    job = harness.submit(endless(harness.dataset()))
    until(lambda: harness.job(job).state == "running")
    process = Path("/proc") / str(harness.rank_pid(job))
    shown = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
    assert b"S3cret" not in shown
    assert b"GLASSHOUSE_DATABASE_URL" not in shown
    assert b"GLASSHOUSE_REDIS_URL" not in shown
    opened = files_of(process)
    assert not [name for name in opened if "test.db" in name or "v.sock" in name]
    sockets = [name for name in opened if name.startswith("socket:")]
    assert not sockets, "a way to the worker, the broker or the database was left open"

    limits = limits_of(process)
    assert limits["Max core file size"] == "0"
    assert int(limits["Max open files"]) <= 4096
    status = (process / "status").read_text()
    assert "NoNewPrivs:\t1" in status
    directory = harness.settings.work / "w1" / job / "1"
    assert (harness.settings.work / "w1").stat().st_mode & 0o077 == 0
    for path in kept_in(directory):
        with suppress(FileNotFoundError):  # the rank that made it has taken it away again
            assert path.stat().st_mode & 0o077 == 0, path
    harness.cancel(job)
    harness.wait(job)


def test_what_a_rank_starts_with_is_a_list_of_names(monkeypatch: pytest.MonkeyPatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    found = environment({})
    assert not set(SECRETS) & set(found)
    assert not [value for value in found.values() if "S3cret" in value]
    assert not [name for name in PASSED if "KEY" in name or "SECRET" in name or "URL" in name]
