"""Pausing, interruption and commands through real worker processes."""

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
from safetensors.numpy import load_file

from models.jobs import checkpoints, commands, jobs, pausing
from models.tables import Checkpoint, Command
from tests.integration.worker.harness import Harness, endless, train_spec
from tests.waiting import until


def pause(harness: Harness, job_id: str) -> None:
    with harness.database.write() as tx:
        pausing.request_pause(tx, jobs.get(tx, job_id, None))


def resume(harness: Harness, job_id: str) -> None:
    with harness.database.write() as tx:
        pausing.request_resume(tx, jobs.get(tx, job_id, None))
    harness.ring()


def ask(harness: Harness, job_id: str, **body: Any) -> Command:
    with harness.database.write() as tx:
        return commands.add(tx, jobs.get(tx, job_id, None), body, by="ada")


def answered(harness: Harness, command: Command) -> Command:
    def look() -> Command | None:
        with harness.database.read() as tx:
            found = commands.get(tx, jobs.get(tx, command.job, None), command.id)
        return found if found.state != "pending" else None

    return until(look)


def saved(harness: Harness, job_id: str) -> list[Checkpoint]:
    with harness.database.read() as tx:
        return checkpoints.of_job(tx, job_id)


def losses(harness: Harness, job_id: str) -> dict[int, float]:
    """By step; of a step that was done again, the later one."""
    told = harness.payloads(job_id, "metrics")
    return {one["step"]: one["values"]["loss"] for one in told if "loss" in one["values"]}


def undisturbed(harness: Harness, spec: dict[str, Any], wanted: Sequence[Command]) -> str:
    """A job with the commands of another at their steps; a worker sees it with all of them."""
    with harness.database.write() as tx:
        job = jobs.add(tx, owner="ada", spec=spec, resolved=spec, plan={})
        for command in wanted:
            made = commands.add(tx, job, command.body, by="ada")
            values = {"state": "applied", "step": command.step}
            values |= {"old": command.old, "new": command.new}
            commands.note(tx, job.id, [commands.CommandChange(made.id, values)])
    harness.ring()
    return job.id


def slow(harness: Harness, steps: int = 400, **changes: Any) -> dict[str, Any]:
    """A job of some seconds, with dropout and momentum, so that everything must be restored."""
    spec = endless(harness.dataset(), **changes) | {"stop": {"steps": steps}}
    spec["network"]["layers"].insert(2, {"name": "drop", "type": "Dropout", "args": {"p": 0.2}})
    spec["network"]["layers"][2]["inputs"] = ["act"]
    spec["network"]["layers"][3]["inputs"] = ["drop"]
    spec["optimizer"] = {"type": "SGD", "args": {"lr": 0.01, "momentum": 0.9}}
    return spec


@pytest.mark.shared_worker
def test_a_paused_job_has_its_checkpoint_and_no_device_and_continues(harness: Harness):
    job_id = harness.submit(slow(harness))
    harness.wait_step(job_id, 5)
    pause(harness, job_id)
    paused = harness.wait(job_id, "paused")
    assert all(device.job is None for device in harness.devices())
    assert harness.attempts(job_id)[-1].exit_kind == "paused"
    (newest,) = saved(harness, job_id)[-1:]
    assert not newest.final
    assert newest.step == max(harness.steps(job_id)) + 1
    assert paused.infra_failures == 0
    assert "end" not in [event.type for event in harness.events(job_id)]
    resume(harness, job_id)
    done = harness.wait(job_id)
    assert done.state == "succeeded", (done.error, harness.logs())
    assert harness.job(job_id).paused_ms > 0


@pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
def test_losses_and_weights_after_a_pause_are_those_of_the_undisturbed_job(any_harness: Harness):
    harness = any_harness
    harness.start_worker(CPU_CORES="4")
    spec = slow(harness)
    disturbed, plain = harness.submit(spec), harness.submit(spec)
    for step in (5, 50):
        harness.wait_step(disturbed, step)
        pause(harness, disturbed)
        harness.wait(disturbed, "paused")
        resume(harness, disturbed)
    assert {harness.wait(one).state for one in (disturbed, plain)} == {"succeeded"}, harness.logs()
    assert len(harness.attempts(disturbed)) == 3
    assert losses(harness, disturbed) == losses(harness, plain)
    assert harness.steps(disturbed) == list(range(400))  # none was done twice
    files = [
        load_file(harness.artifacts.local(saved(harness, one)[-1].key) / "model.safetensors")
        for one in (disturbed, plain)
    ]
    assert all((files[0][name] == files[1][name]).all() for name in files[0])


