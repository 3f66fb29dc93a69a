"""Empties a ring in a process of its own.

``python -m bench.probes.consumer <ring> <spool> <directory>`` does with whole tensors what a
worker's supervisor does, except for the rows in the database. It reads the spool at a supervisor's
pace, writes a file of each step into artifacts, and frees the space in the ring. SIGUSR1 makes its
disk slow, SIGUSR2 normal again.
"""

import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from engine.core.spool import read_frames
from engine.probes.tensors.ring import Ring
from models.jobs.leases import Claim
from models.storage.artifacts import LocalArtifacts
from worker.attempt.captures import Drain
from worker.attempt.records import Sorter
from worker.attempt.store import _BUSY_S, MAX_RECORDS, SHIP_EVERY_S

SLOW_BYTES_PER_S = 2e6


class Disk(LocalArtifacts):
    """Artifacts on a disk whose writes can be slowed down."""

    is_slow = False

    @contextmanager
    def receive(self, key: str) -> Generator[Path]:
        with super().receive(key) as path:
            yield path
            until = time.monotonic() + path.stat().st_size / SLOW_BYTES_PER_S
            while self.is_slow and time.monotonic() < until:
                time.sleep(0.01)


def main() -> None:
    ring, spool, directory = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    claim = Claim("job_bench", 1, 1)
    artifacts = Disk(directory)
    signal.signal(signal.SIGUSR1, lambda *_: setattr(artifacts, "is_slow", True))
    signal.signal(signal.SIGUSR2, lambda *_: setattr(artifacts, "is_slow", False))
    drain = Drain(claim, artifacts, Ring.open(ring))
    sorter = Sorter(claim, "bench", directory)
    offset = spool.stat().st_size
    shipped_at = time.monotonic()
    print("ready", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_BUSY_S)
        if time.monotonic() - shipped_at < SHIP_EVERY_S:
            continue
        records, after = read_frames(spool, offset, MAX_RECORDS)
        shipment = sorter.sort(records, (offset, after))
        offset, shipped_at = after, time.monotonic()
        for record in shipment.tensors:
            drain.take(record)
        lots = drain.finished()
        drain.release(lots)
        for key in {row["key"] for lot in lots for row in lot.captures}:
            artifacts.delete(key)


if __name__ == "__main__":
    main()
