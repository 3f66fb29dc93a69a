"""Compares three servers of the same trained networks, in turns, under the same load.

- ``glasshouse``: ``POST /api/v1/models/{name}/predict`` of an embedded service with a serve job,
  authenticated, with its defaults. One setting differs, as it does for any client that sends more
  than 1,000 requests per second: ``GLASSHOUSE_QUOTA_REQUESTS_PER_S``.
- ``bare``: FastAPI and torch in one uvicorn worker (``bench.service.bare_server``). Its endpoint is
  written in three ways; the fastest for each load is compared.
- ``litserve``: LitServe with dynamic batching (``bench.service.litserve_server``); the best of
  several settings for each load is compared. It is not a dependency of the project. It needs an
  environment of its own, and is skipped without ``--litserve-python``:

      python -m venv /tmp/litserve
      /tmp/litserve/bin/pip install -c constraints.txt litserve==0.2.19 torch numpy safetensors
      python -m bench.service.serving --litserve-python /tmp/litserve/bin/python

Each side computes with the same number of torch threads, and gets the same bodies over as many
connections from a process of its own (``bench.service.load``), which compares every answer with
torch by hand. Turns of some seconds alternate; a server that is not asked is stopped by SIGSTOP,
except the service, which is idle. Prints a JSON line for each network and number of clients, with
medians over the rounds, and medians of the ratios within a round.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
import psutil
import torch
from safetensors.numpy import save_file

from bench.service import served_networks
from bench.service.bare_server import ENDPOINTS
from bench.service.load import Load
from glasshouse import Client

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "glasshouse.cli"]
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
SIDES = ("glasshouse", "bare", "litserve")
CLIENTS = (1, 8, 64)
NUM_REQUESTS = 256
"""Different rows that are sent."""
START_S = 120.0
LITSERVE = ((1, 0.0), (16, 0.005), (32, 0.005), (64, 0.01))
"""``max_batch_size`` and ``batch_timeout`` of LitServe; 1: without batching."""
SUMS = ("requests", "errors", "wrong")


@dataclass(frozen=True)
class Workload:
    """A network, and the rows that it is asked for."""

    preset: dict[str, Any]
    field: str
    described: dict[str, Any]
    """The field as a spec describes it."""

    def rows(self, number: int, seed: int) -> list[Any]:
        """Return rows, as nested lists."""
        random = np.random.default_rng(seed)
        if self.field == "text":
            lengths = random.integers(4, 33, number)  # as sentences have
            return [random.integers(0, self.described["dim"], n).tolist() for n in lengths]
        drawn = random.integers(1, 256, (number, 1, 28, 28)) / 255
        ink = random.random(drawn.shape) < 0.2  # as much as digits have
        return np.where(ink, drawn.round(4), 0).tolist()


WORKLOADS = {
    "mnist_cnn": Workload({}, "image", {"type": "dense", "shape": [1, 28, 28]}),
    "transformer_classifier": Workload(
        {
            "max_length": served_networks.MAX_LENGTH,
            "num_layers": served_networks.NUM_BLOCKS,
            "num_heads": served_networks.NUM_HEADS,
            "width": served_networks.WIDTH,
        },
        "text",
        {"type": "integer_sequence", "dim": served_networks.NUM_TOKENS},
    ),
}


@dataclass
class Side:
    """A server that answers, and what its turns measured."""

    name: str
    setting: str
    url: str
    path: str
    process: psutil.Process
    key: str = ""
    job: Any = None
    """The serve job of Glasshouse."""
    turns: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, files: Path, clients: int, seconds: float) -> dict[str, Any]:
        """Take a turn."""
        load = Load(
            self.url,
            self.path,
            str(files / "requests"),
            str(files / "expected.npz"),
            clients,
            seconds,
            tuple(one.pid for one in (self.process, *self.process.children(recursive=True))),
        )
        self.resume()
        done = subprocess.run(
            [sys.executable, "-m", "bench.service.load", json.dumps(asdict(load))],
            env=os.environ | ({"GLASSHOUSE_API_KEY": self.key} if self.key else {}),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout)
        self.pause()
        if found["errors"] or found["wrong"]:
            raise SystemExit(f"{self.name} ({self.setting}), {clients} clients: {found}")
        return found

    def pause(self) -> None:
        """Stop all processes of the server until its next turn: some poll while they are idle."""
        if self.job is None:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue."""
        if self.job is None:
            os.killpg(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        """End a server that this benchmark started as a process."""
        if self.job is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Service:
    """The embedded service: trains the networks, and serves them."""

    def __init__(self, threads: int) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="gh", dir="/tmp"))
        self._threads = threads
        command = [*CLI, "up", "--detach", "--port", "0", "--home", str(self.home)]
        more = {"GLASSHOUSE_QUOTA_REQUESTS_PER_S": "1000000"}
        subprocess.run(command, env=os.environ | more, check=True, **QUIET)
        self.runtime = json.loads((self.home / "runtime.json").read_text())
        self.client = Client(self.runtime["url"], self.runtime["api_key"])

    def close(self) -> None:
        """End the service."""
        self.client.close()
        command = [*CLI, "down", "--home", str(self.home)]
        subprocess.run(command, check=False, **QUIET)
        shutil.rmtree(self.home, ignore_errors=True)

    def train(self, name: str, seed: int = 1) -> dict[str, Any]:
        """Train a network for some steps, and publish it; return its weights."""
        workload = WORKLOADS[name]
        rows, labels = workload.rows(64, 0), np.arange(64) % 2
        columns = rows if workload.field == "text" else np.array(rows, np.float32)
        dataset = self.client.datasets.upload({"train": {workload.field: columns, "label": labels}})
        fields = {
            workload.field: workload.described,
            "label": {"type": "integer", "dim": 10 if name == "mnist_cnn" else 2},
        }
        job = self.client.jobs.create(
            {
                "kind": "train",
                "seed": seed,
                "network": {"type": "preset", "preset": name, "args": workload.preset},
                "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
                "optimizer": {"type": "Adam", "args": {"lr": 0.001}},
                "data": {
                    "train": {"dataset": dataset.id, "split": next(iter(dataset.splits))},
                    "fields": fields,
                    "batch_size": 16,
                },
                "stop": {"steps": 8},
            }
        ).wait()
        self.client.models.publish(name, job)
        return job.checkpoints()[-1].weights()

    def serve(self, name: str, **more: Any) -> Side:
        """Serve the published model, and wait until it answers."""
        devices = {"type": "cpu", "threads": self._threads}
        job = self.client.jobs.create(
            {"kind": "serve", "models": [name], "devices": devices, **more}
        )
        url, key = self.runtime["url"], self.runtime["api_key"]
        path = f"/api/v1/models/{name}/predict"
        process = psutil.Process(self.runtime["pid"])
        return Side("glasshouse", "defaults", url, path, process, key, job)


