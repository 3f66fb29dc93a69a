"""Which of several processes keeps the others waiting, from what they answer."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from glasshouse import processes
from tests.waiting import until
from worker.attempt import stalls
from worker.attempt.stalls import RankState, find_cause, investigate
from worker.processes.rank import Rank
from worker.processes.ranks import Ranks


def answer(
    *collectives: tuple[str, bool],
    first: int = 1,
    kind: str = "collectives",
    group: str = "default_pg",
    **more: Any,
) -> dict[str, Any]:
    """What a process answers: its newest collectives, and whether each is over."""
    entries = [
        {
            "collective_seq_id": number,
            "profiling_name": f"gloo:{name}",
            "retired": is_over,
            "is_p2p": False,
            "process_group": ["0", group],
        }
        for number, (name, is_over) in enumerate(collectives, first)
    ]
    where = {"joining": False, "joined": True, "receives_from": None, "between_passes": False}
    return {**where, kind: {"entries": entries}, **more}


DONE = ("all_reduce", True)
WAITS = ("all_reduce", False)
JOINING = answer(joining=True, joined=False)
NOT_JOINED = answer(joined=False)
ENTERED = answer(DONE, DONE, WAITS)
LATE = answer(DONE, DONE)


@pytest.mark.parametrize(
    ("answers", "cause", "reason"),
    [
        ([ENTERED, LATE], 1, "rank 1 has not entered all_reduce 3, in which rank 0 waits"),
        ([LATE, ENTERED], 0, "rank 0 has not entered all_reduce 3, in which rank 1 waits"),
        (
            [ENTERED, LATE, ENTERED, LATE],
            1,
            "ranks 1, 3 have not entered all_reduce 3, in which ranks 0, 2 wait",
        ),
        # buckets of gradients: the first one is waited for
        ([answer(DONE, WAITS, WAITS, first=7), answer(DONE, first=7)], 1, "all_reduce 8"),
        ([answer(WAITS, kind="nccl"), answer(kind="nccl")], 1, "all_reduce 1"),
        # one waits for the second last, the other for the last: the first one is late
        ([answer(WAITS), answer(DONE, WAITS)], 0, "not entered all_reduce 2"),
        ([JOINING, NOT_JOINED], 1, "rank 1 has not joined the group, for which rank 0 waits"),
        ([answer(DONE, receives_from=1), LATE], 1, "rank 0 waits for a message of rank 1"),
        (
            [answer(DONE, between_passes=True), LATE],
            1,
            "rank 1 has not ended the pass of a stage, for which rank 0 waits",
        ),
        (
            [answer(DONE, between_passes=True), answer(DONE, between_passes=True)],
            None,
            None,
        ),
        ([answer(DONE, receives_from=1), "stopped"], 1, "rank 1 was stopped by a signal"),
        (["stopped", "stopped"], 0, "ranks 0, 1 were stopped by a signal"),
        ([ENTERED, "silent"], 1, "rank 1 does not answer"),
        (["silent", "stopped"], 1, "rank 1 was stopped by a signal"),
        ([LATE, "silent"], None, None),  # nobody waits: a long step
        (["silent"], None, None),
        ([LATE, LATE], None, None),
        # a group of some of the processes has its own numbers
        ([answer(WAITS, first=9, group="mesh_shard"), LATE], None, None),
        ([ENTERED, ENTERED], None, None),  # all are there: the network between them
        ([JOINING, JOINING], None, None),
    ],
)
def test_the_process_that_the_others_wait_for_is_the_cause(
    answers: list[Any], cause: int | None, reason: str | None
):
    states = [
        RankState(rank, one) if isinstance(one, str) else RankState.of(rank, one)
        for rank, one in enumerate(answers)
    ]
    found = find_cause(states)
    assert found[0] == cause
    assert found[1] == reason or (reason is not None and reason in (found[1] or ""))


def test_of_many_late_processes_the_first_are_named():
    states = [RankState.of(rank, ENTERED if rank == 0 else LATE) for rank in range(20)]
    cause, reason = find_cause(states)
    assert cause == 1
    assert reason is not None
    assert reason.startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8 … have not entered")


ANSWERS = """
import faulthandler, json, os, signal, sys, threading
def hang_in_here():
    signal.pause()
