import signal
from typing import Any

from worker.ranks import Exit
from worker.verdict import Again, Ended, judge


def verdict(end: dict[str, Any] | None, exit_: Exit, **changes: bool) -> Ended | Again:
    given = {"cancelled": False, "stopping": False, "out_of_memory": False} | changes
    return judge(end, exit_, **given)


def code(found: Ended | Again) -> str:
    assert isinstance(found, Ended)
    assert found.error is not None
    return found.error["code"]


def test_the_ranks_own_last_word_decides():
    assert verdict({"state": "succeeded"}, Exit(0)) == Ended("succeeded", "succeeded")
    failed = verdict({"state": "failed", "error": {"code": "data_failed"}}, Exit(0))
    assert code(failed) == "data_failed"


def test_success_stands_even_where_the_owner_asked_too_late():
    assert verdict({"state": "succeeded"}, Exit(0), cancelled=True) == Ended(
        "succeeded", "succeeded"
    )


def test_a_job_stopped_by_its_worker_runs_again_and_has_not_failed():
    for end, exit_ in (({"state": "cancelled"}, Exit(0)), (None, Exit(signal=signal.SIGTERM))):
        found = verdict(end, exit_, stopping=True)
        assert isinstance(found, Again)
        assert not found.counted


def test_a_cancelled_job_that_had_to_be_killed_is_cancelled():
    found = verdict(None, Exit(signal=signal.SIGKILL), cancelled=True)
    assert found == Ended("cancelled", "killed")


def test_a_crash_of_its_own_fails_the_job():
    for exit_ in (Exit(signal=signal.SIGSEGV), Exit(signal=signal.SIGABRT), Exit(1)):
        assert code(verdict(None, exit_)) == "rank_died"


def test_the_error_names_the_signal():
    found = verdict(None, Exit(signal=signal.SIGSEGV))
    assert isinstance(found, Ended)
    assert found.error is not None
    assert "SIGSEGV" in found.error["message"]


def test_a_kill_for_memory_is_named():
    assert code(verdict(None, Exit(signal=signal.SIGKILL), out_of_memory=True)) == "out_of_memory"


def test_a_kill_from_outside_is_not_the_jobs_fault():
    assert isinstance(verdict(None, Exit(signal=signal.SIGKILL)), Again)


def test_a_lost_nursery_and_a_cut_lifeline_are_not_the_jobs_fault():
    assert isinstance(verdict(None, Exit(lost=True)), Again)
    assert isinstance(verdict(None, Exit(75)), Again)