def started(command: Sequence[str], port: int) -> psutil.Process:
    """Start a server; return its process, the leader of a group."""
    started = subprocess.Popen(
        [*command], cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL
    )
    until = time.monotonic() + START_S
    while time.monotonic() < until and started.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return psutil.Process(started.pid)
        time.sleep(0.1)
    raise SystemExit(f"{' '.join(command)} did not start")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def bare(name: str, weights: Path, threads: int) -> list[Side]:
    """Return the endpoints of one bare server."""
    port = free_port()
    command = [sys.executable, "-m", "bench.service.bare_server", name, str(weights)]
    process = started([*command, str(port), str(threads)], port)
    url = f"http://127.0.0.1:{port}"
    return [Side("bare", setting, url, path, process) for path, setting in ENDPOINTS.items()]


def litserve(name: str, weights: Path, threads: int, python: str) -> list[Side]:
    """Return servers with different settings."""
    sides: list[Side] = []
    for size, timeout in LITSERVE:
        port = free_port()
        command = [python, "-m", "bench.service.litserve_server", name, str(weights)]
        command += [str(port), str(threads), str(size), str(timeout)]
        process = started(command, port)
        setting = f"max_batch_size={size}, batch_timeout={timeout:g}"
        sides.append(Side("litserve", setting, f"http://127.0.0.1:{port}", "/predict", process))
    return sides


def write_requests(name: str, weights: Path, files: Path) -> None:
    """Write the bodies, and what torch computes by hand for each row alone."""
    workload = WORKLOADS[name]
    rows = workload.rows(NUM_REQUESTS, 1)
    bodies = [json.dumps({"inputs": {workload.field: [row]}}) for row in rows]
    (files / "requests").write_text("\n".join(bodies))
    network = served_networks.load(name, str(weights))
    with torch.inference_mode():
        value = torch.cat([network(torch.tensor([row])) for row in rows])
    prob = value.softmax(1).max(1).values
    np.savez(files / "expected.npz", value=value.numpy(), prob=prob.numpy())


def ask(side: Side, files: Path) -> None:
    """Send one request; raise if the answer is an error."""
    body = (files / "requests").read_bytes().splitlines()[0]
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {side.key}"}
    asked = Request(side.url + side.path, body, headers)  # noqa: S310 (on this machine)
    with urlopen(asked, timeout=START_S):  # noqa: S310
        pass