file = open(sys.argv[1] + "/stacks.txt", "ab")
faulthandler.register(signal.SIGUSR1, file, all_threads=True)
def listen():
    for line in sys.stdin:
        if len(sys.argv) > 2:
            open(sys.argv[1] + "/waits.json", "w").write(sys.argv[2])
threading.Thread(target=listen, daemon=True).start()
print("ready", flush=True)
while True:
    hang_in_here()
"""
"""A process that answers as a rank does, with what its second argument says."""


@contextlib.contextmanager
def started(directory: Path, *says: str) -> Generator[Rank]:
    directory.mkdir(exist_ok=True)
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", ANSWERS, str(directory), *says],
        stdin=read_end,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(read_end)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    found = processes.identify(process.pid)
    assert found is not None
    rank = Rank(found, write_end)
    try:
        yield rank
    finally:
        rank.close()
        process.kill()
        process.wait()
        process.stdout.close()


def state_of(rank: Rank) -> str:
    return Path(f"/proc/{rank.identity.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_stacks_and_collectives_of_those_that_answer_become_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rank 0 waits, rank 1 does not listen, rank 2 is stopped."""
    monkeypatch.setattr(stalls, "ANSWER_S", 0.5)
    (tmp_path / "artifacts").mkdir()
    beats: list[int] = []
    with (
        started(tmp_path, json.dumps(ENTERED)) as first,
        started(tmp_path / "rank-1") as second,
        started(tmp_path / "rank-2", json.dumps(LATE)) as third,
    ):
        third.signal(signal.SIGSTOP)
        until(lambda: state_of(third) == "T")
        ranks = Ranks([first, second, third], lambda _: None)
        found = investigate(ranks, tmp_path, lambda: beats.append(1))
    assert (found.cause, found.reason) == (2, "rank 2 was stopped by a signal")
    assert found.is_hopeless
    assert [one.as_dict() for one in found.ranks] == [
        {"rank": 0, "state": "waiting", "waits_in": "all_reduce 3"},
        {"rank": 1, "state": "silent", "waits_in": None},
        {"rank": 2, "state": "stopped", "waits_in": None},
    ]
    assert beats, "the lease is renewed meanwhile"
    names = [one["name"] for one in found.artifacts]
    assert names == ["stacks-rank-0.txt", "collectives-rank-0.json", "stacks-rank-1.txt"]
    for one in found.artifacts:
        assert one["size_bytes"] == (tmp_path / one["file"]).stat().st_size > 0
    for rank in (0, 1):
        stacks = (tmp_path / f"artifacts/stacks-rank-{rank}.txt").read_text()
        assert "hang_in_here" in stacks
        assert "listen" in stacks
    assert json.loads((tmp_path / "artifacts/collectives-rank-0.json").read_text()) == ENTERED


def test_an_answer_that_is_no_answer_counts_as_silence(tmp_path: Path):
    (tmp_path / "artifacts").mkdir()
    with started(tmp_path, '{"joined": [') as rank:
        found = investigate(Ranks([rank], lambda _: None), tmp_path, lambda: None)
    assert [one.state for one in found.ranks] == ["silent"]
    assert (found.cause, found.is_hopeless) == (None, False)


def test_a_second_stall_shows_its_own_stacks(tmp_path: Path):
    (tmp_path / "artifacts").mkdir()
    with started(tmp_path, json.dumps(LATE)) as rank:
        ranks = Ranks([rank], lambda _: None)
        sizes = [
            next(iter(investigate(ranks, tmp_path, lambda: None).artifacts))["size_bytes"]
            for _ in range(2)
        ]
    assert sizes[1] < 1.5 * sizes[0]
