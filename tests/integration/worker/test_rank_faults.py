"""Each process of a job is killed, stopped and slowed in each phase.

A job with a killed or stopped process ends as a whole within the time that the documentation
states, names that process, frees its devices and resumes; a slow process is only reported.
"""

import json
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from models.observations import outputs
from tests.integration.worker.harness import Harness, train_spec
from tests.waiting import until

PHASES = ("start", "forward", "collective", "checkpoint", "evaluation", "end", "rank.end")
"""``end`` is before the last checkpoint, ``rank.end`` after the last record of the process."""
WRITING = "checkpoint.rename"
"""Process 0 writes a checkpoint; the others do not come here."""
STEPS = 12
PART = "checkpoint.part"
"""A process writes its part of a checkpoint, if each has a part of the network."""
HIT = {"forward": "7", "collective": "7", "checkpoint": "7", "evaluation": "2", WRITING: "2"}
HIT[PART] = "2"
HIT["stage"] = "30"  # four micro-batches a step, and more in evaluations
"""The how manieth time: after the first checkpoint, which is of step 5, has been begun."""


@dataclass(frozen=True)
class Fault:
    """What one process does, and when."""

    way: str
    phase: str
    rank: int
    strategy: str = "data"

    def __str__(self) -> str:
        of_strategy = "" if self.strategy == "data" else f"-{self.strategy}"
        return f"{self.way}-{self.phase}-{self.rank}{of_strategy}"


DEFAULT = (
    Fault("kill", "start", 1),
    Fault("kill", "collective", 0),
    Fault("kill", WRITING, 0),
    Fault("kill", "end", 1),
    Fault("stop", "start", 0),
    Fault("stop", "forward", 1),
    Fault("stop", "rank.end", 0),
    Fault("be-slow", "forward", 1),
    Fault("kill", PART, 1, "fsdp"),
    Fault("stop", PART, 1, "fsdp"),
    Fault("kill", "stage", 1, "pipeline"),
    Fault("stop", "stage", 0, "pipeline"),
)
"""These run with the other tests; ``make test-slow`` runs all."""
ALL = [
    Fault(way, phase, rank)
    for way in ("kill", "stop", "be-slow")
    for phase in (*PHASES, WRITING)
    for rank in (0, 1)
    if rank == 0 or phase != WRITING
]
ALL += [
    Fault(way, phase, rank, strategy)
    for way in ("kill", "stop", "be-slow")
    for strategy in ("fsdp", "tensor", "pipeline")
    for phase in (*PHASES, WRITING, PART, "stage")
    for rank in (0, 1)
    if (rank == 0 or phase != WRITING)
    and (strategy == "pipeline" or phase not in ("collective", "stage"))  # that of data parallelism
]


def faults(*ways: str) -> list[Any]:
    return [
        pytest.param(one, id=str(one), marks=() if one in DEFAULT else pytest.mark.slow)
        for one in ALL
        if one.way in ways
    ]


def spec(harness: Harness, fault: Fault | None) -> dict[str, Any]:
    """Twelve steps with evaluations and checkpoints; the fault is in the first attempt."""
    dataset = harness.dataset()
    strategy = "data" if fault is None else fault.strategy
    made = train_spec(
        dataset,
        parallel={"strategy": strategy, "processes": 2},
        stop={"steps": STEPS},
        checkpoint={"every_steps": 5},
        evaluate={"every_steps": 4},
        on_stall="warn" if fault is not None and fault.phase == "rank.end" else "restart",
        stall_timeout_s=1.5,
    )
    made["data"]["validation"] = {"dataset": dataset, "split": "train"}
    if strategy in ("tensor", "pipeline"):  # both processes have all rows
        made["data"]["batch_size"] *= 2
    if strategy == "pipeline":
        made["parallel"] |= {"schedule": "1f1b", "micro_batches": 4}
        for number, layer in enumerate(made["network"]["layers"]):
            layer["stage"] = number // 2
    if fault is not None:
        hit = "each" if fault.way == "be-slow" else HIT.get(fault.phase, "1")
        labels = {"misbehave": fault.way, "at": fault.phase, "hit": hit, "attempts": "1"}
        made["labels"] = labels | {"rank": str(fault.rank)}
    return made


