import re
import signal
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse import errors
from glasshouse.errors import RunFailure
from models.jobs.endings import FATES, ExitKind, Fate
from worker.attempt.outcome import (
    AttemptEnded,
    JobEnded,
    StopReason,
    failed,
    halved,
    judge,
    kind_of,
    unkillable,
)
from worker.processes.rank import Exit

CANCELLED = StopReason(cancelled=True)
STOPPING = StopReason(stopping=True)
OVERDUE = StopReason(timeout_s=5.0)
BY_ITSELF = StopReason()


def verdict(
    end: dict[str, Any] | None, exit_: Exit, pressed: StopReason = BY_ITSELF, *, oom: bool = False
) -> JobEnded | AttemptEnded:
    return judge(end, exit_, pressed, out_of_memory=oom)


def failure(error: RunFailure) -> dict[str, Any]:
    return {"state": "failed", "error": error.as_dict()}


def test_the_list_of_ends_is_closed_and_each_has_a_fate():
    assert set(FATES) == set(get_args(ExitKind))
    assert set(FATES.values()) <= set(get_args(Fate))


def test_the_ranks_own_last_word_decides():
    assert verdict({"state": "succeeded"}, Exit(0)) == JobEnded("succeeded", "succeeded")
    found = verdict(failure(errors.DataFailed("x")), Exit(0))
    assert isinstance(found, JobEnded)
    assert (found.state, found.exit_kind) == ("failed", "user_error")


@pytest.mark.parametrize("pressed", [CANCELLED, STOPPING, OVERDUE, StopReason(stalled_s=9.0)])
def test_success_stays_if_a_cancel_comes_too_late(pressed: StopReason):
    found = verdict({"state": "succeeded"}, Exit(0), pressed)
    assert found == JobEnded("succeeded", "succeeded")


@pytest.mark.parametrize("end", [None, {"state": "cancelled"}, {"state": "interrupted"}])
def test_a_job_stopped_by_its_worker_runs_again_and_has_not_failed(end: dict[str, Any] | None):
    found = verdict(end, Exit(signal=signal.SIGTERM), STOPPING)
    assert isinstance(found, AttemptEnded)
    assert found.exit_kind == "interrupted"
    assert not found.counted


@pytest.mark.parametrize("end", [None, {"state": "paused"}])
def test_a_job_that_its_owner_paused_is_paused(end: dict[str, Any] | None):
    found = verdict(end, Exit(signal=signal.SIGTERM), StopReason(pausing=True))
    assert isinstance(found, AttemptEnded)
    assert (found.exit_kind, found.counted) == ("paused", False)


def test_a_crash_while_it_pauses_is_still_a_crash():
    found = verdict(None, Exit(signal=signal.SIGSEGV), StopReason(pausing=True))
    assert found.exit_kind == "crash"


def test_cancelling_goes_before_pausing():
    both = StopReason(pausing=True, cancelled=True)
    assert both.how == "cancelled"
    assert verdict({"state": "paused"}, Exit(0), both) == JobEnded("cancelled", "cancelled")


def test_a_cancelled_job_is_cancelled_even_if_it_had_to_be_killed():
    by_kill = verdict(None, Exit(signal=signal.SIGKILL), CANCELLED)
    assert by_kill == JobEnded("cancelled", "killed")
    by_word = verdict({"state": "cancelled"}, Exit(0), CANCELLED)
    assert by_word == JobEnded("cancelled", "cancelled")
    assert unkillable(cancelled=True).state == "cancelled"


@pytest.mark.parametrize("end", [None, {"state": "cancelled"}])
def test_a_job_that_took_too_long_has_failed(end: dict[str, Any] | None):
    found = verdict(end, Exit(signal=signal.SIGKILL), OVERDUE)
    assert isinstance(found, JobEnded)
    assert found.exit_kind == "timeout"
    assert found.error is not None
    assert (found.error["code"], found.error["category"]) == ("timeout", "timeout")


def test_a_stalled_job_runs_again_or_fails_as_its_spec_says():
    again = verdict(None, Exit(signal=signal.SIGKILL), StopReason(stalled_s=7.0))
    assert isinstance(again, AttemptEnded)
    assert (again.exit_kind, again.counted) == ("stalled", True)
    ended = verdict(None, Exit(signal=signal.SIGKILL), StopReason(stalled_s=7.0, on_stall="fail"))
    assert isinstance(ended, JobEnded)
    assert ended.error is not None
    assert ended.error["code"] == "stalled"


@pytest.mark.parametrize("end", [None, failure(errors.PeerLost("x"))])
def test_a_stall_names_the_process_that_kept_the_others_waiting(end: dict[str, Any] | None):
    """Also if another process noticed its end first."""
    known = StopReason(
        stalled_s=7.0,
        on_stall="fail",
        stalled_rank=1,
        stalled_why="rank 1 was late",
        stalled_step=4,
    )
    ended = verdict(end, Exit(signal=signal.SIGKILL), known)
    assert isinstance(ended, JobEnded)
    assert ended.error is not None
    assert (ended.error["code"], ended.error["rank"], ended.error["step"]) == ("stalled", 1, 4)
    assert "no progress for 7 s: rank 1 was late" in ended.error["message"]


@pytest.mark.parametrize(
    "exit_", [Exit(signal=signal.SIGSEGV), Exit(signal=signal.SIGABRT), Exit(1), Exit(70)]
)
def test_a_crash_is_retried_and_names_how_it_ended(exit_: Exit):
    found = verdict(None, exit_)
    assert isinstance(found, AttemptEnded)
    assert (found.exit_kind, found.counted) == ("crash", True)
    assert found.error is not None
    assert found.error["code"] == "rank_died"
    assert str(exit_) in found.error["message"]
    assert str(exit_) in found.reason


