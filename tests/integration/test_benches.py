"""Every benchmark still runs. Its measurements are not checked here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.service.load import Answer, checked
from bench.training.turns import Turn, take_turns

ROOT = Path(__file__).parents[2]
CNN = "mnist cnn, batch 100"
SHORT = ("--rounds", "1", "--steps", "3")


def run(*command: str) -> list[dict]:
    """The lines that a bench prints."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # other tests run beside it
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("command", "num_lines"),
    [
        (["bench.training.step", "--rounds", "1", "--steps", "3"], 1),
        pytest.param(
            [
                "bench.probes.watching",
                "--threads",
                "1",
                "--rounds",
                "1",
                "--network",
                CNN,
                "--case",
                "c",
            ],
            1,
            marks=pytest.mark.slow,
        ),
        (["bench.training.recomputing", *SHORT], 1),
        pytest.param(
            ["bench.probes.guarding", *SHORT, "--network", CNN, "--guard", "default"],
            1,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_bench_measures_a_ratio(command, num_lines):
    lines = run(*command)
    assert len(lines) == num_lines
    found = lines[0]["ratio"]
    assert 0 < found < 60


@pytest.mark.slow
@pytest.mark.parametrize("case", ["pool", "pool, 2 workers"])
def test_a_job_on_a_file_larger_than_its_pool_takes_the_memory_of_its_plan(case):
    (line,) = run("bench.data.streaming", "--case", case, "--rows", "80000")
    assert line["file_mb"] > 4.5 * line["planned_mb"]
    assert 0.85 < line["grown"] < 1.15


def test_padding_is_measured_with_and_without_buckets():
    (line,) = run("bench.data.padding", "--rounds", "1", "--rows", "200")
    assert line["padding_buckets"] < line["padding_by_chance"] / 2


def test_inference_by_hand_gives_the_outputs_of_the_engine():
    """The bench compares them; else the ratio of their times would say nothing."""
    found = run("bench.data.inference", "--rounds", "1", "--rows", "5000")
    assert 0 < found[0]["throughput_ratio"] < 60
    assert [line["rows"] for line in found[1:]] == [5000, 20_000]


@pytest.mark.slow
def test_reading_ahead_is_measured_by_threads_and_by_processes():
    lines = run("bench.data.prefetch", "--rounds", "1", "--part", "0.1")
    assert all(line["threads_2"] > 0 < line["processes_2"] for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a slow disk", "nobody who reads"])
def test_a_job_with_a_slow_consumer_counts_every_tensor(case):
    (line,) = run("bench.probes.hindered", "--rounds", "1", "--case", case)
    assert line["kept"] + line["dropped"] == line["due"]
    assert line["dropped"]


def test_two_jobs_take_turns_in_one_thread():
    walked: list[str] = []

    def run(job: str, turn: Turn) -> None:
        for _ in range(7):
            walked.append(job)
            assert not turn.cancel_requested

    first, second = take_turns(run, ("a", "b"), 3, settled=lambda: 1000.0)
    assert "".join(walked) == "ab" + "aaabbb" * 2  # the first step is of nobody's turn
    assert len(first) == len(second) == 2
    assert all(0 <= wall < 60 and 1000 <= cpu < 1060 for wall, cpu in [*first, *second])


SMALL = ["bench.training.accelerator", "--device", "cpu", "--small", "--rounds", "1"]
SMALL += ["--warm-up", "2", "--steps", "3"]


def test_a_loop_by_hand_computes_what_the_engine_does_on_an_accelerator():
    """Else the ratio of their times would say nothing."""
    lines = run(*SMALL, "--precision", "float32", "--side", "unwatched", "everything")
    assert [line["network"] for line in lines] == ["transformer, small", "resnet, small"]
    for line in lines:
        assert line["ratio"].keys() == {"unwatched", "everything"}
        assert max(line["loss_difference"].values()) < 1e-5
        assert all(0 < found["median"] < 60 for found in line["ratio"].values())


@pytest.mark.slow
@pytest.mark.parametrize("network", ["transformer", "resnet"])
def test_so_do_processes_with_ddp_and_fsdp_by_hand(network):
    lines = run(*SMALL, "--processes", "2", "--side", "everything", "--network", network)
    assert [line["strategy"] for line in lines] == ["none", "data", "fsdp"]
    assert [line["processes"] for line in lines] == [1, 2, 2]
    assert all(line["loss_difference"]["everything"] < 0.01 for line in lines)


def test_the_load_of_serving_recognizes_wrong_answers():
    """Else a server that mixes up its answers would be the fastest."""
    versions = [
        {"value": np.array([[1.0, 2.0], [4.0, 3.0]]), "prob": np.array([0.7, 0.8])},
        {"value": np.array([[5.0, 6.0], [8.0, 7.0]]), "prob": np.array([0.7, 0.8])},
    ]

    def answer(row: int, value: list[float], best: int, prob: float) -> Answer:
        outputs = {"fc/value": [value], "fc/id": [best], "fc/prob": [prob]}
        return Answer(row, 0.0, 1.0, 200, json.dumps({"outputs": outputs}).encode())

    good = [answer(0, [1.0, 2.00001], 1, 0.7), answer(1, [8.0, 7.0], 0, 0.8)]
    assert checked(good, versions) == ([1, 1], pytest.approx(1e-5))
    wrong = [answer(1, [1.0, 2.0], 1, 0.7), answer(0, [1.0, 2.0], 0, 0.7)]
    wrong += [answer(0, [1.0, 2.0], 1, 0.8), answer(0, [1.0, 2.01], 1, 0.7)]
    assert checked(wrong, versions)[0] == [0, 0]


@pytest.mark.slow
def test_serving_and_a_bare_endpoint_answer_as_torch_does():
    """The bench compares every answer."""
    command = ["bench.service.serving", "--rounds", "1", "--seconds", "0.5", "--clients", "4"]
    lines = run(*command)
    assert [line["network"] for line in lines] == ["mnist_cnn", "transformer_classifier"]
    for line in lines:
        assert line["skipped"] == ["litserve"]
        assert 0 < line["relative_to"]["bare"]["requests_per_s"]["median"] < 60
        for side in ("glasshouse", "bare"):
            assert line[side]["errors"] == line[side]["wrong"] == 0 < line[side]["requests"]


@pytest.mark.slow
def test_an_alias_moves_under_load_and_no_request_fails():
    """The bench fails if one does, or if an answer is of neither version."""
    command = ["bench.service.serving_changes", "--rounds", "1", "--seconds", "6", "--swaps", "2"]
    cold, swap = run(*command)
    assert 0 < cold["first_answer_s"]["median"] < 60
    assert swap["errors"] == swap["wrong"] == 0 < min(swap["by_version"])
