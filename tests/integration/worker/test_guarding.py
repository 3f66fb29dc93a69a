"""Guards in a real service: what becomes of the job, and what its log says."""

from typing import Any

import pytest

from glasshouse.events import parse_event
from tests.integration.worker.harness import Harness, train_spec


def guarded(harness: Harness, guard: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A job that takes the logarithm of numbers that are negative in some steps."""
    spec = train_spec(harness.dataset(), **changes)
    spec["network"]["layers"].append({"name": "log", "type": "log", "args": {}, "inputs": ["fc2"]})
    spec["network"]["outputs"] = ["log"]
    spec["loss"]["inputs"] = ["log", "y"]
    spec["guards"] = {"nonfinite": guard}
    return spec


def findings_of(harness: Harness, job_id: str) -> list[dict[str, Any]]:
    found = harness.payloads(job_id, "finding")
    for payload in found:
        head = {"job": job_id, "seq": 1, "attempt": 1, "at": "2026-01-01T00:00:00Z"}
        parse_event({**head, "type": "finding", **payload})
    return found


@pytest.mark.shared_worker
def test_a_job_that_is_to_fail_by_its_numbers_names_the_layer_and_is_not_retried(
    harness: Harness,
):
    job_id = harness.submit(guarded(harness, {"action": "fail"}))
    job = harness.wait(job_id)
    assert job.state == "failed"
    assert job.error is not None
    assert (job.error["code"], job.error["category"]) == ("non_finite", "nonfinite")
    assert (job.error["layer"], job.error["step"], job.error["rank"]) == ("log", 0, 0)
    where = job.error["nonfinite"]
    assert (where["kind"], where["phase"], where["metric"]) == ("output", "forward", "loss")
    assert len(where["samples"]) == 16
    assert set(where["bad_samples"]) <= set(where["samples"])
    assert [one.exit_kind for one in harness.attempts(job_id)] == ["nonfinite"]
    (finding,) = findings_of(harness, job_id)
    assert (finding["severity"], finding["action"], finding["layer"]) == ("error", "failed", "log")
    assert finding["message"] == job.error["message"]
    assert job.summary["loss"]["first_nonfinite_step"] == 0


@pytest.mark.shared_worker
def test_a_job_that_skips_is_counted_and_ends_when_all_are_skipped(harness: Harness):
    job_id = harness.submit(guarded(harness, {"action": "skip_step", "max_skipped": 5}))
    job = harness.wait(job_id)
    assert job.error is not None
    assert (job.error["code"], job.error["step"]) == ("too_many_skipped", 5)
    assert job.summary["skipped_steps"]["last"] == 6
    assert [finding["action"] for finding in findings_of(harness, job_id)] == ["skipped", "failed"]


@pytest.mark.shared_worker
def test_a_job_that_reports_nothing_is_reported_and_continues(harness: Harness):
    spec = guarded(harness, {})
    del spec["guards"]
    job_id = harness.submit(spec)
    job = harness.wait(job_id)
    assert job.state == "succeeded"
    (finding,) = findings_of(harness, job_id)
    assert (finding["step"], finding["layer"], finding["severity"]) == (0, "log", "warning")
    assert finding["checks"] == ["loss", "gradients"]
