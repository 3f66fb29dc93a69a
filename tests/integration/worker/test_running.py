"""Jobs through a real worker process: Celery, fork server, engine, Valkey, SQL."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from glasshouse import processes
from models.fleet import workers
from models.jobs import attempts, checkpoints
from tests.integration.worker.conftest import Broker
from tests.integration.worker.harness import Harness, endless, train_spec
from tests.waiting import until
from worker.processes.fork_server import FIXED, PASSED, SOCKET_VARIABLE


def group_gone(pid: int) -> bool:
    return processes.identify(pid) is None


@pytest.mark.shared_worker
def test_a_job_runs_to_its_end(harness: Harness):
    saving = {"every_steps": 5, "keep_last": 2}
    probe = {"layers": ["fc*"], "kinds": ["output"], "every": 10, "want": ["stats", "full"]}
    probe["max_overhead"] = None
    job_id = harness.submit(train_spec(harness.dataset(), checkpoint=saving, probes=[probe]))
    job = harness.wait(job_id)
    assert job.state == "succeeded", (job.error, harness.logs())

    seqs = [event.seq for event in harness.events(job_id)]
    assert seqs == list(range(1, len(seqs) + 1))
    types = [event.type for event in harness.events(job_id)]
    assert types[-2:] == ["state", "end"]
    assert types.count("end") == 1
    assert harness.steps(job_id) == list(range(20))
    moves = [(move["from"], move["to"]) for move in harness.payloads(job_id, "state")]
    assert moves == [
        (None, "queued"),
        ("queued", "starting"),
        ("starting", "running"),
        ("running", "succeeded"),
    ]
    assert job.progress is not None
    assert job.progress["step"] == 20
    assert job.summary["loss"]["min"] <= job.summary["loss"]["max"]

    with harness.database.read() as tx:
        saved = checkpoints.of_job(tx, job_id)
    assert [row.step for row in saved] == [15, 20]
    assert saved[-1].final
    for row in saved:
        assert (harness.artifacts.local(row.key) / "model.safetensors").exists()
    kept = list((harness.settings.artifacts / "jobs" / job_id / "1" / "checkpoints").iterdir())
    assert len(kept) == 2
    captured = harness.payloads(job_id, "capture")
    assert {(one["layer"], one["step"]) for one in captured} == {
        (layer, step) for layer in ("fc1", "fc2") for step in (0, 10)
    }
    assert all(device.job is None for device in harness.devices())
    until(lambda: not list((harness.home / "work" / "w1").glob("job_*")))  # after the database


@pytest.mark.shared_worker
def test_a_trained_network_can_be_run_on_inline_rows(harness: Harness):
    trained = harness.submit(train_spec(harness.dataset()))
    assert harness.wait(trained).state == "succeeded", harness.logs()
    with harness.database.read() as tx:
        checkpoint = checkpoints.of_job(tx, trained)[-1].id
    spec = {
        "kind": "infer",
        "checkpoint": checkpoint,
        "inputs": {"x": [[0.0, 1.0, 2.0, 3.0]]},
        "outputs": ["fc2"],
        "fields": ["value"],
        "devices": {"type": "cpu", "threads": 1},
    }
    job = harness.wait(harness.submit(spec))
    assert job.state == "succeeded", (job.error, harness.logs())
    assert job.result is not None


@pytest.mark.shared_worker
def test_a_cancelled_job_stops_at_a_step_boundary_and_frees_its_device(harness: Harness):
    job_id = harness.submit(endless(harness.dataset()))
    harness.wait_step(job_id)
    harness.cancel(job_id)
    job = harness.wait(job_id)
    assert job.state == "cancelled"
    assert harness.attempts(job_id)[-1].exit_kind == "cancelled"
    assert all(device.job is None for device in harness.devices())


@pytest.mark.shared_worker
def test_force_ends_a_rank_that_does_not_listen(harness: Harness):
    job_id = harness.submit(endless(harness.dataset()))
    harness.wait_step(job_id)
    pid = harness.rank_pid(job_id)
    os.kill(pid, signal.SIGSTOP)  # neither a step boundary nor SIGTERM is reached
    harness.cancel(job_id, force=True)
    job = harness.wait(job_id)
    assert job.state == "cancelled"
    assert harness.attempts(job_id)[-1].exit_kind == "killed"
    until(lambda: group_gone(pid))


@pytest.mark.shared_worker
def test_a_rank_killed_from_outside_runs_again(harness: Harness):
    job_id = harness.submit(train_spec(harness.dataset(), stop={"seconds": 4.0}))
    harness.wait_step(job_id)
    os.kill(harness.rank_pid(job_id), signal.SIGKILL)
    job = harness.wait(job_id)
    assert job.state == "succeeded", (job.error, harness.logs())
    assert [one.exit_kind for one in harness.attempts(job_id)] == [
        "killed_from_outside",
        "succeeded",
    ]
    assert job.infra_failures == 1


@pytest.mark.shared_worker
def test_a_failed_job_says_where_and_shows_the_log(harness: Harness):
    spec = train_spec(harness.dataset())
    spec["data"]["fields"]["y"]["dim"] = 1  # a label of 1 is out of range
    job = harness.wait(harness.submit(spec))
    assert job.state == "failed"
    assert job.error is not None
    assert job.error["category"] in ("data", "spec")
    assert job.error["log_tail"]
    (printed,) = harness.payloads(job.id, "log")
    assert printed["lines"][-1].startswith("glasshouse.errors.run.DataFailed: ")
    assert (printed["rank"], printed["stream"], printed["levels"][-1]) == (0, "stderr", "error")


@pytest.mark.shared_worker
def test_a_job_whose_dataset_is_gone_fails_with_a_reason(harness: Harness):
    dataset = harness.dataset()
    harness.artifacts.delete(f"datasets/{dataset}")
    job = harness.wait(harness.submit(train_spec(dataset)))
    assert job.state == "failed"
    assert job.error is not None
    assert job.error["code"] == "data_failed"


@pytest.mark.slow
def test_a_killed_worker_leaves_no_rank_and_its_job_runs_elsewhere(harness: Harness):
    first = harness.start_worker("w1", LEASE_S="5")
    job_id = harness.submit(endless(harness.dataset()))
    harness.wait_step(job_id)
    harness.start_worker("w2", LEASE_S="5")
    pid = harness.rank_pid(job_id, "w1")
    family = [child.pid for child in psutil.Process(first.pid).children(recursive=True)]
    assert pid in family
    first.kill()
    first.wait()
    until(lambda: all(group_gone(one) for one in family))
    harness.wait_runs_again(job_id)
    assert [(one.worker, one.exit_kind) for one in harness.attempts(job_id)] == [
        ("w1", "lease_lost"),
        ("w2", "cancelled"),
    ]


@pytest.mark.slow
def test_a_worker_that_starts_again_runs_the_jobs_of_its_last_life(harness: Harness):
    first = harness.start_worker(LEASE_S="60")
    job_id = harness.submit(endless(harness.dataset()))
    harness.wait_step(job_id)
    first.kill()
    first.wait()
    (harness.home / "w1.log").write_text("")
    harness.start_worker(LEASE_S="60")
    harness.wait_runs_again(job_id)
    assert [one.exit_kind for one in harness.attempts(job_id)] == ["worker_lost", "cancelled"]


@pytest.mark.slow
def test_a_stopped_worker_gives_its_jobs_back_unblamed(harness: Harness):
    harness.start_workers("w1", "w2")
    job_id = harness.submit(endless(harness.dataset()))
    name = harness.wait_step(job_id).worker
    assert name is not None
    harness.workers[name].send_signal(signal.SIGTERM)
    assert harness.workers[name].wait(60) == 0, harness.logs()
    harness.wait_runs_again(job_id)
    assert harness.job(job_id).infra_failures == 0
    other = {"w1": "w2", "w2": "w1"}[name]
    assert [(one.worker, one.exit_kind) for one in harness.attempts(job_id)] == [
        (name, "interrupted"),
        (other, "cancelled"),
    ]
    with harness.database.read() as tx:
        states = {row.id: state for row, state in workers.all_workers(tx, lease_ms=3000)}
    assert states[name] == "stopped"


@pytest.mark.shared_worker
def test_a_training_that_stops_early_says_why(harness: Harness):
    dataset = harness.dataset()
    whole = endless(dataset)
    early = {"metric": "validation/loss", "mode": "min", "patience": 2}
    job_id = harness.submit(
        whole
        | {
            "optimizer": {"type": "SGD", "args": {"lr": 0.0}},
            "scheduler": {"type": "StepLR", "args": {"step_size": 5}},
            "data": whole["data"] | {"validation": {"dataset": dataset, "split": "train"}},
            "evaluate": {"every_steps": 3},
            "stop": whole["stop"] | {"early": early},
        }
    )
    job = harness.wait(job_id)
    assert job.state == "succeeded", harness.logs()
    assert "validation/loss was not better for 2 evaluations" in str(job.state_reason)
    assert harness.payloads(job_id, "state")[-1]["reason"] == job.state_reason


@pytest.mark.shared_worker
def test_rows_of_validation_are_run_after_every_epoch_where_nothing_else_is_reported(
    harness: Harness,
):
    dataset = harness.dataset()
    whole = endless(dataset) | {"stop": {"epochs": 3}}
    whole["data"] |= {"validation": {"dataset": dataset, "split": "train"}}
    job_id = harness.submit(whole)
    assert harness.wait(job_id).state == "succeeded", harness.logs()
    told = harness.payloads(job_id, "metrics")
    assert [x["step"] for x in told if "validation/loss" in x["values"]] == [3, 7, 11]


def test_a_worker_that_is_only_just_known_ends_at_a_signal(harness: Harness):
    """Between its row in the database and Celery's main loop."""
    process = harness.start_worker(wait=False)
    until(lambda: any(device.worker == "w1" for device in harness.devices()))
    process.terminate()
    assert process.wait(60) == 0, harness.logs()
    assert harness.logged("w1", "worker_stopped")