def test_a_paused_job_resumes_bit_for_bit_on_another_machine(harness: Harness):
    """The worker that had it is gone; the other has only the database and the artifacts."""
    harness.start_worker("w1")
    spec = slow(harness, 200)
    moved = harness.submit(spec)
    harness.wait_step(moved, 5)
    pause(harness, moved)
    harness.wait(moved, "paused")
    first = harness.workers.pop("w1")
    first.terminate()
    assert first.wait(60) == 0
    harness.start_worker("w2")
    resume(harness, moved)
    plain = harness.submit(spec)
    assert {harness.wait(one).state for one in (moved, plain)} == {"succeeded"}, harness.logs()
    assert [one.worker for one in harness.attempts(moved)] == ["w1", "w2"]
    assert losses(harness, moved) == losses(harness, plain)
    assert harness.steps(moved) == list(range(200))
    files = [
        load_file(harness.artifacts.local(saved(harness, one)[-1].key) / "model.safetensors")
        for one in (moved, plain)
    ]
    assert all((files[0][name] == files[1][name]).all() for name in files[0])


def test_a_rank_that_reaches_no_step_is_ended_and_its_job_paused_at_its_last_checkpoint(
    harness: Harness,
):
    harness.start_worker(GRACE_S="1", KILL_S="1")
    job_id = harness.submit(endless(harness.dataset(), checkpoint={"every_steps": 3}))
    harness.wait_step(job_id, 5)
    os.kill(harness.rank_pid(job_id), signal.SIGSTOP)
    pause(harness, job_id)
    job = harness.wait(job_id, "paused")
    assert "no step boundary" in (job.state_reason or "")
    assert saved(harness, job_id)[-1].step % 3 == 0
    resume(harness, job_id)
    harness.wait_runs_again(job_id)


@pytest.mark.shared_worker
def test_a_job_that_is_paused_while_it_starts_is_paused(harness: Harness):
    job_id = harness.submit(endless(harness.dataset()))
    until(lambda: harness.job(job_id).state == "starting")
    pause(harness, job_id)
    harness.wait(job_id, "paused")
    resume(harness, job_id)
    harness.wait_step(job_id)
    harness.cancel(job_id)
    assert harness.wait(job_id).state == "cancelled"


@pytest.mark.shared_worker
def test_cancelling_a_job_that_pauses_cancels_it(harness: Harness):
    job_id = harness.submit(endless(harness.dataset()))
    harness.wait_step(job_id)
    os.kill(harness.rank_pid(job_id), signal.SIGSTOP)
    pause(harness, job_id)
    harness.cancel(job_id)
    os.kill(harness.rank_pid(job_id), signal.SIGCONT)
    assert harness.wait(job_id).state == "cancelled"


def test_a_worker_that_is_stopped_saves_what_it_runs(harness: Harness):
    harness.start_workers("w1", "w2")
    job_id = harness.submit(endless(harness.dataset(), checkpoint={"every_steps": 1_000_000}))
    name = harness.wait_step(job_id, 5).worker
    assert name is not None
    began = time.monotonic()
    harness.workers[name].send_signal(signal.SIGTERM)
    assert harness.workers[name].wait(60) == 0, harness.logs()
    assert time.monotonic() - began < 5 + 2 + 5  # grace, kill, and a little
    (first, *_) = harness.attempts(job_id)
    assert (first.state, first.exit_kind) == ("ended", "interrupted")
    (newest,) = saved(harness, job_id)
    assert (newest.attempt, newest.final) == (1, False)
    harness.wait_runs_again(job_id)
    assert harness.job(job_id).infra_failures == 0
    second = harness.attempts(job_id)[-1]
    assert second.worker != name
    assert second.resumed_from_step == newest.step


