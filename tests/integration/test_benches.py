"""The benches run: what they measure is not looked at here, only that they still can."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CNN = "mnist cnn, batch 100"
SHORT = ("--rounds", "1", "--steps", "3")


def run(*command: str) -> list[dict]:
    """The lines that a bench prints."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("command", "num_lines"),
    [
        (["bench.step", "--rounds", "1", "--steps", "3"], 1),
        (["bench.watching", "--threads", "1", "--rounds", "1", "--network", CNN, "--case", "c"], 1),
        (["bench.guarding", *SHORT, "--network", CNN, "--guard", "default"], 1),
    ],
)
def test_a_bench_measures_a_ratio(command, num_lines):
    lines = run(*command)
    assert len(lines) == num_lines
    found = lines[0]["ratio"]
    assert 0 < found < 60


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a slow disk", "nobody who reads"])
def test_a_hindered_job_counts_every_tensor(case):
    (line,) = run("bench.hindered", "--rounds", "1", "--case", case)
    assert line["kept"] + line["dropped"] == line["due"]
    assert line["dropped"]