def test_a_worker_ends_with_its_lifeline(harness: Harness):
    read_end, write_end = os.pipe()
    os.set_inheritable(read_end, True)
    program = (
        f"import os, sys; os.environ['GLASSHOUSE_LIFELINE_FD'] = '{read_end}';"
        "os.execv(sys.executable, [sys.executable, '-m', 'worker', '--name', 'w1'])"
    )
    with (harness.home / "w1.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | {f"GLASSHOUSE_{k}": v for k, v in harness.variables.items()},
            pass_fds=(read_end,),
            stdout=log,
            stderr=log,
        )
    os.close(read_end)
    harness.workers["w1"] = process
    until(lambda: harness.worker_ready("w1", process))
    os.close(write_end)
    assert process.wait(60) == 0, harness.logs()


def test_a_dead_fork_server_is_replaced_and_its_job_runs_again(harness: Harness):
    worker = harness.start_worker()
    job_id = harness.submit(endless(harness.dataset()))
    harness.wait_step(job_id)
    pid = harness.rank_pid(job_id)
    fork_server = next(
        child
        for child in psutil.Process(worker.pid).children()
        if "engine.process.fork_server" in child.cmdline()
    )
    fork_server.kill()
    until(lambda: group_gone(pid))
    harness.wait_runs_again(job_id)
    assert [one.exit_kind for one in harness.attempts(job_id)] == ["fork_server_lost", "cancelled"]