def series(harness: Harness, job_id: str, name: str) -> dict[int, float]:
    """The newest value of each step."""
    return {
        one["step"]: one["values"][name]
        for one in harness.payloads(job_id, "metrics")
        if name in one["values"]
    }


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[int, float]]:
    """The series of a job without faults; filled by the first test that needs them."""
    return {}


def expected(harness: Harness, known: dict[str, dict[int, float]]) -> dict[str, Any]:
    if not known:
        job_id = harness.submit(spec(harness, None))
        job = harness.wait(job_id)
        assert job.state == "succeeded", job.error
        for name in ("loss", "validation/loss"):
            known[name] = series(harness, job_id, name)
        assert [*known["loss"]] == [*range(STEPS)]
    return known


def check_that_nothing_is_left(harness: Harness, job_id: str) -> None:
    pids = {line["pid"] for line in harness.logged("w1", "rank_started") if line["job"] == job_id}
    assert len(pids) >= 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    until(lambda: all(device.job is None for device in harness.devices()))


def check_numbers(harness: Harness, job_id: str, known: dict[str, dict[int, float]]) -> None:
    for name, values in expected(harness, known).items():
        assert series(harness, job_id, name) == pytest.approx(values), name


@pytest.mark.parametrize("fault", faults("kill"))
@pytest.mark.shared_worker("misbehaving")
def test_a_killed_process_is_named_and_the_job_resumes(
    fault: Fault, undisturbed: dict[str, dict[int, float]], harness: Harness
):
    job_id = harness.submit(spec(harness, fault))
    job = harness.wait(job_id)
    assert job.state == "succeeded", job.error
    check_that_nothing_is_left(harness, job_id)
    check_numbers(harness, job_id, undisturbed)
    kinds = [one.exit_kind for one in harness.attempts(job_id)]
    if fault.phase == "rank.end":  # it has done and reported its work
        assert kinds == ["succeeded"], harness.logs()
        return
    assert kinds == ["killed_from_outside", "succeeded"], harness.logs()
    reasons = [one["reason"] for one in harness.payloads(job_id, "state") if one["reason"]]
    assert any(f"rank {fault.rank} " in one and "SIGKILL" in one for one in reasons), reasons
    if fault.phase in (WRITING, PART):  # the previous checkpoint is whole
        assert harness.payloads(job_id, "attempt")[-1]["resumed_from_step"] == 5


@pytest.mark.parametrize("fault", faults("stop"))
@pytest.mark.shared_worker("misbehaving")
def test_a_stopped_process_is_named_and_the_job_resumes(
    fault: Fault, undisturbed: dict[str, dict[int, float]], harness: Harness
):
    job_id = harness.submit(spec(harness, fault))
    job = harness.wait(job_id)
    assert job.state == "succeeded", job.error
    check_that_nothing_is_left(harness, job_id)
    check_numbers(harness, job_id, undisturbed)
    kinds = [one.exit_kind for one in harness.attempts(job_id)]
    if fault.phase == "rank.end":  # it has reported its end: only the process had to be ended
        assert kinds == ["succeeded"], harness.logs()
        return
    assert kinds == ["stalled", "succeeded"], harness.logs()
    (told,) = harness.payloads(job_id, "stalled")
    assert (told["cause"], told["reason"]) == (
        fault.rank,
        f"rank {fault.rank} was stopped by a signal",
    )
    reasons = [one["reason"] for one in harness.payloads(job_id, "state") if one["reason"]]
    assert any(told["reason"] in one for one in reasons), reasons


