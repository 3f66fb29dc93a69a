"""How attempts end, by real processes that misbehave: what it is called, and what then happens."""

import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from glasshouse import processes
from models.jobs import checkpoints
from tests.integration.worker.harness import Harness, endless, train_spec
from tests.waiting import until
from worker.attempt import logs

SHARED = Path("/dev", "shm")


def misbehaving(way: str, at: str | int = "start", **more: Any) -> dict[str, str]:
    return {"misbehave": way, "at": str(at), **{key: str(value) for key, value in more.items()}}


def kinds(harness: Harness, job_id: str) -> list[str | None]:
    return [one.exit_kind for one in harness.attempts(job_id)]


def members(harness: Harness, job_id: str) -> Callable[[], list[processes.Identity]]:
    """What is left of the newest rank's session."""
    leader = processes.identify(harness.rank_pid(job_id))
    assert leader is not None
    return lambda: processes.session_of(leader)


@pytest.mark.parametrize(
    ("way", "kind", "word"),
    [
        ("crash", "crash", "SIGSEGV"),
        pytest.param("abort", "crash", "SIGABRT", marks=pytest.mark.slow),
        pytest.param("exit", "crash", "status 3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.shared_worker("misbehaving")
def test_a_job_that_crashes_on_every_start_is_given_up_after_three_and_others_continue(
    way: str, kind: str, word: str, harness: Harness
):
    dataset = harness.dataset()
    other = harness.submit(endless(dataset))
    harness.wait_step(other)
    job_id = harness.submit(endless(dataset, labels=misbehaving(way)))
    job = harness.wait(job_id)
    assert job.state == "failed"
    assert kinds(harness, job_id) == [kind] * 3
    assert job.error is not None
    assert job.error["code"] == "crash_loop"
    assert word in job.error["message"]
    assert not job.error["retryable"]
    assert harness.job(other).attempt == 1
    assert harness.job(other).state == "running"


def test_a_temporary_crash_is_retried_with_exponential_backoff(harness: Harness):
    harness.start_worker(misbehaving=True, RETRY_S="0.8")
    job_id = harness.submit(train_spec(harness.dataset(), labels=misbehaving("crash", attempts=2)))
    until(lambda: harness.attempts(job_id) and harness.attempts(job_id)[0].exit_kind)
    waiting = harness.job(job_id)
    if (waiting.state, waiting.attempt) == ("queued", 1):  # not yet tried again
        assert waiting.not_before_ms is not None
        assert waiting.state_reason == (
            "rank 0 crashed: it was killed by SIGSEGV; failure 1 of 4 without progress"
        )
    job = harness.wait(job_id)
    assert job.state == "succeeded", (job.error, harness.logs())
    assert kinds(harness, job_id) == ["crash", "crash", "succeeded"]
    first, second, third = harness.attempts(job_id)
    for earlier, later, wait_s in ((first, second, 0.8), (second, third, 1.6)):
        assert earlier.ended_at is not None
        # one clock reads the database's time, the other this host's: a millisecond either way
        assert (later.created_at - earlier.ended_at).total_seconds() >= wait_s - 0.005
    assert harness.job(job_id).not_before_ms is None


@pytest.mark.shared_worker("misbehaving")
def test_a_spec_may_forbid_restarts(harness: Harness):
    labels = misbehaving("crash", 2)
    job = harness.wait(
        harness.submit(endless(harness.dataset(), labels=labels, retry={"max_restarts": 0}))
    )
    assert job.state == "failed"
    assert job.attempt == 1
    assert job.error is not None
    assert job.error["code"] == "rank_died"
    assert "SIGSEGV" in job.error["message"]


@pytest.mark.shared_worker("misbehaving")
def test_memory_that_runs_out_is_reported_with_what_was_asked_for_and_what_was_planned(
    harness: Harness,
):
    spec = endless(harness.dataset(), labels=misbehaving("ask-for-memory", 2))
    job_id = harness.submit(spec, plan={"memory": {"activations_bytes": 2, "parameters_bytes": 1}})
    job = harness.wait(job_id)
    assert job.error is not None
    assert (job.error["code"], job.error["category"]) == ("out_of_memory", "out_of_memory")
    assert kinds(harness, job_id) == ["oom_host"]
    assert (job.error["rank"], job.error["step"]) == (0, 2)
    memory = job.error["memory"]
    assert memory["where"] == "host"
    assert memory["requested_bytes"] == 2**60
    assert 0 < memory["free_bytes"] <= memory["limit_bytes"]
    assert memory["peak_bytes"] > 2**20
    assert memory["planned"]["activations_bytes"] == 2
    assert "data.batch_size" in job.error["hint"]


def growing(dataset: str, **changes: Any) -> dict[str, Any]:
    """A job of three steps, in which one of 16 rows needs 128 MiB, and one of two rows 16."""
    spec = train_spec(dataset, stop={"steps": 3}, **changes)
    layers = spec["network"]["layers"]
    rows = {"type": "Unflatten", "args": {"dim": 1, "unflattened_size": [1, 8]}}
    up = {"type": "Upsample", "args": {"scale_factor": float(2**17)}}
    pool = {"type": "AdaptiveAvgPool1d", "args": {"output_size": 2}}
    layers[1:] = [
        {"name": "rows", **rows, "inputs": ["fc1"]},
        {"name": "up", **up, "inputs": ["rows"]},
        {"name": "act", "type": "Sigmoid", "args": {}, "inputs": ["up"]},
        {"name": "pool", **pool, "inputs": ["act"]},
        {"name": "fc2", "type": "Flatten", "args": {}, "inputs": ["pool"]},
    ]
    return spec


@pytest.mark.shared_worker("misbehaving")
def test_a_job_that_runs_out_of_memory_continues_with_smaller_batches(harness: Harness):
    cap = 50 * 2**20 / psutil.virtual_memory().total
    guards = {"memory": {"on_oom": "halve_batch", "cap_fraction": cap}}
    dataset = harness.dataset()
    job_id = harness.submit(growing(dataset, guards=guards))
    whole = harness.submit(growing(dataset))
    job = harness.wait(job_id)
    assert job.state == "succeeded", job.error
    *halved, last = kinds(harness, job_id)
    assert len(halved) > 1
    assert set(halved) == {"oom_halved"}
    assert last == "succeeded"
    rows = [(item["from"], item["to"]) for item in harness.payloads(job_id, "adjusted")]
    assert rows == [(16, 16 // 2**number) for number in range(1, len(halved) + 1)]
    assert harness.steps(job_id) == [*range(3)]
    assert harness.wait(whole).state == "succeeded"

    def losses(job: str) -> list[float]:
        metrics = harness.payloads(job, "metrics")
        return [item["values"]["loss"] for item in metrics if "loss" in item["values"]]

    assert losses(job_id) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.shared_worker("misbehaving")
def test_batches_are_halved_down_to_one_row_and_training_resumes_from_a_checkpoint(
    harness: Harness,
):
    labels = misbehaving("ask-for-memory", 5)
    guards = {"memory": {"on_oom": "halve_batch"}}
    saving = {"every_steps": 2}
    spec = train_spec(harness.dataset(), labels=labels, guards=guards, checkpoint=saving)
    job_id = harness.submit(spec)
    job = harness.wait(job_id)
    assert kinds(harness, job_id) == [*["oom_halved"] * 4, "oom_host"]
    assert [one.resumed_from_step for one in harness.attempts(job_id)] == [None, 4, 4, 4, 4]
    assert job.error is not None
    assert job.error["code"] == "out_of_memory"
    assert "one row at a time already" in job.error["message"]
    moves = harness.payloads(job_id, "state")
    reasons = [item["reason"] for item in moves if item["to"] == "queued" and item["reason"]]
    assert [text.rpartition("; ")[2] for text in reasons] == [
        f"each batch is run in {parts} parts now" for parts in (2, 4, 8, 16)
    ]


@pytest.mark.parametrize(
    ("way", "kind", "code"),
    [
        ("fill-the-disk", "disk_full", "disk_full"),
        ("lose-the-device", "device", "device_failed"),
        ("kill", "killed_from_outside", "worker_lost"),
    ],
)
@pytest.mark.shared_worker("misbehaving")
def test_failures_of_the_service_are_retried_and_keep_their_names(
    way: str, kind: str, code: str, harness: Harness
):
    spec = endless(harness.dataset(), labels=misbehaving(way, 2), retry={"max_restarts": 1})
    job_id = harness.submit(spec)
    job = harness.wait(job_id)
    assert job.state == "failed"
    assert kinds(harness, job_id) == [kind] * 2
    assert job.error is not None
    assert job.error["code"] == code
    assert "2" in job.error["message"]


@pytest.mark.shared_worker
def test_an_index_out_of_range_names_the_layer_and_is_not_retried(harness: Harness):
    spec = train_spec(harness.dataset())
    spec["data"]["fields"]["y"]["dim"] = 3
    table = {"name": "table", "type": "Embedding", "inputs": ["y"]}
    table["args"] = {"num_embeddings": 1, "embedding_dim": 8}  # the labels are 0 and 1
    add = {"name": "add", "type": "add", "args": {}, "inputs": ["act", "table"]}
    spec["network"]["layers"][2:2] = [table, add]
    spec["network"]["layers"][4]["inputs"] = ["add"]
    job_id = harness.submit(spec)
    job = harness.wait(job_id)
    assert job.error is not None
    assert job.error["layer"] == "table"
    assert (job.error["category"], job.error["step"], job.error["rank"]) == ("data", 0, 0)
    assert "num_embeddings" in job.error["hint"]
    assert kinds(harness, job_id) == ["user_error"]


@pytest.mark.shared_worker
def test_a_failure_by_numbers_that_are_nan_or_inf_names_the_first_bad_layer(harness: Harness):
    spec = train_spec(harness.dataset())
    spec["loss"] = {"type": "BCELoss", "args": {}, "inputs": ["root", "target"]}
    spec["network"]["layers"] += [
        {"name": "root", "type": "log", "args": {}, "inputs": ["fc2"]},  # of negative numbers
        {"name": "target", "type": "sigmoid", "args": {}, "inputs": ["fc2"]},
    ]
    job_id = harness.submit(spec)
    job = harness.wait(job_id)
    assert job.error is not None
    assert (job.error["code"], job.error["category"]) == ("non_finite", "nonfinite"), job.error
    assert (job.error["layer"], job.error["step"]) == ("root", 0)
    assert "forward" in job.error["message"]
    assert kinds(harness, job_id) == ["nonfinite"]


def test_a_rank_that_holds_the_gil_keeps_its_lease_and_is_reported_as_stalled(harness: Harness):
    harness.start_worker(
        misbehaving=True, LEASE_S="2", STALL_TIMEOUT_S="1", GRACE_S="1", KILL_S="1"
    )
    job_id = harness.submit(endless(harness.dataset(), labels=misbehaving("hold-the-gil", 3)))
    (told,) = until(lambda: harness.payloads(job_id, "stalled"))
    assert told["step"] is None or told["step"] >= 0
    assert told["seconds"] >= 1
    assert told["action"] == "warn"
    before = harness.job(job_id).lease_expires_ms
    assert before is not None
    until(lambda: (harness.job(job_id).lease_expires_ms or 0) > before + 4000)  # twice the lease
    job = harness.job(job_id)
    assert (job.state, job.attempt) == ("running", 1)
    assert len(harness.payloads(job_id, "stalled")) == 1
    harness.cancel(job_id)
    assert harness.wait(job_id).state == "cancelled"
    assert kinds(harness, job_id) == ["killed"]


@pytest.mark.shared_worker("misbehaving")
def test_a_job_that_continues_after_a_stall_ends_well(harness: Harness):
    spec = train_spec(harness.dataset(), labels=misbehaving("doze", 3), stall_timeout_s=0.6)
    job_id = harness.submit(spec)
    assert harness.wait(job_id).state == "succeeded"
    assert len(harness.payloads(job_id, "stalled")) == 1


@pytest.mark.parametrize(
    ("on_stall", "ends"),
    [
        ("restart", ["stalled", "succeeded"]),
        pytest.param("fail", ["stalled"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.shared_worker("misbehaving")
def test_a_spec_may_want_more_than_a_word_about_a_stall(
    on_stall: str, ends: list[str], harness: Harness
):
    spec = train_spec(harness.dataset(), labels=misbehaving("sleep", 3, attempts=1))
    job_id = harness.submit(spec | {"stall_timeout_s": 1.0, "on_stall": on_stall})
    job = harness.wait(job_id)
    assert kinds(harness, job_id) == ends, harness.logs()
    (told,) = harness.payloads(job_id, "stalled")
    assert told["action"] == on_stall
    if on_stall == "fail":
        assert job.error is not None
        assert (job.error["code"], job.error["category"]) == ("stalled", "timeout")


@pytest.mark.shared_worker
def test_a_job_that_takes_too_long_is_stopped_saved_and_has_failed(harness: Harness):
    job_id = harness.submit(endless(harness.dataset(), timeout_s=1.0))
    job = harness.wait(job_id)
    assert job.state == "failed"
    assert kinds(harness, job_id) == ["timeout"]
    assert job.error is not None
    assert (job.error["code"], job.error["category"]) == ("timeout", "timeout")
    with harness.database.read() as tx:
        saved = checkpoints.of_job(tx, job_id)
    assert saved
    assert saved[-1].step == len(harness.steps(job_id))


@pytest.mark.shared_worker("misbehaving")
def test_a_job_that_takes_too_long_and_does_not_listen_is_killed(harness: Harness):
    job_id = harness.submit(
        endless(harness.dataset(), timeout_s=1.0, labels=misbehaving("be-unresponsive", "start"))
    )
    assert harness.wait(job_id).state == "failed"
    assert kinds(harness, job_id) == ["timeout"]


@pytest.mark.shared_worker("misbehaving")
def test_the_time_of_all_attempts_counts(harness: Harness):
    labels = misbehaving("doze", "start", attempts=1)
    job_id = harness.submit(endless(harness.dataset(), timeout_s=4.0, labels=labels))
    harness.wait_step(job_id)
    os.kill(harness.rank_pid(job_id), signal.SIGKILL)
    harness.wait(job_id)
    assert kinds(harness, job_id) == ["killed_from_outside", "timeout"]
    first, second = harness.attempts(job_id)
    assert second.claimed_at is not None
    assert second.ended_at is not None
    assert first.claimed_at is not None
    assert first.ended_at is not None
    spent = first.ended_at - first.claimed_at
    assert (second.ended_at - second.claimed_at + spent).total_seconds() >= 4
    assert (second.ended_at - second.claimed_at).total_seconds() < 4 - 2 + 5


def shared() -> set[str]:
    """What torch and Python have in shared memory: databases of other tests come and go there."""
    return {path.name for path in SHARED.iterdir() if not path.name.startswith("PostgreSQL.")}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.shared_worker("misbehaving")
def test_nothing_of_a_cancelled_job_is_left(force: bool, harness: Harness):
    before = shared()
    job_id = harness.submit(endless(harness.dataset(), labels=misbehaving("leave-children", 1)))
    harness.wait_step(job_id, 3)
    left = members(harness, job_id)
    assert len(left()) == 3
    harness.cancel(job_id, force=force)
    assert harness.wait(job_id).state == "cancelled"
    assert left() == []
    assert shared() <= before


@pytest.mark.shared_worker("misbehaving")
def test_a_rank_that_prints_without_end_is_not_held_up_and_fills_no_disk(harness: Harness):
    job_id = harness.submit(endless(harness.dataset(), labels=misbehaving("print", 2)))
    pid = harness.rank_pid(job_id)
    directory = harness.home / "work" / "w1" / job_id / "1" / "logs"
    written, largest = 0, 0

    def printed_much() -> bool:
        nonlocal written, largest
        written = psutil.Process(pid).io_counters().write_chars  # type: ignore[attr-defined]
        sizes = [path.stat().st_size for path in directory.iterdir()]  # empty at first
        largest = max([largest, *sizes])
        return written > 40 * logs.MAX_STREAM_BYTES

    until(printed_much)
    assert largest < 20 * logs.MAX_STREAM_BYTES  # what it prints between two looks, and the limit
    until(lambda: harness.payloads(job_id, "dropped"))
    harness.cancel(job_id, force=True)
    assert harness.wait(job_id).state == "cancelled"
    kept = sum(len("".join(one["lines"])) for one in harness.payloads(job_id, "log"))
    assert kept <= 2 * logs.MAX_STREAM_BYTES


def test_a_job_stands_still_while_too_much_of_it_waits_for_the_database(harness: Harness):
    harness.start_worker(MAX_BACKLOG_BYTES="60000", LEASE_S="60")
    job_id = harness.submit(endless(harness.dataset()))
    harness.wait_step(job_id)
    spool = harness.home / "work" / "w1" / job_id / "1" / "spool"
    rank = psutil.Process(harness.rank_pid(job_id))
    lock = sqlite3.connect(harness.home / "test.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    try:
        until(lambda: rank.status() == psutil.STATUS_STOPPED)
        held_at = spool.stat().st_size
        until(lambda: harness.logged("w1", "rank_held"))
        assert spool.stat().st_size == held_at
    finally:
        lock.execute("ROLLBACK")
        lock.close()
    until(lambda: harness.logged("w1", "rank_continues"))
    harness.wait_step(job_id, len(harness.steps(job_id)) + 50)
    harness.cancel(job_id)
    assert harness.wait(job_id).state == "cancelled", harness.logs()
    steps = harness.steps(job_id)
    assert steps == list(range(len(steps)))


def test_a_stalled_job_can_be_cancelled(harness: Harness):
    harness.start_worker(MAX_BACKLOG_BYTES="1", LEASE_S="60")
    job_id = harness.submit(endless(harness.dataset()))
    rank = psutil.Process(harness.rank_pid(job_id))
    until(lambda: harness.logged("w1", "rank_held"))
    harness.cancel(job_id)
    assert harness.wait(job_id).state == "cancelled"
    assert not rank.is_running()


def test_a_process_that_cannot_be_killed_fails_its_job_and_keeps_its_device(harness: Harness):
    variables = {"GRACE_S": "0.3", "KILL_S": "0.3", "UNKILLABLE_S": "1", "INVENTORY_S": "1"}
    harness.start_worker(misbehaving=True, **variables)
    dataset = harness.dataset()
    (harness.home / "unkillable").touch()  # signals are lost, as on a process in the kernel
    spec = endless(dataset, timeout_s=0.5, labels=misbehaving("hold-the-gil", 1))
    job_id = harness.submit(spec)
    pid = harness.rank_pid(job_id)
    job = harness.wait(job_id)
    assert job.state == "failed"
    assert kinds(harness, job_id) == ["unkillable"]
    assert job.error is not None
    assert (job.error["code"], job.error["category"]) == ("unkillable", "device")
    held = {device["id"] for device in job.devices}

    def unhealthy() -> set[str]:
        return {device.id for device in harness.devices() if not device.healthy}

    assert unhealthy() == held
    assert processes.identify(pid) is not None
    (harness.home / "unkillable").unlink()
    until(lambda: any(str(pid) in (device.reason or "") for device in harness.devices()))
    assert unhealthy() == held  # the inventory has looked, and knows better
    other = harness.submit(train_spec(dataset))
    assert harness.wait(other).state == "succeeded"
    assert {device["id"] for device in harness.job(other).devices}.isdisjoint(held)
    os.kill(pid, signal.SIGKILL)
    until(lambda: unhealthy() == set())
