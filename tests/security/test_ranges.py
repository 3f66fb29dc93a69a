"""X14: a thousand ranges of one file."""

import time

import psutil
import pytest

from tests.security.populated_api import PopulatedApi
from tests.security.raw import Raw

RANGES = {
    "a thousand": "bytes=" + ",".join(f"{n}-{n}" for n in range(1000)),
    "overlapping": "bytes=" + ",".join("0-" for _ in range(1000)),
    "suffixes": "bytes=" + ",".join(f"-{n}" for n in range(1, 1000)),
    "huge": "bytes=0-" + "9" * 5000,
    "backwards": "bytes=9-1",
    "negative": "bytes=--5",
    "spaces": "bytes=" + " " * 20_000 + "0-1",
    "commas": "bytes=" + "," * 20_000,
    "no numbers": "bytes=a-b",
    "another unit": "rows=0-1",
}


@pytest.mark.parametrize("name", RANGES)
def test_many_ranges_take_no_time_and_no_memory(populated: PopulatedApi, name: str):
    ids = populated.ids
    process = psutil.Process(populated.api.process.pid)
    before, began = process.memory_info().rss, time.monotonic()
    with Raw(populated.api.url, populated.ada) as raw:
        for path in (
            f"/api/v1/checkpoints/{ids['checkpoints']}/weights",
            f"/api/v1/jobs/{ids['jobs']}/artifacts/outputs.npz",
            f"/api/v1/jobs/{ids['jobs']}/layers/fc/output?step=0&format=npy",
        ):
            answer = raw.ask("GET", path, {"Range": RANGES[name]})
            assert answer.status in (200, 206, 400, 416), (path, answer.status)
            assert len(answer.body) < 300_000
    assert time.monotonic() - began < 30
    assert process.memory_info().rss - before < 48 * 1024**2