@pytest.mark.shared_worker
def test_a_rank_sees_nothing_of_the_services_environment(harness: Harness):
    job_id = harness.submit(endless(harness.dataset()))
    harness.wait_step(job_id)
    text = Path(f"/proc/{harness.rank_pid(job_id)}/environ").read_text()
    seen = {entry.partition("=")[0] for entry in text.split("\0") if entry}
    assert seen <= {*PASSED, *FIXED, SOCKET_VARIABLE, "PYTHONPATH"}
    assert "=gh_" not in text
    assert str(harness.settings.redis) not in text
    assert harness.settings.database not in text
    assert "MALLOC_MMAP_THRESHOLD_" in seen
    harness.cancel(job_id)
    harness.wait(job_id)


@pytest.mark.slow
def test_a_wakeup_that_arrives_a_hundred_times_makes_one_attempt(harness: Harness):
    harness.start_workers("w1", "w2")
    job_id = harness.submit(train_spec(harness.dataset()), ring=False)
    for _ in range(100):
        harness.ring()
    for name in ("w1", "w2"):
        for _ in range(50):
            queue = f"glasshouse.worker.{name}"
            harness.app.send_task("glasshouse.supervise", args=[job_id], queue=queue, retry=False)
    assert harness.wait(job_id).state == "succeeded"
    assert len(harness.attempts(job_id)) == 1


def test_a_job_submitted_while_the_broker_is_unavailable_runs(harness: Harness, broker: Broker):
    harness.start_worker()
    broker.kill()
    job_id = harness.submit(train_spec(harness.dataset()), ring=False)
    assert harness.wait(job_id).state == "succeeded", harness.logs()
    broker.start()
    assert harness.wait(harness.submit(train_spec(harness.dataset()))).state == "succeeded"