def wait_for_answer(side: Side, files: Path) -> None:
    """Ask until the server answers."""
    until = time.monotonic() + START_S
    while True:
        try:
            return ask(side, files)
        except (URLError, HTTPError) as error:
            last = error.read()[:300] if isinstance(error, HTTPError) else error
        if time.monotonic() > until:
            raise SystemExit(f"{side.name} ({side.setting}) does not answer: {last!r}")
        time.sleep(0.05)


def fastest(sides: Sequence[Side], files: Path, clients: int, seconds: float) -> list[Side]:
    """Return of each name the side with the most requests per second, after one short turn each."""
    best: dict[str, tuple[float, Side]] = {}
    for side in sides:
        found = side.measure(files, clients, seconds)["requests_per_s"]
        print(f"{side.name} ({side.setting}), {clients}: {found:.0f}/s", file=sys.stderr)
        if side.name not in best or found > best[side.name][0]:
            best[side.name] = (found, side)
    return [side for _, side in best.values()]


def take_turns(
    sides: Sequence[Side], files: Path, clients: int, rounds: int, seconds: float
) -> None:
    """Let the sides take turns, in another order in each round."""
    for side in sides:
        side.turns.clear()
    for number in range(rounds):
        start = number % len(sides)
        for side in [*sides[start:], *sides[:start]]:
            side.turns.append(side.measure(files, clients, seconds))


def figures(side: Side) -> dict[str, Any]:
    """Return medians over the turns of a side."""
    found: dict[str, Any] = {"setting": side.setting}
    for name in ("requests_per_s", "p50_ms", "p99_ms", "server_cpu_us", "load_cpu"):
        found[name] = round(statistics.median(turn[name] for turn in side.turns), 3)
    for name in SUMS:
        found[name] = sum(turn[name] for turn in side.turns)
    found["largest_difference"] = float(f"{max(t['largest_difference'] for t in side.turns):.1e}")
    return found


def relative(mine: Side, other: Side) -> dict[str, Any]:
    """Return medians of the ratios of turns, and their range."""
    found: dict[str, Any] = {}
    for name in ("requests_per_s", "p50_ms", "p99_ms", "server_cpu_us"):
        ratios = [a[name] / b[name] for a, b in zip(mine.turns, other.turns, strict=True)]
        found[name] = {
            "median": round(statistics.median(ratios), 3),
            "min": round(min(ratios), 3),
            "max": round(max(ratios), 3),
        }
    return found


def compare(name: str, service: Service, given: argparse.Namespace) -> None:
    """Compare the sides with one network; print a line for each number of clients."""
    with ExitStack() as stack:
        files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        weights = files / "weights.safetensors"
        save_file(service.train(name), weights)
        write_requests(name, weights, files)
        sides: list[Side] = []
        if "bare" in given.side:
            sides += bare(name, weights, given.threads)
        if "litserve" in given.side and given.litserve_python:
            sides += litserve(name, weights, given.threads, given.litserve_python)
        for process in {side.process.pid: side for side in sides}.values():
            stack.callback(process.end)
        if "glasshouse" in given.side:
            sides.append(service.serve(name))
        for side in sides:
            side.resume()
            wait_for_answer(side, files)
            side.pause()
        for clients in given.clients:
            chosen = fastest(sides, files, clients, given.seconds / 2)
            take_turns(chosen, files, clients, given.rounds, given.seconds)
            by_name = {side.name: side for side in chosen}
            line: dict[str, Any] = {"bench": "serving", "network": name, "clients": clients}
            line |= {"threads": given.threads, "rounds": given.rounds}
            line |= {side: figures(by_name[side]) for side in SIDES if side in by_name}
            line["skipped"] = [side for side in SIDES if side not in by_name]
            if (mine := by_name.pop("glasshouse", None)) is not None:
                line["relative_to"] = {side: relative(mine, by_name[side]) for side in by_name}
            print(json.dumps(line), flush=True)


def main(arguments: Sequence[str]) -> int:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m bench.service.serving")
    parser.add_argument("--network", choices=[*WORKLOADS], nargs="*", default=[*WORKLOADS])
    parser.add_argument("--side", choices=SIDES, nargs="*", default=[*SIDES])
    parser.add_argument("--clients", type=int, nargs="*", default=[*CLIENTS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each side")
    parser.add_argument("--litserve-python", metavar="PATH", help="Python with LitServe")
    given = parser.parse_args(arguments)
    service = Service(given.threads)
    try:
        for name in given.network:
            compare(name, service, given)
    finally:
        service.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