@pytest.mark.slow
def test_a_worker_that_is_stopped_in_vain_ends_in_time(harness: Harness):
    worker = harness.start_worker(GRACE_S="2", KILL_S="1")
    job_id = harness.submit(endless(harness.dataset()))
    harness.wait_step(job_id)
    os.kill(harness.rank_pid(job_id), signal.SIGSTOP)
    began = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    worker.wait(60)
    assert time.monotonic() - began < 2 + 1 + 5
    assert harness.job(job_id).state == "queued"


@pytest.mark.parametrize("at_once", [False, True], ids=["running", "queued"])
@pytest.mark.shared_worker
def test_a_setting_changes_at_one_step(harness: Harness, at_once: bool):
    spec, change = slow(harness), {"optimizer.lr": 0.5}
    with harness.database.write() as tx:
        job = jobs.add(tx, owner="ada", spec=spec, resolved=spec, plan={})
        early = commands.add(tx, job, {"set": change}, by="ada") if at_once else None
    harness.ring()
    job_id = job.id
    harness.wait_step(job_id, 5)
    command = early or ask(harness, job_id, set=change)
    found = answered(harness, command)
    assert found.state == "applied", found.problem
    assert (found.old, found.new) == ({"optimizer.lr": 0.01}, {"optimizer.lr": 0.5})
    assert (found.step == 0) == at_once
    assert harness.wait(job_id).state == "succeeded", harness.logs()
    (told,) = harness.payloads(job_id, "command")
    assert (told["command"], told["step"], told["by"]) == (command.id, found.step, "ada")
    rates = [m["values"] for m in harness.payloads(job_id, "metrics") if "lr" in m["values"]]
    assert [one["lr"] for one in rates] == [0.01] * found.step + [0.5] * (400 - found.step)


@pytest.mark.parametrize(
    "database_url", [pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"], indirect=True
)
def test_a_setting_survives_the_death_of_its_rank(any_harness: Harness):
    harness = any_harness
    harness.start_worker(CPU_CORES="4")
    spec = slow(harness, steps=600, checkpoint={"every_steps": 20})
    job_id = harness.submit(spec)
    harness.wait_step(job_id, 30)
    first = answered(harness, ask(harness, job_id, set={"optimizer.lr": 0.05}))
    second = answered(harness, ask(harness, job_id, set={"optimizer.momentum": 0.5}))
    os.kill(harness.rank_pid(job_id), signal.SIGKILL)
    done = harness.wait(job_id)
    assert done.state == "succeeded", (done.error, harness.logs())
    assert len(harness.attempts(job_id)) == 2
    for command in (first, second):
        again = answered(harness, command)
        assert (again.state, again.step, again.old) == ("applied", command.step, command.old)
    twin = undisturbed(harness, spec, (first, second))
    assert harness.wait(twin).state == "succeeded", harness.logs()
    assert losses(harness, job_id) == losses(harness, twin)


@pytest.mark.shared_worker
def test_a_checkpoint_and_an_evaluation_are_made_when_asked_for(harness: Harness):
    dataset = harness.dataset()
    data = train_spec(dataset)["data"] | {"validation": {"dataset": dataset, "split": "train"}}
    never = {"every_steps": 1_000_000}
    job_id = harness.submit(endless(dataset, data=data, evaluate=never, checkpoint=never))
    harness.wait_step(job_id, 3)
    done = [answered(harness, ask(harness, job_id, do=what)) for what in ("checkpoint", "evaluate")]
    assert [one.state for one in done] == ["applied", "applied"]
    until(lambda: [row.step for row in saved(harness, job_id)] == [done[0].step])
    judged = until(
        lambda: [
            one["step"]
            for one in harness.payloads(job_id, "metrics")
            if "validation/loss" in one["values"]
        ]
    )
    assert done[1].step is not None
    assert judged == [done[1].step - 1]
    refused = answered(harness, ask(harness, job_id, set={"stop.steps": 1}))
    assert refused.problem is not None
    assert (refused.state, refused.problem["pointer"]) == ("rejected", "/set/stop.steps")
    harness.cancel(job_id)
    harness.wait(job_id)