@pytest.mark.parametrize("fault", faults("be-slow"))
@pytest.mark.shared_worker("misbehaving")
def test_a_slow_process_is_reported_and_not_ended(
    fault: Fault, undisturbed: dict[str, dict[int, float]], harness: Harness
):
    """It takes many times as long as the others for each step."""
    job_id = harness.submit(spec(harness, fault))
    job = harness.wait(job_id)
    assert job.state == "succeeded", job.error
    check_that_nothing_is_left(harness, job_id)
    assert [one.exit_kind for one in harness.attempts(job_id)] == ["succeeded"]
    assert not harness.payloads(job_id, "stalled")
    check_numbers(harness, job_id, undisturbed)
    of_strategy = ("stage",) if fault.strategy == "pipeline" else ("forward", "collective")
    if fault.strategy in ("fsdp", "tensor") or fault.phase not in of_strategy:
        return  # once, outside of the passes; or they wait for each other in the middle of one
    slow, fast = fault.rank, 1 - fault.rank
    values = {
        name: [*series(harness, job_id, f"system/ranks/{name}").values()][-1]
        for name in (
            "slowest",
            *(f"{n}/{part}_s" for n in (0, 1) for part in ("compute", "collective")),
        )
    }
    assert values["slowest"] == slow
    assert values[f"{slow}/compute_s"] > 3 * values[f"{fast}/compute_s"]
    assert values[f"{fast}/collective_s"] > values[f"{slow}/collective_s"]


def artifact(harness: Harness, job_id: str, name: str) -> str:
    with harness.database.read() as tx:
        return harness.artifacts.local(outputs.get(tx, job_id, name).key).read_text()


@pytest.mark.parametrize(
    ("way", "at", "reason", "waits_in"),
    [
        ("sleep", "forward", "rank 1 has not entered all_reduce ", "all_reduce "),
        pytest.param(
            *("sleep", "evaluation", "rank 1 has not entered ", ""), marks=pytest.mark.slow
        ),
        ("sleep", PART, "rank 0 waits for a message of rank 1", "receiving from rank 1"),
        ("sleep", "stage", "rank 1 has not ended the pass of a stage", "receiving from another"),
        pytest.param(
            *("hold-the-gil", "forward", "rank 1 does not answer", "all_reduce "),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("sleep", "start", "rank 1 does not answer", "joining the group"),
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.shared_worker("misbehaving")
def test_a_process_that_hangs_is_named_with_the_collective_that_the_others_wait_in(
    way: str, at: str, reason: str, waits_in: str, harness: Harness
):
    strategy = {"stage": "pipeline", PART: "fsdp"}.get(at, "data")
    made = spec(harness, Fault(way, at, 1, strategy)) | {"on_stall": "fail"}
    job_id = harness.submit(made)
    job = harness.wait(job_id)
    assert job.error is not None
    assert (job.error["code"], job.error["rank"]) == ("stalled", 1)
    assert reason in job.error["message"]
    (told,) = harness.payloads(job_id, "stalled")
    assert told["cause"] == 1
    assert told["reason"] in job.error["message"]
    first, second = told["ranks"]
    assert (first["rank"], first["state"]) == (0, "waiting")
    assert first["waits_in"].startswith(waits_in)
    is_silent = "does not answer" in reason
    assert second == {"rank": 1, "state": "silent" if is_silent else "running", "waits_in": None}
    waits = json.loads(artifact(harness, job_id, "collectives-rank-0.json"))
    if at == "start":  # rank 1 does not listen yet
        assert waits["joining"]
        assert "in connect" in artifact(harness, job_id, "stacks-rank-0.txt")
    elif at == "stage":  # torch records no messages between two processes
        assert waits["between_passes"]
        assert "misbehaving.py" in artifact(harness, job_id, "stacks-rank-1.txt")
    elif at == PART:  # in a thread, while training went on
        assert waits["receives_from"] == 1
        assert "misbehaving.py" in artifact(harness, job_id, "stacks-rank-1.txt")
    else:
        assert not waits["collectives"]["entries"][-1]["retired"]
        assert "misbehaving.py" in artifact(harness, job_id, "stacks-rank-1.txt")
    check_that_nothing_is_left(harness, job_id)
