"""How the service ends, and what it leaves."""

import json
import signal
from pathlib import Path

from glasshouse import processes
from glasshouse.processes import Identity
from tests.integration.stack.conftest import RunningStack, command, end, up
from tests.waiting import until


def are_gone(children: dict[str, Identity]) -> bool:
    return not any(processes.alive(child) for child in children.values())


def test_a_killed_service_frees_all_and_comes_back_with_its_key(home: Path):
    running = up(home)
    try:
        children, key = running.children, running.runtime["api_key"]
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
        # the lifeline: API and worker notice by themselves
        for name in ("api", "worker"):
            until(lambda name=name: not processes.alive(children[name]))
            log = (home / "logs" / f"{name}.log").read_text()
            assert "Timeout (" not in log, log  # a graceful shutdown, not by `end_within`
        again = command(home, "up", "--port", "0", "--detach", "--json")
        assert again.returncode == 0, again.stderr
        assert are_gone(children)
        runtime = json.loads((home / "runtime.json").read_text())
        assert runtime["api_key"] == key
        assert json.loads(again.stdout) == {
            name: value for name, value in runtime.items() if name != "api_key"
        }
        children = RunningStack(home, running.process).children
        down = command(home, "down", "--json")
        assert json.loads(down.stdout) == {"stopped": True, "home": str(home)}
        assert are_gone(children)
        assert not (home / "run" / "valkey.sock").exists()
        assert not (home / "run" / "stack.json").exists()
        assert json.loads((home / "runtime.json").read_text())["pid"] is None
        assert json.loads(command(home, "down", "--json").stdout)["stopped"] is False
        assert command(home, "status").returncode == 8
    finally:
        end(running)


def test_ctrl_c_stops_everything_in_order(home: Path):
    running = up(home)
    try:
        children = running.children
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 0
        assert are_gone(children)
        assert "stopping" in running.log()
    finally:
        end(running)


def test_a_service_that_cannot_start_says_why_and_leaves_nothing(home: Path):
    home.mkdir(exist_ok=True, mode=0o700)
    (home / "glasshouse.db").unlink(missing_ok=True)
    (home / "glasshouse.db").mkdir()  # no database can be made here
    failed = command(home, "up", "--port", "0")
    (home / "glasshouse.db").rmdir()
    assert failed.returncode == 1
    assert "migrate.log" in failed.stderr
    assert not (home / "run" / "valkey.sock").exists()
