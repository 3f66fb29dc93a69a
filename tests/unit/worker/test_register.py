import json
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from glasshouse import processes
from glasshouse.processes import Identity
from worker.processes.rank import RankRegistry


@pytest.fixture
def sleeper() -> Generator[subprocess.Popen[bytes]]:
    """A process that leads its own session, with a child in it."""
    program = "import subprocess; subprocess.Popen(['sleep', '1000']); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=-1, stdout=-1, start_new_session=True
    ) as it:
        assert it.stdout is not None
        it.stdout.readline()
        yield it
        found = processes.identify(it.pid)
        it.kill()
        if found is not None:
            it.wait()
            assert processes.kill_orphans(found)


def identity(process: subprocess.Popen[bytes]) -> Identity:
    found = processes.identify(process.pid)
    assert found is not None
    return found


def test_the_next_life_kills_what_outlived_this_one_with_its_children(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
):
    found = identity(sleeper)
    assert len(processes.session_of(found)) == 2
    RankRegistry(tmp_path).note(found, ["cpu:0"])
    (tmp_path / "job_1").mkdir()
    assert RankRegistry(tmp_path).clear() == 1
    assert sleeper.wait(60) == -signal.SIGKILL
    assert processes.session_of(found) == []
    assert not list((tmp_path / "ranks").iterdir())
    assert not (tmp_path / "job_1").exists()


@pytest.mark.parametrize("of", ["this boot", "another boot"])
def test_a_reused_pid_and_another_boot_are_ignored(
    of: str, tmp_path: Path, sleeper: subprocess.Popen[bytes]
):
    register = RankRegistry(tmp_path)
    register.note(identity(sleeper), ["cpu:0"])
    (path,) = (tmp_path / "ranks").iterdir()
    entry = json.loads(path.read_text())
    boot, _, ticks = entry["started"].partition(":")
    entry["started"] = f"{boot}:1" if of == "this boot" else f"another:{ticks}"
    path.write_text(json.dumps(entry))
    assert register.clear() == 0
    assert sleeper.poll() is None
    assert not list((tmp_path / "ranks").iterdir())


def test_invalid_entries_of_the_register_are_removed(tmp_path: Path):
    register = RankRegistry(tmp_path)
    for number, text in enumerate(["", "{", "[]", '{"pid": "x"}', "null"]):
        (tmp_path / "ranks" / str(number)).write_text(text)
    assert register.clear() == 0
    assert register.withheld() == {}
    assert not list((tmp_path / "ranks").iterdir())


def test_devices_of_a_rank_that_cannot_be_killed_are_withheld_until_it_is_gone(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
):
    register = RankRegistry(tmp_path)
    found = identity(sleeper)
    register.note(found, ["cpu:0", "cuda:1"])
    assert register.withheld() == {}  # an ordinary rank
    register.note(found, ["cpu:0", "cuda:1"], is_stuck=True)
    held = RankRegistry(tmp_path).withheld()  # also after a restart of the worker
    assert set(held) == {"cpu:0", "cuda:1"}
    assert str(found.pid) in held["cpu:0"]
    sleeper.kill()
    sleeper.wait()
    assert set(register.withheld()) == {"cpu:0", "cuda:1"}  # its child is still there
    assert processes.kill_orphans(found)
    assert register.withheld() == {}
    assert not list((tmp_path / "ranks").iterdir())
