"""Make the data of a release: see the package."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
from sqlalchemy import create_engine

import glasshouse as gh
from tests.integration.stack import conftest, releases
from tests.integration.stack.conftest import RunningStack, end, up

ROWS = 40
MORE = {"GLASSHOUSE_OUTBOUND_ALLOW": "127.0.0.1", "GLASSHOUSE_CPU_CORES": "1"}
"""A receiver of webhooks that does not answer; and one core, so that a job waits for another."""
WAIT_S = 120.0


def spec(dataset: str, **changes: Any) -> dict[str, Any]:
    """A job with statistics, whole tensors and checkpoints."""
    return {
        "kind": "train",
        "name": "plants",
        "labels": {"team": "blue", "run": "7"},
        "seed": 3,
        "network": {"layers": [{"name": "fc", "type": "Linear", "args": {"out_features": 1}}]},
        "loss": {"type": "MSELoss", "inputs": ["fc", "y"]},
        "optimizer": {"type": "Adam", "args": {"lr": 0.01}},
        "data": {
            "train": {"dataset": dataset, "split": "all"},
            "fields": {
                "x": {"type": "dense", "columns": ["a", "b"]},
                "y": {"type": "dense", "columns": ["y"]},
            },
            "batch_size": 8,
        },
        "probes": [
            {"layers": ["fc"], "kinds": ["output", "param", "param_grad"], "every": 1},
            {"layers": ["fc"], "kinds": ["output"], "every": 5, "want": ["full"]},
        ],
        "checkpoint": {"every_steps": 10},
        "stop": {"steps": 30},
        "devices": {"type": "cpu", "threads": 1},
    } | changes


def table() -> bytes:
    lines = [f"{n},{n * n % 7},{n * 0.5 - 3}" for n in range(ROWS)]
    return ("a,b,y\n" + "\n".join(lines) + "\n").encode()


def fill(running: RunningStack) -> dict[str, Any]:
    """Have the service do its work; what its API says of it once it stands still."""
    with running.client() as client:
        hook = client.webhooks.create(
            "http://127.0.0.1:9/hook", ["job.succeeded"], {"team": "blue"}
        )
        reader = client.keys.create("reader", ["read"], key_owner(client))
        dataset = client.datasets.upload(table(), name="plants.csv", format="csv")
        job = client.jobs.create(spec(dataset.id)).wait(WAIT_S)
        long = spec(dataset.id, name="long", stop={"steps": 6_000}, probes=[])
        slow = [{"name": f"l{n}", "type": "Linear", "args": {"out_features": 8}} for n in range(6)]
        long["network"] = {"layers": [*slow, *long["network"]["layers"]]}
        long["checkpoint"] = {"every_steps": 500}
        running = client.jobs.create(long)
        waiting = client.jobs.create(spec(dataset.id, name="waits", priority=-5))
        deadline = time.monotonic() + WAIT_S
        while not list(running.checkpoints()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        paths = [
            f"/jobs/{job.id}",
            f"/jobs/{job.id}/events?limit=1000",
            f"/jobs/{job.id}/metrics",
            f"/jobs/{job.id}/metrics/query?name=loss",
            f"/jobs/{job.id}/stats?kind=param_grad&stat=mean,std",
            f"/jobs/{job.id}/captures",
            f"/jobs/{job.id}/checkpoints",
            f"/jobs/{job.id}/spec",
            f"/jobs/{job.id}/probes",
            "/jobs?label=team:blue&state=succeeded",
            f"/datasets/{dataset.id}",
            f"/datasets/{dataset.id}/rows?limit=3",
            f"/webhooks/{hook.id}",
            f"/webhooks/{hook.id}/deliveries",
            "/keys",
        ]
        answers = {path: ask(running.runtime, path) for path in paths}
        return {
            "answers": answers,
            "key": running.runtime["api_key"],
            "reader": reader.data["key"],
            "job": job.id,
            "running": running.id,
            "waiting": waiting.id,
            "hook": hook.id,
        }


def ask(runtime: dict[str, Any], path: str) -> Any:
    headers = {"Authorization": f"Bearer {runtime['api_key']}"}
    answer = httpx2.get(f"{runtime['url']}/api/v1{path}", headers=headers, timeout=60)
    assert answer.status_code == 200, (path, answer.text)
    return answer.json()


def key_owner(client: gh.Client) -> str:
    return client.keys.list()[0].data["owner"]


def main(file: Path) -> None:
    """Run the service, kill it, and write what is left."""
    environ = conftest.environ
    with tempfile.TemporaryDirectory(prefix="gh-", dir="/tmp") as directory:
        home = Path(directory) / "home"
        conftest.environ = lambda home: environ(home) | MORE
        running = up(home)
        try:
            said = fill(running)
            pids = [child.pid for child in running.children.values()]
            os.kill(running.process.pid, signal.SIGKILL)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            end(running)
        engine = create_engine(f"sqlite:///{home / 'glasshouse.db'}")
        with engine.connect() as connection:
            releases.write(file, connection, home / "artifacts", said)
        engine.dispose()
    print(json.dumps({"written": str(file), "bytes": file.stat().st_size}))  # noqa: T201


main(Path(sys.argv[1]).absolute())
