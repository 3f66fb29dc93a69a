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
from tests.integration.worker.shop import Shop, endless, train_spec
from tests.waiting import until


def pause(shop: Shop, job_id: str) -> None:
    with shop.database.write() as tx:
        pausing.request_pause(tx, jobs.get(tx, job_id, None))


def resume(shop: Shop, job_id: str) -> None:
    with shop.database.write() as tx:
        pausing.request_resume(tx, jobs.get(tx, job_id, None))
    shop.ring()


def ask(shop: Shop, job_id: str, **body: Any) -> Command:
    with shop.database.write() as tx:
        return commands.add(tx, jobs.get(tx, job_id, None), body, by="ada")


def answered(shop: Shop, command: Command) -> Command:
    def look() -> Command | None:
        with shop.database.read() as tx:
            found = commands.get(tx, jobs.get(tx, command.job, None), command.id)
        return found if found.state != "pending" else None

    return until(look)


def saved(shop: Shop, job_id: str) -> list[Checkpoint]:
    with shop.database.read() as tx:
        return checkpoints.of_job(tx, job_id)


def losses(shop: Shop, job_id: str) -> dict[int, float]:
    """By step; of a step that was done again, the later one."""
    told = shop.payloads(job_id, "metrics")
    return {one["step"]: one["values"]["loss"] for one in told if "loss" in one["values"]}


def undisturbed(shop: Shop, spec: dict[str, Any], wanted: Sequence[Command]) -> str:
    """A job with the commands of another at their steps; a worker sees it with all of them."""
    with shop.database.write() as tx:
        job = jobs.add(tx, owner="ada", spec=spec, resolved=spec, plan={})
        for command in wanted:
            made = commands.add(tx, job, command.body, by="ada")
            values = {"state": "applied", "step": command.step}
            values |= {"old": command.old, "new": command.new}
            commands.note(tx, job.id, [commands.CommandChange(made.id, values)])
    shop.ring()
    return job.id


def slow(shop: Shop, steps: int = 400, **changes: Any) -> dict[str, Any]:
    """A job of some seconds, with dropout and momentum, so that everything must be restored."""
    spec = endless(shop.dataset(), **changes) | {"stop": {"steps": steps}}
    spec["network"]["layers"].insert(2, {"name": "drop", "type": "Dropout", "args": {"p": 0.2}})
    spec["network"]["layers"][2]["inputs"] = ["act"]
    spec["network"]["layers"][3]["inputs"] = ["drop"]
    spec["optimizer"] = {"type": "SGD", "args": {"lr": 0.01, "momentum": 0.9}}
    return spec


@pytest.mark.staffed
def test_a_paused_job_has_its_checkpoint_and_no_device_and_goes_on(shop: Shop):
    job_id = shop.submit(slow(shop))
    shop.wait_step(job_id, 5)
    pause(shop, job_id)
    paused = shop.wait(job_id, "paused")
    assert all(device.job is None for device in shop.devices())
    assert shop.attempts(job_id)[-1].exit_kind == "paused"
    (newest,) = saved(shop, job_id)[-1:]
    assert not newest.final
    assert newest.step == max(shop.steps(job_id)) + 1
    assert paused.infra_failures == 0
    assert "end" not in [event.type for event in shop.events(job_id)]
    resume(shop, job_id)
    done = shop.wait(job_id)
    assert done.state == "succeeded", (done.error, shop.logs())
    assert shop.job(job_id).paused_ms > 0


@pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
def test_losses_and_weights_after_a_pause_are_those_of_the_undisturbed_job(any_shop: Shop):
    shop = any_shop
    shop.start_worker(CPU_CORES="4")
    spec = slow(shop)
    disturbed, plain = shop.submit(spec), shop.submit(spec)
    for step in (5, 50):
        shop.wait_step(disturbed, step)
        pause(shop, disturbed)
        shop.wait(disturbed, "paused")
        resume(shop, disturbed)
    assert {shop.wait(one).state for one in (disturbed, plain)} == {"succeeded"}, shop.logs()
    assert len(shop.attempts(disturbed)) == 3
    assert losses(shop, disturbed) == losses(shop, plain)
    assert shop.steps(disturbed) == list(range(400))  # none was done twice
    files = [
        load_file(shop.artifacts.local(saved(shop, one)[-1].key) / "model.safetensors")
        for one in (disturbed, plain)
    ]
    assert all((files[0][name] == files[1][name]).all() for name in files[0])


