"""Every failpoint of worker and rank with every action: the job ends as one that nobody touched.

``make failpoints`` runs all, ``make test`` a few. The result is in ``docs/concepts/restarts.md``.
``FAILPOINTS_DATABASE`` says on which database: ``sqlite`` or ``postgresql``.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.integration.worker.harness import Harness
from tests.integration.worker.job_history import JobHistory, check_attempts, spec_of, survive
from tests.waiting import until

ROOT = Path(__file__).parents[3]
DATABASE = os.environ.get("FAILPOINTS_DATABASE", "sqlite")
LEASE_S, PAUSE_S = 2, 6
"""Who stands still does so for three times as long as it may be silent."""
GIVING_UP = ("return.commit", "return.committed", "sweep.commit", "sweep.committed")
"""A worker that starts again, and one that finds another's loss, come by here. Those of the API are
in ``tests/integration/api/test_failpoints.py``."""
OF_OTHERS = ("checkpoint.part", "infer.part_stored", "serve.listening")
"""Only jobs of several processes (``test_rank_faults.py``), inferences (``test_inferring.py``) and
serve jobs come by here."""
OFTEN = ("spool.write", "ship", "capture", "artifact.rename", "artifact.stored", "checkpoint")
"""Points that an attempt comes by again and again: the second time is the more telling one."""
VARIABLES = {"RETRY_MAX_S": "0.3", "LEASE_S": str(LEASE_S), "HEARTBEAT_S": "0.3"}
IN_SHORT = {
    ("return.commit", "raise"),
    ("sweep.committed", "kill"),
    ("ship.moved", "kill"),
    ("ship.commit", "pause"),
    ("end.commit", "raise"),
}
COUNTED = {
    "checkpoint": "checkpoint",
    "capture": "capture",
    "artifact.received": "capture",
    "artifact.replaced": "capture",
}
"""What cannot be written is counted, and training continues: an error costs only that one item. So
does a disk that hangs for longer than ``GLASSHOUSE_GRACE_S`` after the end, which is 5 s here."""


def found() -> list[str]:
    """The points that stand in the code."""
    files = [
        path for name in ("models", "worker", "engine") for path in ROOT.glob(f"{name}/**/*.py")
    ]
    names = {
        name for path in files for name in re.findall(r'failpoint\("([\w.]+)"\)', path.read_text())
    }
    assert {*GIVING_UP, *OF_OTHERS} < names
    return sorted(names - {*GIVING_UP, *OF_OTHERS})


def cases(points: Sequence[str]) -> list[object]:
    """Each point with each action; the most of them marked slow."""
    both = [(point, action) for point in points for action in ("kill", "raise", "pause")]
    return [
        pytest.param(*case, id="-".join(case), marks=() if case in IN_SHORT else pytest.mark.slow)
        for case in both
    ]


def rule(point: str, action: str) -> str:
    return f"{point}=pause:{PAUSE_S}" if action == "pause" else f"{point}={action}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("point", "action"), cases(found()))
@pytest.mark.parametrize("database_url", [DATABASE], indirect=True)
def test_whatever_happens_at_a_point_the_job_ends_as_if_it_had_not(
    point: str,
    action: str,
    any_harness: Harness,
    points: Callable[[str], Path],
    undisturbed: JobHistory,
):
    harness = any_harness
    kind = point if point in COUNTED else point.split(".", maxsplit=1)[0]
    once = points(f"{rule(point, action)}@{2 if point.startswith(OFTEN) else 1}")
    harness.variables |= VARIABLES
    harness.start_worker(wait=False)
    job_id = harness.submit(spec_of(harness.dataset()), ring=False)
    survive(harness, job_id)
    until(lambda: list(once.iterdir()), 20)  # what is done after the end too
    story = JobHistory.of(harness, job_id)
    if action != "kill" and kind in COUNTED and "dropped" in story.log:
        story.check_but_counted(undisturbed, COUNTED[kind])
    else:
        story.check(undisturbed)
    check_attempts(harness, job_id)
    assert [event.type for event in harness.events(job_id)].count("end") == 1


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("point", "action"), cases(GIVING_UP))
@pytest.mark.parametrize("database_url", [DATABASE], indirect=True)
def test_whatever_happens_while_a_lost_attempt_is_given_up_the_job_ends_as_if_it_had_not(
    point: str,
    action: str,
    any_harness: Harness,
    points: Callable[[str], Path],
    undisturbed: JobHistory,
):
    """Its worker is killed; that one starts again, or another takes over, and comes by there."""
    harness = any_harness
    harness.variables |= VARIABLES
    once = points("spool.append=pause:60@120")
    harness.start_worker("w1")
    job_id = harness.submit(spec_of(harness.dataset()))
    until(lambda: list(once.iterdir()))
    until(lambda: harness.payloads(job_id, "checkpoint"))
    lost = harness.workers.pop("w1")
    lost.kill()
    lost.wait()
    points(rule(point, action))
    successor = "w1" if point.startswith("return") else "w2"
    harness.start_worker(successor, wait=False)
    survive(harness, job_id, successor)
    assert len(list(once.iterdir())) == 2
    JobHistory.of(harness, job_id).check(undisturbed)
    assert len(check_attempts(harness, job_id)) >= 2
    assert [event.type for event in harness.events(job_id)].count("end") == 1
