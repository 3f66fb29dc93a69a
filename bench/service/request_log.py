"""Measures what the request log costs a replica that is always busy.

``python -m bench.service.request_log`` lets two replicas of the same network take turns in one
process, one with a request log and one without. Both read the bytes of the same requests, compute
them in batches and encode the answers; only the connection is missing. Prints a JSON line for each
form of request: the median of the ratios of requests per second within a round, and of requests per
CPU second of the main thread, which other load disturbs less. Below 1, recording costs something.
"""

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.data.inference import trained
from engine.process.rank import calm_collector
from engine.serving.queue import Pending, RequestQueue
from engine.serving.serve import _Replica  # pyright: ignore[reportPrivateUsage]
from engine.training.report import Outputs
from glasshouse.frames import Frame, Kind
from glasshouse.spec import ServeJob

AT_ONCE = 64
"""The requests that wait when a batch is taken, as with so many clients."""


class Control:
    """Nothing is asked of the replica."""

    cancel_requested = False
    models = None


class Connection:
    """Takes answers, and sends them nowhere."""

    def __init__(self) -> None:
        self.num_answers = 0

    def answered(self, _number: int, head: dict[str, Any], _body: bytes) -> None:
        """Count an answer."""
        if head["status"] != 200:
            raise SystemExit(str(head))
        self.num_answers += 1


class Side:
    """A replica, and a clock that runs only during its turns."""

    def __init__(
        self, log: dict[str, Any] | None, described: dict[str, Any], saved: Path, directory: Path
    ) -> None:
        directory.mkdir(parents=True)
        spec = {"kind": "serve", "models": ["m"], "max_queue": AT_ONCE, "request_log": log}
        job = ServeJob.model_validate_json(json.dumps(spec))
        self.files: list[Path] = []
        self.connection: Any = Connection()
        queue = RequestQueue(job.max_queue, job.max_batch_size, 0.0)
        out = Outputs(directory, self._emit)
        listen = {"path": str(directory / "socket")}
        self.replica = _Replica(job, queue, listen, torch.device("cpu"), out)
        version = {"reference": "m", "model": "m", "version": 1, "checkpoint": "ckpt_1"}
        self.replica.load([version | {"dir": str(saved), "trained_by": described}])
        self.replica.open()
        self.recorder = self.replica.listener.recorder
        self._directory, self._stood_s, self._ended = directory, 0.0, time.monotonic()
        if self.recorder is not None:
            self.recorder.clock = self._now

    def turn(self, head: dict[str, Any], body: bytes, seconds: float) -> tuple[float, float]:
        """Answer requests for some time; return how many in a second, and in a CPU second."""
        began, cpu_began = time.monotonic(), time.thread_time()
        self._stood_s += began - self._ended
        num, control = 0, Control()
        with torch.inference_mode():
            while (took := time.monotonic() - began) < seconds:
                for number in range(AT_ONCE):
                    frame = Frame(Kind.REQUEST, number, head, body)
                    found = self.replica.listener.take_in(self.connection, frame)
                    if not isinstance(found, Pending):
                        raise SystemExit(f"refused: {found[0]}")
                self.replica.turn(control)  # pyright: ignore[reportArgumentType]
                num += AT_ONCE
        self._ended, cpu_s = time.monotonic(), time.thread_time() - cpu_began
        for file in self.files:  # as the worker does once they are stored
            file.unlink()
        self.files.clear()
        return num / took, num / cpu_s

    def _now(self) -> float:
        return time.monotonic() - self._stood_s

    def _emit(self, record: dict[str, Any]) -> None:
        if record["type"] == "requests":
            self.files.append(self._directory / record["file"])


def bodies() -> dict[str, tuple[dict[str, Any], bytes]]:
    """Return the head and the body of a request with one image, in each form."""
    image = np.random.default_rng(0).random((1, 1, 28, 28)).astype(np.float32)
    packed = io.BytesIO()
    np.save(packed, image)
    text = json.dumps({"inputs": {"image": image.tolist()}}).encode()
    head = {"protocol": "predict", "reference": "m", "request_id": f"req_{'0' * 24}"}
    return {
        "json": (head | {"content_type": "application/json"}, text),
        "npy": (head | {"content_type": "application/x-npy"}, packed.getvalue()),
    }


def measure(given: argparse.Namespace, directory: Path) -> None:
    """Let both sides take turns, with each form of request."""
    described, saved = trained(directory)
    for form, (head, body) in bodies().items():
        sides = [
            Side(log, described, saved, directory / f"{form}-{name}")
            for name, log in (("without", None), ("with", {}))
        ]
        rates: list[list[tuple[float, float]]] = []
        for number in range(given.rounds + 1):
            order = sides if number % 2 else sides[::-1]
            found = {id(side): side.turn(head, body, given.seconds) for side in order}
            if number:  # the first warms up
                rates.append([found[id(side)] for side in sides])
        for side in sides:
            side.replica.listener.stop()
        ratios, cpu_ratios = (
            [logged[which] / plain[which] for plain, logged in rates] for which in (0, 1)
        )
        per_s = [[rate for rate, _ in side] for side in zip(*rates, strict=True)]
        recorder = sides[1].recorder
        result = {
            "bench": "request log",
            "form": form,
            "throughput_ratio": round(statistics.median(ratios), 4),
            "low": round(min(ratios), 4),
            "high": round(max(ratios), 4),
            "cpu_ratio": round(statistics.median(cpu_ratios), 4),
            "requests_per_s": [round(statistics.median(side)) for side in per_s],
            "counts": recorder and recorder.counts,
            "rounds": given.rounds,
        }
        print(json.dumps(result))


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    calm_collector()
    with tempfile.TemporaryDirectory() as directory:
        measure(given, Path(directory))


if __name__ == "__main__":
    main()
