"""What a job uses of its machine, by a real worker of a real job."""

from itertools import pairwise

import pytest

from glasshouse import jsonio
from models.observations import metrics
from tests.integration.worker.harness import Harness, endless
from tests.waiting import until


@pytest.mark.shared_worker
def test_a_job_says_each_second_what_it_uses_until_it_ends(harness: Harness):
    job_id = harness.submit(endless(harness.dataset()))
    used = until(lambda: _used(harness, job_id, at_least=3), 40)
    harness.cancel(job_id)
    harness.wait(job_id)
    times, used = [event.at for event in used], [jsonio.loads(event.payload) for event in used]
    for values in (event["values"] for event in used):
        assert 0 < values["system/cpu_percent"] < 400
        assert 50e6 < values["system/memory_bytes"] < 4e9
        assert values["system/threads"] >= 1
        assert values["system/disk_write_bytes_per_s"] >= 0
    steps = [event["step"] for event in used]
    assert steps == sorted(steps)
    assert all((b - a).total_seconds() > 0.9 for a, b in pairwise(times))
    assert not any(name.startswith(("system/", "time/")) for name in harness.job(job_id).summary)
    with harness.database.read() as tx:
        series = {row.name: row for row in metrics.names(tx, job_id)}
    assert series["system/cpu_percent"].num_values >= 3
    assert series["time/step"].last > 0
    assert harness.events(job_id)[-1].type == "end"


def _used(harness: Harness, job_id: str, at_least: int) -> list | None:
    told = [event for event in harness.events(job_id) if event.type == "metrics"]
    found = [event for event in told if "system/cpu_percent" in event.payload]
    return found if len(found) >= at_least else None