def test_a_paused_job_goes_on_bit_for_bit_on_another_machine(shop: Shop):
    """The worker that had it is gone; the other has only the database and the artifacts."""
    shop.start_worker("w1")
    spec = slow(shop, 200)
    moved = shop.submit(spec)
    shop.wait_step(moved, 5)
    pause(shop, moved)
    shop.wait(moved, "paused")
    first = shop.workers.pop("w1")
    first.terminate()
    assert first.wait(60) == 0
    shop.start_worker("w2")
    resume(shop, moved)
    plain = shop.submit(spec)
    assert {shop.wait(one).state for one in (moved, plain)} == {"succeeded"}, shop.logs()
    assert [one.worker for one in shop.attempts(moved)] == ["w1", "w2"]
    assert losses(shop, moved) == losses(shop, plain)
    assert shop.steps(moved) == list(range(200))
    files = [
        load_file(shop.artifacts.local(saved(shop, one)[-1].key) / "model.safetensors")
        for one in (moved, plain)
    ]
    assert all((files[0][name] == files[1][name]).all() for name in files[0])


def test_a_rank_that_reaches_no_step_is_ended_and_its_job_paused_at_its_last_checkpoint(shop: Shop):
    shop.start_worker(GRACE_S="1", KILL_S="1")
    job_id = shop.submit(endless(shop.dataset(), checkpoint={"every_steps": 3}))
    shop.wait_step(job_id, 5)
    os.kill(shop.rank_pid(job_id), signal.SIGSTOP)
    pause(shop, job_id)
    job = shop.wait(job_id, "paused")
    assert "no step boundary" in (job.state_reason or "")
    assert saved(shop, job_id)[-1].step % 3 == 0
    resume(shop, job_id)
    shop.wait_runs_again(job_id)


@pytest.mark.staffed
def test_a_job_that_is_paused_while_it_starts_is_paused(shop: Shop):
    job_id = shop.submit(endless(shop.dataset()))
    until(lambda: shop.job(job_id).state == "starting")
    pause(shop, job_id)
    shop.wait(job_id, "paused")
    resume(shop, job_id)
    shop.wait_step(job_id)
    shop.cancel(job_id)
    assert shop.wait(job_id).state == "cancelled"


@pytest.mark.staffed
def test_cancelling_a_job_that_pauses_cancels_it(shop: Shop):
    job_id = shop.submit(endless(shop.dataset()))
    shop.wait_step(job_id)
    os.kill(shop.rank_pid(job_id), signal.SIGSTOP)
    pause(shop, job_id)
    shop.cancel(job_id)
    os.kill(shop.rank_pid(job_id), signal.SIGCONT)
    assert shop.wait(job_id).state == "cancelled"


def test_a_worker_that_is_stopped_saves_what_it_runs(shop: Shop):
    shop.start_workers("w1", "w2")
    job_id = shop.submit(endless(shop.dataset(), checkpoint={"every_steps": 1_000_000}))
    name = shop.wait_step(job_id, 5).worker
    assert name is not None
    began = time.monotonic()
    shop.workers[name].send_signal(signal.SIGTERM)
    assert shop.workers[name].wait(60) == 0, shop.logs()
    assert time.monotonic() - began < 5 + 2 + 5  # grace, kill, and a little
    (first, *_) = shop.attempts(job_id)
    assert (first.state, first.exit_kind) == ("ended", "interrupted")
    (newest,) = saved(shop, job_id)
    assert (newest.attempt, newest.final) == (1, False)
    shop.wait_runs_again(job_id)
    assert shop.job(job_id).infra_failures == 0
    second = shop.attempts(job_id)[-1]
    assert second.worker != name
    assert second.resumed_from_step == newest.step