@pytest.mark.shared_worker
def test_a_message_that_is_not_json_is_refused_and_the_worker_stays(harness: Harness):
    worker = harness.workers["w1"]
    import redis

    body = (
        '{"body": "gASVDAAAAAAAAACMBWhlbGxvlC4=", "content-encoding": "binary", "content-type":'
        ' "application/x-python-serialize", "headers": {"id": "1", "task": "glasshouse.dispatch"},'
        ' "properties": {"body_encoding": "base64", "delivery_tag": "t", "delivery_info": {}}}'
    )
    with redis.Redis.from_url(harness.settings.redis) as client:
        client.lpush("glasshouse.dispatch", body)
    job = harness.wait(harness.submit(train_spec(harness.dataset())))
    assert job.state == "succeeded"
    assert worker.poll() is None


def test_a_fenced_out_supervisor_stops_its_rank_and_writes_nothing_more(harness: Harness):
    harness.start_worker()
    job_id = harness.submit(endless(harness.dataset()))
    harness.wait_step(job_id)
    pid = harness.rank_pid(job_id)
    with harness.database.write() as tx:
        held = next(claim for claim in attempts.held(tx, "w1") if claim.job == job_id)
        assert attempts.give_up(tx, held, exit_kind="lease_lost", reason="a test")
        workers.drain(tx, "w1")
    until(lambda: group_gone(pid))
    until(lambda: harness.logged("w1", "fenced_out"))
    job = harness.job(job_id)
    assert job.state == "queued"
    assert harness.events(job_id)[-1].type == "state"
    until(lambda: not list((harness.home / "work" / "w1").glob("job_*")))


def num_files(process: psutil.Process) -> int:
    """Open files but the database's: of those there may be as many as its pool has connections."""
    found = 0
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += "test.db" not in os.readlink(entry)
    return found


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.timeout(3000)
def test_a_worker_is_small_and_many_short_jobs_leave_nothing_behind(count: int, harness: Harness):
    worker = psutil.Process(harness.start_worker().pid)
    assert worker.memory_info().rss < 150 * 2**20
    dataset = harness.dataset()
    short = train_spec(dataset, stop={"steps": 2})
    for job_id in [harness.submit(short) for _ in range(4)]:
        assert harness.wait(job_id).state == "succeeded"
    until(lambda: len(worker.children(recursive=True)) == 1)
    files, threads, memory = num_files(worker), worker.num_threads(), worker.memory_info().rss
    for job_id in [harness.submit(short) for _ in range(count)]:
        assert harness.wait(job_id, timeout_s=3000).state == "succeeded"
    until(lambda: len(worker.children(recursive=True)) == 1)  # the fork server alone, no zombie
    until(lambda: num_files(worker) <= files + 4)
    until(lambda: worker.num_threads() <= threads + 8)
    assert worker.memory_info().rss < memory + 50 * 2**20
    assert all(device.job is None for device in harness.devices())
    until(lambda: not list((harness.home / "work" / "w1").glob("job_*")))
    until(lambda: not list((harness.home / "work" / "w1" / "ranks").iterdir()))


@pytest.mark.shared_worker
def test_higher_priority_goes_first(harness: Harness):
    dataset = harness.dataset()
    whole = {"type": "cpu", "threads": 2}
    before = harness.submit(endless(dataset, devices=whole))
    harness.wait_step(before)
    low = harness.submit(train_spec(dataset, devices=whole))
    high = harness.submit(train_spec(dataset, devices=whole, priority=5))
    harness.cancel(before)
    first, second = harness.wait(high), harness.wait(low)
    assert first.started_at is not None
    assert second.started_at is not None
    assert first.started_at < second.started_at


def test_a_second_worker_of_the_same_name_does_not_start(harness: Harness):
    first = harness.start_worker("w1")
    second = harness.start_worker("w1", wait=False)
    harness.workers["w1"] = first
    assert second.wait(60) == 1
    assert first.poll() is None


@pytest.mark.slow
def test_a_cancel_at_any_moment_ends_the_job(harness: Harness):
    harness.start_worker()
    dataset = harness.dataset()
    ended: list[str] = []
    for number in range(20):
        job_id = harness.submit(endless(dataset))
        due = time.monotonic() + number * 0.01
        until(lambda due=due: time.monotonic() >= due)
        harness.cancel(job_id)
        ended.append(harness.wait(job_id).state)
        assert [event.type for event in harness.events(job_id)][-1] == "end"
    assert set(ended) == {"cancelled"}
    until(lambda: all(device.job is None for device in harness.devices()))
