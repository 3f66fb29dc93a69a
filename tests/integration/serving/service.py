"""A whole service that serves models: an API, a worker whose ranks may misbehave, real sockets."""

import asyncio
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from sqlalchemy import select

from glasshouse import jsonio
from glasshouse.ids import new_id
from glasshouse.spec import parse_job
from models import published_models
from models.jobs import jobs, replicas
from models.jobs.jobs import Filter
from models.tables import Checkpoint, Job, Replica
from tests.integration.worker.harness import Harness, train_spec
from tests.running import Api
from tests.waiting import until

ROW = [0.1, -0.2, 0.3, 0.4]


@dataclass(frozen=True)
class Answer:
    """What the API answered; status 0: it closed the connection."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def version(self) -> int:
        assert self.status == 200, self.body
        return int(self.document["version"])


class Service:
    """A service with a worker, and models of the owner ``ada``."""

    def __init__(self, harness: Harness, api: Api) -> None:
        self.harness, self.api = harness, api
        self.key = api.key("ada", "submit")
        self._checkpoints: dict[int, str] = {}

    def checkpoint(self, seed: int = 1) -> str:
        """The id of a trained checkpoint; each seed has its own weights."""
        if seed not in self._checkpoints:
            spec = train_spec(self.harness.dataset(), seed=seed, stop={"steps": 2})
            job = self.harness.submit(spec)
            assert self.harness.wait(job).state == "succeeded", self.harness.logs()
            with self.harness.database.read() as tx:
                saved = tx.scalars(select(Checkpoint).where(Checkpoint.job == job)).all()
            self._checkpoints[seed] = saved[-1].id
        return self._checkpoints[seed]

    def damaged_checkpoint(self) -> str:
        """A checkpoint whose weights were overwritten on disk."""
        with self.harness.database.write() as tx:
            found = tx.get_one(Checkpoint, self.checkpoint())
            values = {one.name: getattr(found, one.name) for one in Checkpoint.__table__.columns}
            new = new_id("ckpt")
            key = f"checkpoints/{new}"
            target = self.harness.artifacts.local(found.key).parent / new
            shutil.copytree(self.harness.artifacts.local(found.key), target)
            (target / "model.safetensors").write_bytes(b"\0" * 64)
            self.harness.artifacts.put(key, target)
            tx.add(Checkpoint(**(values | {"id": new, "key": key})))
        return new

    def publish(self, name: str, checkpoint: str, *aliases: str) -> int:
        """Publish the next version of a model; return its number."""
        with self.harness.database.write() as tx:
            made = published_models.publish(
                tx, owner="ada", name=name, checkpoint_id=checkpoint, aliases=aliases
            )
            return made.version.number

    def move(self, name: str, **aliases: int) -> None:
        """Let aliases of a model name other versions."""
        with self.harness.database.write() as tx:
            model = published_models.get(tx, name, owner="ada", sees="ada", lock=True)
            published_models.set_aliases(tx, model, aliases)

    def serve(self, *models: Any, wait: bool = True, **changes: Any) -> str:
        """Submit a serve job; return its id once it listens."""
        spec: dict[str, Any] = {"kind": "serve", "models": list(models), **changes}
        spec.setdefault("devices", {"type": "cpu", "threads": 1})
        resolved = parse_job(jsonio.dumps(spec)).model_dump(mode="json")
        with self.harness.database.write() as tx:
            job = jobs.add(tx, owner="ada", spec=spec, resolved=resolved, plan={})
        self.harness.ring()
        if wait:
            until(lambda: self.listens(job.id), what="listening")
        return job.id

    def listens(self, job: str) -> bool:
        """Whether a replica listens for the current attempt."""
        with self.harness.database.read() as tx:
            return any(one.job == job and one.attempt for one in replicas.routes(tx))

    def replica(self, job: str) -> Replica:
        """Where its replica listens, and its counts."""
        with self.harness.database.read() as tx:
            found = tx.get(Replica, job)
        assert found is not None
        return found

    def wait_answered(self, job: str, num: int) -> int:
        """Wait until a replica has computed so many requests, and not one more.

        Return how many it has received.
        """

        def look() -> int | None:
            counts = self.replica(job).traffic
            answered = sum(counts.get("answered", {}).values())
            assert answered <= num, counts
            return counts["requests"] if answered == num else None

        return until(look, what=f"{num} answers")

    def children(self, job: str) -> list[Job]:
        """The further replicas of a serve job, oldest first."""
        with self.harness.database.read() as tx:
            return jobs.find(tx, Filter(parent=job), after=None, limit=100, order="asc")

    def end(self, *job_ids: str) -> None:
        """Cancel jobs and wait for their ends."""
        for job in job_ids:
            self.harness.cancel(job, force=True)
        for job in job_ids:
            self.harness.wait(job)

    def predict(self, name: str, rows: int = 1, **query: Any) -> Answer:
        """Send one request."""
        return asyncio.run(self.ask(name, rows, **query))

    async def ask(self, name: str, rows: int = 1, **query: Any) -> Answer:
        """Send one request on a connection of its own."""
        reader, writer = await self.send(name, rows, **query)
        try:
            return await read_answer(reader)
        finally:
            writer.close()

    async def send(
        self, name: str, rows: int = 1, **query: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect and send one request; return the connection."""
        reader, writer = await self.connect()
        writer.write(self.request(name, rows, **query))
        return reader, writer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the API."""
        where = urlsplit(self.api.url)
        return await asyncio.open_connection(where.hostname, where.port)

    def request(self, name: str, rows: int = 1, **query: Any) -> bytes:
        """The bytes of one request."""
        body = json.dumps({"inputs": {"x": [ROW] * rows}}).encode()
        host = urlsplit(self.api.url).netloc
        lines = [
            f"POST /api/v1/models/{name}/predict?{urlencode(query)} HTTP/1.1",
            f"Host: {host}",
            f"Authorization: Bearer {self.key}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """Read one response."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(": ") for line in head[1:] if line)
        headers = {name.lower(): value for name, _, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return Answer(0, {}, b"")
    return Answer(int(head[0].split()[1]), headers, body)


def statuses(answers: Iterable[Answer]) -> dict[int, int]:
    """Count answers by status."""
    found: dict[int, int] = {}
    for one in answers:
        found[one.status] = found.get(one.status, 0) + 1
    return found


def rss_bytes(pid: int) -> int:
    """The memory of a process that is resident."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096