@pytest.mark.slow
def test_a_worker_that_is_stopped_in_vain_ends_in_time(shop: Shop):
    worker = shop.start_worker(GRACE_S="2", KILL_S="1")
    job_id = shop.submit(endless(shop.dataset()))
    shop.wait_step(job_id)
    os.kill(shop.rank_pid(job_id), signal.SIGSTOP)
    began = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    worker.wait(60)
    assert time.monotonic() - began < 2 + 1 + 5
    assert shop.job(job_id).state == "queued"


@pytest.mark.parametrize("at_once", [False, True], ids=["running", "queued"])
@pytest.mark.staffed
def test_a_setting_changes_at_one_step(shop: Shop, at_once: bool):
    spec, change = slow(shop), {"optimizer.lr": 0.5}
    with shop.database.write() as tx:
        job = jobs.add(tx, owner="ada", spec=spec, resolved=spec, plan={})
        early = commands.add(tx, job, {"set": change}, by="ada") if at_once else None
    shop.ring()
    job_id = job.id
    shop.wait_step(job_id, 5)
    command = early or ask(shop, job_id, set=change)
    found = answered(shop, command)
    assert found.state == "applied", found.problem
    assert (found.old, found.new) == ({"optimizer.lr": 0.01}, {"optimizer.lr": 0.5})
    assert (found.step == 0) == at_once
    assert shop.wait(job_id).state == "succeeded", shop.logs()
    (told,) = shop.payloads(job_id, "command")
    assert (told["command"], told["step"], told["by"]) == (command.id, found.step, "ada")
    rates = [m["values"] for m in shop.payloads(job_id, "metrics") if "lr" in m["values"]]
    assert [one["lr"] for one in rates] == [0.01] * found.step + [0.5] * (400 - found.step)


@pytest.mark.parametrize(
    "database_url", [pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"], indirect=True
)
def test_a_setting_survives_the_death_of_its_rank(any_shop: Shop):
    shop = any_shop
    shop.start_worker(CPU_CORES="4")
    spec = slow(shop, steps=600, checkpoint={"every_steps": 20})
    job_id = shop.submit(spec)
    shop.wait_step(job_id, 30)
    first = answered(shop, ask(shop, job_id, set={"optimizer.lr": 0.05}))
    second = answered(shop, ask(shop, job_id, set={"optimizer.momentum": 0.5}))
    os.kill(shop.rank_pid(job_id), signal.SIGKILL)
    done = shop.wait(job_id)
    assert done.state == "succeeded", (done.error, shop.logs())
    assert len(shop.attempts(job_id)) == 2
    for command in (first, second):
        again = answered(shop, command)
        assert (again.state, again.step, again.old) == ("applied", command.step, command.old)
    twin = undisturbed(shop, spec, (first, second))
    assert shop.wait(twin).state == "succeeded", shop.logs()
    assert losses(shop, job_id) == losses(shop, twin)


@pytest.mark.staffed
def test_a_checkpoint_and_an_evaluation_are_made_when_asked_for(shop: Shop):
    dataset = shop.dataset()
    data = train_spec(dataset)["data"] | {"validation": {"dataset": dataset, "split": "train"}}
    never = {"every_steps": 1_000_000}
    job_id = shop.submit(endless(dataset, data=data, evaluate=never, checkpoint=never))
    shop.wait_step(job_id, 3)
    done = [answered(shop, ask(shop, job_id, do=what)) for what in ("checkpoint", "evaluate")]
    assert [one.state for one in done] == ["applied", "applied"]
    until(lambda: [row.step for row in saved(shop, job_id)] == [done[0].step])
    judged = until(
        lambda: [
            one["step"]
            for one in shop.payloads(job_id, "metrics")
            if "validation/loss" in one["values"]
        ]
    )
    assert done[1].step is not None
    assert judged == [done[1].step - 1]
    refused = answered(shop, ask(shop, job_id, set={"stop.steps": 1}))
    assert refused.problem is not None
    assert (refused.state, refused.problem["pointer"]) == ("rejected", "/set/stop.steps")
    shop.cancel(job_id)
    shop.wait(job_id)
