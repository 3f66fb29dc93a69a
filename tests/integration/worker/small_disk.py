"""A job on a disk of 64 MiB that becomes full: run in a mount namespace of its own."""

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from glasshouse.errors import StorageFull
from models import marks
from tests.integration.worker.conftest import Broker
from tests.integration.worker.harness import Harness, endless
from tests.waiting import until


def main(place: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "t", place], check=True)
    with tempfile.TemporaryDirectory(prefix="gh-", dir="/tmp") as directory:
        broker = Broker(Path(directory))
        broker.start()
        harness = Harness(f"sqlite:///{place / 'test.db'}", broker.url, place)
        try:
            scenario(harness, place)
        finally:
            harness.close()
            broker.kill()


def scenario(harness: Harness, place: Path) -> None:
    harness.start_worker(MIN_FREE_BYTES="0", LEASE_S="60")
    job = harness.submit(endless(harness.dataset()))
    harness.wait_step(job, 20)
    filler = place / "filler"
    fill(filler)
    numbers = itertools.count()
    until(lambda: refuses_writes(harness, numbers))
    harness.job(job)  # reading works
    # what a refused write had taken of the WAL is room for others: so again until they feel it too
    until(lambda: refuses_writes(harness, numbers) and is_said(harness))
    fill(filler)
    filler.unlink()
    at = harness.steps(job)[-1]
    until(lambda: harness.steps(job)[-1] > at + 20)
    harness.cancel(job)
    assert harness.wait(job).state == "cancelled", harness.logs()
    steps = harness.steps(job)
    assert steps == list(range(len(steps)))
    assert len(harness.attempts(job)) == 1
    sys.stdout.write("all is well\n")


def fill(filler: Path) -> None:
    """Take every byte that is left."""
    with filler.open("ab", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(b"x" * size)
            except OSError:
                size //= 2


def refuses_writes(harness: Harness, numbers: Iterator[int]) -> bool:
    """Take what is left of the disk and of the database's own files."""
    fill(harness.home / "filler")
    try:
        for number in itertools.islice(numbers, 2000):
            with harness.database.write() as tx:
                marks.note(tx, f"filling {number} " + "x" * 1000, "tests")
    except StorageFull:
        return True
    return False


def is_said(harness: Harness) -> bool:
    return "database_unavailable" in harness.log("w1") or "disk is full" in harness.log("w1")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
