"""The harness of the worker's tests: a service without its API."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import select

from glasshouse import jsonio
from glasshouse.ids import new_id
from models.database import Database
from models.fleet import workers
from models.fleet.notifier import DISPATCH_QUEUE
from models.jobs import attempts, jobs
from models.migrate import migrate
from models.observations import events
from models.observations.events import LoggedEvent
from models.settings import Settings
from models.state import ENDED
from models.storage import datasets
from models.storage.artifacts import LocalArtifacts
from models.tables import Attempt, Device, Job
from tests.waiting import until
from worker.app import make_app

SHORT = {
    "HEARTBEAT_S": "0.5",
    "LEASE_S": "10",
    "SWEEP_S": "0.5",
    "GRACE_S": "5",
    "KILL_S": "2",
    "RETRY_S": "0.2",
}


def train_spec(dataset: str, **changes: Any) -> dict[str, Any]:
    """A small network, as the planner resolves it."""
    spec: dict[str, Any] = {
        "kind": "train",
        "seed": 1,
        "network": {
            "type": "graph",
            "layers": [
                {
                    "name": "fc1",
                    "type": "Linear",
                    "args": {"in_features": 4, "out_features": 8},
                    "inputs": ["x"],
                },
                {"name": "act", "type": "ReLU", "args": {}, "inputs": ["fc1"]},
                {
                    "name": "fc2",
                    "type": "Linear",
                    "args": {"in_features": 8, "out_features": 2},
                    "inputs": ["act"],
                },
            ],
            "outputs": ["fc2"],
        },
        "loss": {"type": "CrossEntropyLoss", "args": {}, "inputs": ["fc2", "y"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
        "data": {
            "train": {"dataset": dataset, "split": "train"},
            "fields": {"x": {"type": "dense", "shape": [4]}, "y": {"type": "integer", "dim": 2}},
            "batch_size": 16,
        },
        "stop": {"steps": 20},
        "devices": {"type": "cpu", "threads": 1},
    }
    return spec | changes


def endless(dataset: str, **changes: Any) -> dict[str, Any]:
    """A job that runs until it is stopped.

    A step takes some milliseconds, so that what it says is stored as fast as it says it, on a
    busy machine too.
    """
    spec = train_spec(dataset, stop={"steps": 1_000_000_000}, **changes)
    layers = spec["network"]["layers"]
    layers[0]["args"]["out_features"] = layers[2]["args"]["in_features"] = 1024
    wide = {"name": "wide", "type": "Linear", "args": {"in_features": 1024, "out_features": 1024}}
    layers.insert(2, wide | {"inputs": ["act"]})
    layers[3]["inputs"] = ["wide"]
    return spec


class Harness:
    """Settings, database and artifacts of one service, and the worker processes of a test."""

    def __init__(self, database_url: str, redis_url: str, home: Path) -> None:
        self.variables = {
            "HOME": str(home),
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
            "CPU_CORES": "2",
            **SHORT,
        }
        self.home = home
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.settings = Settings(
            home=home, database_url=database_url, redis_url=redis_url, worker_name="tests"
        )
        self.database = Database(database_url)
        migrate(self.database, lock_file=home / "migrate.lock")
        self.artifacts = LocalArtifacts(self.settings.artifacts)
        self.app = make_app(self.settings)

    def start_worker(
        self, name: str = "w1", *, wait: bool = True, misbehaving: bool = False, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a worker. ``misbehaving``: its ranks do what the job's labels say."""
        more = {f"GLASSHOUSE_{key}": value for key, value in (self.variables | variables).items()}
        module = "tests.integration.worker.misbehaving_worker" if misbehaving else "worker"
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--name", name],
                env=os.environ | more,
                stdout=log,
                stderr=log,
            )
        self.workers[name] = process
        if wait:
            until(lambda: self.worker_ready(name, process), 120)
        return process

    def start_workers(self, *names: str) -> None:
        """Start several at once, and wait for all of them."""
        started = {name: self.start_worker(name, wait=False) for name in names}
        for name, process in started.items():
            until(lambda name=name, process=process: self.worker_ready(name, process), 120)

    def wait_ready(self, name: str) -> None:
        """Wait until a worker works that was started without waiting."""
        until(lambda: self.worker_ready(name, self.workers[name]), 120)

    def worker_ready(self, name: str, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, self.log(name)
        return f'"worker_ready"' in self.log(name)  # noqa: F541

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text()

    def logged(self, name: str, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log(name).splitlines() if line[:1] == "{"]
        return [line for line in lines if line.get("event") == event]

    def dataset(self, rows: int = 64) -> str:
        """A ready dataset of two separable classes."""
        made = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)
        arrays = {"x": made, "y": (made.sum(axis=1) > 0).astype(np.int64)}
        dataset_id = new_id("ds")
        directory = self.home / dataset_id
        (directory / "train").mkdir(parents=True)
        columns: list[dict[str, Any]] = []
        for number, (name, array) in enumerate(arrays.items()):
            np.save(directory / "train" / f"{number}.npy", array)
            column = {"name": name, "dtype": str(array.dtype), "shape": list(array.shape[1:])}
            columns.append(column | {"file": f"{number}.npy"})
        meta = {"columns": columns, "splits": {"train": rows}}
        (directory / "meta.json").write_text(jsonio.dumps(meta))
        key = f"datasets/{dataset_id}/0"
        self.artifacts.put(key, directory)
        made_of = {"owner": "ada", "name": "small", "format": "npz", "size_bytes": 1}
        with self.database.write() as tx:  # at once: the worker must not find it unread
            datasets.add(tx, **made_of, sha256=None, dataset_id=dataset_id)
            unread = datasets.Reading(dataset_id, "npz", None, None, 0)
            datasets.read(tx, unread, columns=columns, splits={"train": rows}, key=key)
        return dataset_id

    def submit(
        self, spec: dict[str, Any], *, ring: bool = True, plan: dict[str, Any] | None = None
    ) -> str:
        with self.database.write() as tx:
            job = jobs.add(tx, owner="ada", spec=spec, resolved=spec, plan=plan or {})
        if ring:
            self.ring()
        return job.id

    def ring(self) -> None:
        self.app.send_task("glasshouse.dispatch", queue=DISPATCH_QUEUE, expires=30, retry=False)

    def job(self, job_id: str) -> Job:
        with self.database.read() as tx:
            return jobs.get(tx, job_id, None)

    def wait(self, job_id: str, *states: str, timeout_s: float = 90.0) -> Job:
        """Wait for a state; without one, for the end."""
        wanted = set(states) or ENDED

        def arrived() -> Job | None:
            job = self.job(job_id)
            reached = job.state in wanted
            assert reached or job.state not in ENDED, (job.state, job.error, self.logs())
            return job if reached else None

        return until(arrived, timeout_s)

    def wait_step(self, job_id: str, step: int = 1) -> Job:
        def reached() -> Job | None:
            job = self.job(job_id)
            assert job.state not in ENDED, (job.error, self.logs())
            trains = job.state not in ("queued", "starting")  # else it is what a lost attempt did
            return job if trains and job.progress and job.progress["step"] >= step else None

        return until(reached)

    def wait_more(self, job_id: str, steps: int = 20) -> None:
        """Wait until a job that trains has made so many steps more."""
        progress = self.wait_step(job_id).progress or {}
        self.wait_step(job_id, progress["step"] + steps)

    def wait_runs_again(self, job_id: str, attempt: int = 2) -> None:
        """Wait until a later attempt trains, then cancel it."""
        until(lambda: self.job(job_id).attempt == attempt)
        self.wait_step(job_id)
        self.cancel(job_id)
        assert self.wait(job_id).state == "cancelled", self.logs()

    def logs(self) -> str:
        return "\n".join(self.log(name)[-5000:] for name in self.workers)

    def database_rows(self) -> str:
        """The newest jobs and all devices, for the report of a failed test."""
        with self.database.read() as tx:
            newest = tx.scalars(select(Job).order_by(Job.created_at.desc()).limit(5))
            jobs_ = [f"{job.id} {job.state} {job.attempt} {job.progress}" for job in newest]
        devices = [f"{one.id} {one.job} {one.reason or 'healthy'}" for one in self.devices()]
        return "\n".join(jobs_ + devices)

    def cancel(self, job_id: str, *, force: bool = False) -> None:
        with self.database.write() as tx:
            jobs.request_cancel(tx, jobs.get(tx, job_id, None), by="ada", force=force)

    def events(self, job_id: str) -> list[LoggedEvent]:
        with self.database.read() as tx:
            return events.after(tx, job_id, 0, limit=100_000)

    def payloads(self, job_id: str, kind: str) -> list[dict[str, Any]]:
        return [jsonio.loads(event.payload) for event in self.events(job_id) if event.type == kind]

    def steps(self, job_id: str) -> list[int]:
        told = self.payloads(job_id, "metrics")
        return [event["step"] for event in told if "loss" in event["values"]]

    def attempts(self, job_id: str) -> list[Attempt]:
        with self.database.read() as tx:
            return attempts.of_job(tx, job_id)

    def devices(self) -> list[Device]:
        with self.database.read() as tx:
            return [row for row, _ in workers.all_devices(tx, lease_ms=3000)]

    def rank_pid(self, job_id: str, worker: str = "w1", rank: int = 0) -> int:
        def started() -> int | None:
            lines = self.logged(worker, "rank_started")[::-1]
            mine = (line for line in lines if (line["job"], line["rank"]) == (job_id, rank))
            return next((line["pid"] for line in mine), None)

        return until(started)

    def settle(self) -> None:
        """See to it that the next test finds nothing of this one, and a worker that runs."""
        with self.database.read() as tx:
            left = list(tx.scalars(select(Job).where(Job.state.not_in(ENDED))))
        for job in left:
            self.cancel(job.id, force=True)
        for job in left:
            self.wait(job.id)
        until(lambda: all(device.job is None and device.healthy for device in self.devices()))
        assert all(worker.poll() is None for worker in self.workers.values()), self.logs()
        with self.database.read() as tx:
            states = [state for _, state in workers.all_devices(tx, lease_ms=60_000)]
        assert set(states) == {"active"}, f"a shared worker is draining: {states}"

    def close(self) -> None:
        for process in self.workers.values():
            process.kill()  # a second faster than to ask; what they started goes with them
            process.wait()
        self.app.close()
        self.database.close()
