from pathlib import Path

import pytest

from glasshouse.errors import DataFailed, OutOfMemory
from worker.attempt import memory
from worker.attempt.memory import limit_bytes, oom_kills, with_plan_estimates


@pytest.fixture
def host(tmp_path: Path) -> tuple[Path, Path]:
    """What the kernel tells: a control group /jobs/a, and the whole machine."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/jobs/a\n")
    (proc / "vmstat").write_text("pgfault 12\noom_kill 7\n")
    (cgroup / "jobs/a").mkdir(parents=True)
    return proc, cgroup


def test_our_own_control_group_is_asked_first(host: tuple[Path, Path]):
    _, cgroup = host
    events = cgroup / "jobs/a/memory.events"
    events.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\n")
    assert oom_kills(*host) == 1
    events.write_text("oom 2\noom_kill 2\n")
    assert oom_kills(*host) == 2


def test_inside_a_container_the_group_is_the_root_that_is_seen(host: tuple[Path, Path]):
    _, cgroup = host
    (cgroup / "memory.events").write_text("oom_kill 4\n")
    assert oom_kills(*host) == 4


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path):
    proc, group = tmp_path / "proc", tmp_path / "cgroup/memory/jobs"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("9:cpu:/\n4:memory:/jobs\n0::/\n")
    group.mkdir(parents=True)
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert oom_kills(proc, tmp_path / "cgroup") == 5
    assert limit_bytes(proc, tmp_path / "cgroup") is None
    (group / "memory.limit_in_bytes").write_text("2048\n")
    assert limit_bytes(proc, tmp_path / "cgroup") == 2048


def test_without_a_control_group_the_machine_is_asked(host: tuple[Path, Path]):
    assert oom_kills(*host) == 7


def test_a_host_that_reports_nothing_is_no_error(tmp_path: Path):
    assert oom_kills(tmp_path, tmp_path) is None
    assert limit_bytes(tmp_path, tmp_path) is None


def test_the_limit_of_the_control_group(host: tuple[Path, Path]):
    _, cgroup = host
    (cgroup / "jobs/a/memory.events").write_text("oom_kill 0\n")
    (cgroup / "jobs/a/memory.max").write_text("max\n")
    assert limit_bytes(*host) is None
    (cgroup / "jobs/a/memory.max").write_text("1048576\n")
    assert limit_bytes(*host) == 1048576


def test_the_kill_count_of_this_host_can_be_read():
    kills = memory.oom_kills()
    assert kills is None or kills >= 0


@pytest.mark.parametrize(
    ("largest", "word"),
    [
        ("activations_bytes", "data.batch_size"),
        ("optimizer_state_bytes", "optimizer"),
        ("data_bytes", "fewer of its rows"),
        ("parameters_bytes", "smaller"),
    ],
)
def test_the_hint_is_about_what_takes_most(largest: str, word: str):
    heads = {"activations_bytes": 10, "optimizer_state_bytes": 10, "parameters_bytes": 10}
    planned = heads | {"data_bytes": 10, largest: 60, "total_bytes": 90}
    error = OutOfMemory("x", memory={"where": "device", "free_bytes": 5}).as_dict()
    told = with_plan_estimates(error, {"memory": planned})
    assert word in told["hint"]
    assert told["memory"] == {"where": "device", "free_bytes": 5, "planned": planned}


def test_other_errors_and_other_plans_are_left_alone():
    error = DataFailed("x").as_dict()
    assert with_plan_estimates(error, {"memory": {"data_bytes": 1}}) == error
    shortage = OutOfMemory("x").as_dict()
    assert with_plan_estimates(shortage, {}) == shortage
