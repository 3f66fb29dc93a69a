"""Measures what predictions with the current weights cost a job, and how long they take.

The MNIST job of `bench.training.step` runs in turns: alone; after somebody has asked, without
requests (idle); and with clients that send the next request as soon as they have the answer. Prints
one JSON line with medians over the rounds. The clients are a process of their own.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.training.step import BATCH, META, Clock, spec
from engine.core.spool import SpoolWriter
from engine.data.columns.table import Table
from engine.data.sources.loading import load
from engine.plan.plan import parse_spec, plan
from engine.serving.live_predictions import LivePredictions
from engine.training.loop import train
from engine.training.report import Outputs
from glasshouse import frames
from glasshouse.frames import FrameReader, Kind
from glasshouse.spec import Source

WARM_UP = 100
"""Steps that are not measured."""


class Asked(Clock):
    """A control of a job that listens from the first step on, if ``at`` is given."""

    def __init__(self, at: Path | None) -> None:
        super().__init__()
        self.listen = None if at is None else {"job": "job", "at": {"path": str(at)}}


def run(job: Any, table: Path, directory: Path, clients: int | None) -> dict[str, float]:
    """Train, with so many clients; None: nobody has asked. Return seconds of steps and answers."""
    directory.mkdir()
    spool = SpoolWriter(directory / "spool")
    asking: list[subprocess.Popen[str]] = []

    def emit(record: dict[str, Any]) -> None:
        spool.append(record)
        if record["type"] == "answering" and clients:
            given = [record["address"], record["token"], str(clients)]
            command = [sys.executable, "-m", "bench.training.predicting", "--ask", *given]
            asking.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    cpu = torch.device("cpu")
    source = Source(dataset="d", split="train")
    rows = load(source, job.data.fields, Table(table), seed=0, device=cpu)
    out = Outputs(directory, emit, spool.settle, spool.flush)
    control = Asked(None if clients is None else directory / "s")
    predictions = LivePredictions(job, cpu, out)
    train(job, rows, {}, control=control, out=out, predictions=predictions)
    predictions.close()
    times = [wall for wall, _ in control.times][WARM_UP:]
    found = {"step_s": (times[-1] - times[0]) / (len(times) - 1)}
    for one in asking:
        found |= json.loads(one.communicate()[0])
    return found


def ask(address: str, token: str, clients: int) -> None:
    """Send requests with one row until the job closes the connection; print what was measured."""
    body = json.dumps({"inputs": {"image": np.zeros((1, 1, 28, 28)).tolist()}}).encode()
    head = {"reference": "job", "protocol": "predict", "content_type": "application/json"}
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(address.removeprefix("unix:"))
        reader = FrameReader()
        own, sent = frames.new_challenge(), dict[int, float]()
        latencies: list[float] = []
        number = 0
        while data := peer.recv(1 << 20):
            for frame in reader.feed(data):
                if frame.kind is Kind.CHALLENGE:
                    proof = frames.proof(token, "api", str(frame.head["challenge"]), own)
                    answer = {"challenge": own, "proof": proof}
                    peer.sendall(frames.pack(Kind.PROOF, 0, answer))
                elif frame.kind is Kind.CLOSING:
                    print(json.dumps(_measured(latencies)))
                    return
                for _ in range(clients if frame.kind is Kind.PROOF else frame.kind is Kind.ANSWER):
                    if frame.kind is Kind.ANSWER:
                        latencies.append(time.perf_counter() - sent.pop(frame.number))
                    number += 1
                    sent[number] = time.perf_counter()
                    parts = frames.pack_parts(Kind.REQUEST, number, head, body)
                    peer.sendall(b"".join(map(bytes, parts)))


def _measured(latencies: list[float]) -> dict[str, float]:
    return {"answers": len(latencies), "latency_s": statistics.median(latencies)}


def main() -> None:
    """Measure and print a line."""
    parser = argparse.ArgumentParser(prog="python -m bench.training.predicting")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--ask", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask:
        ask(given.ask[0], given.ask[1], int(given.ask[2]))
        return
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        table = home / "table"
        (table / "train").mkdir(parents=True)
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (6000, 28, 28), np.uint8)
        np.save(table / "train" / "0.npy", images)
        np.save(table / "train" / "1.npy", random.integers(0, 10, 6000).astype(np.uint8))
        (table / "meta.json").write_text(json.dumps(META))
        made = plan(parse_spec(spec(given.steps + WARM_UP)), {"d": META})
        job = parse_spec(made["spec"])
        for number in range(given.rounds):
            ways: dict[str, int | None] = {"alone": None, "idle": 0, "asked": given.clients}
            for way, clients in ways.items():
                one = run(job, table, home / f"{way}-{number}", clients)
                found.setdefault(way, []).append(one)
    alone = [one["step_s"] for one in found["alone"]]
    line: dict[str, Any] = {"bench": "predictions while training", "clients": given.clients}
    line |= {"rows": BATCH, "step_ms": round(statistics.median(alone) * 1e3, 3)}
    for way in ("idle", "asked"):
        ratios = [one["step_s"] / base for one, base in zip(found[way], alone, strict=True)]
        line[f"{way}, relative step time"] = round(statistics.median(ratios), 4)
    latencies = [one["latency_s"] for one in found["asked"]]
    line["latency_ms"] = round(statistics.median(latencies) * 1e3, 2)
    line["answers"] = int(sum(one["answers"] for one in found["asked"]))
    print(json.dumps(line | {"cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
