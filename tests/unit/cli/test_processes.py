"""Processes that are known by more than their number, and the stack's own files."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from glasshouse.cli.service.broker import (
    Binary,
    StackError,
    check_socket_path,
    configuration,
    inspect,
)
from glasshouse.cli.service.processes import Child
from glasshouse.cli.service.stack import (
    end_leftovers,
    free_port,
    is_locked,
    locked,
    make_home,
    running_stack,
    write_private,
)
from glasshouse.processes import identify


@pytest.fixture
def sleeper():
    """A process that does nothing, in a group of its own."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_home(tmp_path)
    return tmp_path


def test_leftover_processes_are_ended_and_others_are_not(
    home: Path, sleeper: subprocess.Popen[bytes]
):
    import json

    left = subprocess.Popen(["sleep", "60"], start_new_session=True)
    found = identify(left.pid)
    assert found is not None
    children = [
        {"name": "left", **asdict(found)},
        {"name": "stranger", "pid": sleeper.pid, "started": "another time"},
        {"name": "written by an earlier version", "pid": sleeper.pid, "birth": "another time"},
    ]
    stack = {"pid": sleeper.pid, "started": "another time"}
    text = json.dumps({"stack": stack, "children": children})
    write_private(home / "run" / "stack.json", text)
    assert running_stack(home) is None
    end_leftovers(home)
    assert left.wait(60) == -signal.SIGTERM
    assert sleeper.poll() is None


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_note_is_ignored(home: Path, text: str):
    (home / "run" / "stack.json").write_text(text)
    (home / "run" / "valkey.pid").write_text("not a number")
    end_leftovers(home)
    assert running_stack(home) is None


def test_a_child_that_ignores_the_request_is_killed_with_its_group(tmp_path: Path):
    code = "trap '' TERM; sleep 60 & echo $!; wait; wait"
    log = tmp_path / "log"
    child = Child("stubborn", ["/bin/sh", "-c", code], log=log, environ=os.environ, grace_s=0.2)
    child.start()
    deadline = time.monotonic() + 60
    while not child.log_tail() and time.monotonic() < deadline:
        time.sleep(0.01)
    grandchild = int(child.log_tail())
    child.stop()
    assert child.ended() == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while identify(grandchild) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert identify(grandchild) is None


def test_one_home_has_one_stack(home: Path):
    assert not is_locked(home)
    with locked(home):
        assert is_locked(home)
        with pytest.raises(StackError, match="already running"), locked(home):
            pass
    assert not is_locked(home)


def test_the_lock_is_free_when_its_holder_is_killed(home: Path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from glasshouse.cli.service.stack import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(home)], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert is_locked(home)
        holder.kill()
    assert not is_locked(home)


def test_what_is_written_is_for_its_owner_only(home: Path):
    path = home / "runtime.json"
    write_private(path, "one")
    write_private(path, "two")
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((home / "run").stat().st_mode) == 0o700
    assert [file.name for file in home.glob(".*")] == []


def test_a_port_in_use_is_reported(home: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(StackError, match="--port"):
            free_port(other.getsockname()[1])
    assert free_port(0) > 0


def test_a_path_too_long_for_a_socket_says_what_to_do():
    check_socket_path(Path("/" + "x" * 100))
    with pytest.raises(StackError, match="shorter --home"):
        check_socket_path(Path("/" + "x" * 107))


def test_the_broker_takes_no_tcp_and_forgets_nothing():
    text = configuration(Path('/a "strange" \\ home'))
    assert 'unixsocket "/a \\"strange\\" \\\\ home/run/valkey.sock"\n' in text
    for line in ("port 0", "unixsocketperm 700", "appendonly yes", "maxmemory-policy noeviction"):
        assert line + "\n" in text
    with pytest.raises(StackError, match="control characters"):
        configuration(Path("/a\nport 1"))


@pytest.mark.parametrize(
    ("told", "product", "new_enough"),
    [
        ("Valkey server v=9.1.2 sha=0", "valkey", True),
        ("Valkey server v=8.0.0 sha=0", "valkey", True),
        ("Valkey server v=7.2.9 sha=0", "valkey", False),
        ("Redis server v=7.4.6 sha=0", "redis", True),
        ("Redis server v=7.4.5 sha=0", "redis", False),
        ("Redis server v=6.2.14 sha=0", "redis", False),
        ("Redis server v=8.10.0 sha=0", "redis", True),
    ],
)
def test_an_old_broker_is_not_used(tmp_path: Path, told: str, product: str, new_enough: bool):
    program = tmp_path / "server"
    program.write_text(f"#!/bin/sh\necho '{told}'\n")
    program.chmod(0o700)
    found = inspect(program)
    assert isinstance(found, Binary)
    assert (found.product, found.is_new_enough) == (product, new_enough)


def test_a_binary_that_is_not_a_broker_is_skipped(tmp_path: Path):
    assert inspect(Path("/bin/sh")) is None
    assert inspect(tmp_path / "nothing") is None