def test_a_kill_for_memory_is_named_with_the_peak():
    found = verdict(None, Exit(signal=signal.SIGKILL, peak_bytes=123), oom=True)
    assert isinstance(found, JobEnded)
    assert found.exit_kind == "oom_host"
    assert found.error is not None
    assert found.error["code"] == "out_of_memory"
    assert found.error["memory"]["peak_bytes"] == 123


HALVING = {"guards": {"memory": {"on_oom": "halve_batch"}}, "data": {"batch_size": 10}}


def out_of_memory(step: int | None = 3) -> JobEnded:
    error = errors.OutOfMemory("No room.", memory={"where": "device"}).as_dict() | {"step": step}
    return JobEnded("failed", "oom_device", error)


@pytest.mark.parametrize("parts", [1, 8])
def test_a_job_with_halve_batch_is_retried_at_once_with_twice_as_many_micro_batches(parts: int):
    found = halved(out_of_memory(), HALVING, parts, killed=False)
    assert isinstance(found, AttemptEnded)
    assert (found.exit_kind, found.counted) == ("oom_halved", False)
    assert found.reason == f"No room; each batch is run in {2 * parts} parts now"


@pytest.mark.parametrize(
    ("end", "spec", "parts"),
    [
        (out_of_memory(step=None), HALVING, 1),
        (out_of_memory(), HALVING | {"guards": {"memory": {"on_oom": "fail"}}}, 1),
        (out_of_memory(), {"kind": "infer"}, 1),
        (JobEnded("failed", "user_error", errors.DataFailed().as_dict() | {"step": 3}), HALVING, 1),
    ],
    ids=["loading", "fail", "no training", "something else"],
)
def test_other_failures_are_not_retried_with_micro_batches(
    end: JobEnded, spec: dict[str, Any], parts: int
):
    assert halved(end, spec, parts, killed=False) is end


def test_batches_of_one_row_are_the_last_try():
    found = halved(out_of_memory(), HALVING, 16, killed=False)
    assert isinstance(found, JobEnded)
    assert found.error is not None
    assert found.error["message"] == "No room. It was one row at a time already."


def test_a_rank_that_the_kernel_killed_may_have_been_in_a_step():
    end = verdict(None, Exit(signal=signal.SIGKILL, peak_bytes=123), oom=True)
    assert isinstance(end, JobEnded)
    assert halved(end, HALVING, 1, killed=True).exit_kind == "oom_halved"


def test_a_crash_is_not_taken_for_a_kill_for_memory():
    found = verdict(None, Exit(signal=signal.SIGSEGV), oom=True)
    assert found.exit_kind == "crash"


@pytest.mark.parametrize(
    ("exit_", "kind"),
    [
        (Exit(signal=signal.SIGKILL), "killed_from_outside"),
        (Exit(signal=signal.SIGTERM), "killed_from_outside"),
        (Exit(lost=True), "fork_server_lost"),
        (Exit(75), "lifeline_cut"),
    ],
)
def test_what_comes_from_outside_is_not_the_jobs_fault(exit_: Exit, kind: ExitKind):
    found = verdict(None, exit_)
    assert isinstance(found, AttemptEnded)
    assert (found.exit_kind, found.counted) == (kind, True)


@pytest.mark.parametrize(
    ("error", "kind", "again"),
    [
        (errors.SpecFailed(), "user_error", False),
        (errors.DataFailed(), "user_error", False),
        (errors.NonFinite(), "nonfinite", False),
        (errors.OutOfMemory(memory={"where": "device"}), "oom_device", False),
        (errors.OutOfMemory(memory={"where": "host"}), "oom_host", False),
        (errors.DeviceFailed(), "device", True),
        (errors.StorageFailed(), "storage", True),
        (errors.DiskFull(), "disk_full", True),
        (errors.EngineFailed(), "internal", False),
    ],
)
def test_errors_of_the_user_are_never_retried(error: RunFailure, kind: ExitKind, again: bool):
    found = failed(error.as_dict())
    assert found.exit_kind == kind
    assert isinstance(found, AttemptEnded) == again


@given(
    st.none() | st.sampled_from(["succeeded", "cancelled", "failed", "interrupted", "paused"]),
    st.builds(Exit, st.none() | st.integers(0, 255), st.none() | st.integers(1, 31), st.booleans()),
    st.builds(
        StopReason,
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.none() | st.just(1.0),
        st.none() | st.just(1.0),
        st.sampled_from(["restart", "fail"]),
    ),
    st.booleans(),
)
def test_every_ending_has_a_verdict_of_the_list(
    state: str | None, exit_: Exit, pressed: StopReason, oom: bool
):
    end = failure(errors.DataFailed()) if state == "failed" else state and {"state": state}
    found = verdict(end or None, exit_, pressed, oom=oom)
    assert found.exit_kind in FATES
    if isinstance(found, AttemptEnded):
        assert FATES[found.exit_kind] != "ends"
        assert not pressed.cancelled
    elif found.state == "failed":
        assert found.error is not None
        assert found.error["message"]


def test_every_failure_that_there_is_has_a_kind():
    def all_of(cls: type[RunFailure]) -> list[type[RunFailure]]:
        return [cls, *(more for sub in cls.__subclasses__() for more in all_of(sub))]

    assert {kind_of(cls().as_dict()) for cls in all_of(RunFailure)} <= set(FATES)


def test_the_documentation_says_of_each_end_what_follows():
    page = Path(__file__).parents[3] / "docs/concepts/failing.md"
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (\w+)", page.read_text(), re.MULTILINE)
    said = {kind: fate for kind, fate in rows if kind in FATES}
    assert said == FATES
