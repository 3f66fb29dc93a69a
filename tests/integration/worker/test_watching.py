"""Probes that are attached to a job whose worker is lost."""

import pytest

from glasshouse import jsonio
from models.jobs import jobs
from models.observations import probes
from models.observations.probes import CheckedProbe
from tests.waiting import until

from .harness import Harness, endless

BODY = {"layers": ["fc1"], "kinds": ["output"], "every": 1, "want": ["stats"]}


@pytest.mark.slow
def test_a_job_that_lost_its_worker_is_watched_as_before_from_its_new_first_step(harness: Harness):
    worker = harness.start_worker(LEASE_S="5")
    job_id = harness.submit(endless(harness.dataset()))
    harness.wait_step(job_id)
    with harness.database.write() as tx:
        job = jobs.get(tx, job_id, None)
        row = probes.add(tx, job, CheckedProbe(BODY, ["fc1"], 512), by="ada")
    until(lambda: harness.payloads(job_id, "stats"))
    (told,) = harness.payloads(job_id, "probe")
    assert (told["probe"], told["action"]) == (row.id, "attached")
    assert told["step"] > 0
    assert harness.payloads(job_id, "stats")[0]["step"] == told["step"]

    worker.kill()
    worker.wait()
    harness.start_worker("w2", LEASE_S="5")
    until(lambda: len(harness.attempts(job_id)) == 2)
    first = until(
        lambda: next(
            (
                event
                for event in harness.events(job_id)
                if event.attempt == 2 and event.type == "stats"
            ),
            None,
        )
    )
    begun = harness.payloads(job_id, "attempt")[-1]
    assert jsonio.loads(first.payload)["step"] == begun["resumed_from_step"]
    assert len(harness.payloads(job_id, "probe")) == 1
    harness.cancel(job_id, force=True)
    harness.wait(job_id)
