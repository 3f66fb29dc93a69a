"""Every failpoint of worker and rank with every action: the job ends as one that nobody touched.

``make failpoints`` runs all, ``make test`` a few. The result is in ``docs/concepts/restarts.md``.
``FAILPOINTS_DATABASE`` says on which database: ``sqlite`` or ``postgresql``.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.integration.worker.shop import Shop
from tests.integration.worker.story import Story, check_attempts, spec_of, survive
from tests.waiting import until

ROOT = Path(__file__).parents[3]
DATABASE = os.environ.get("FAILPOINTS_DATABASE", "sqlite")
LEASE_S, PAUSE_S = 2, 6
"""Who stands still does so for three times as long as it may be silent."""
GIVING_UP = ("return.commit", "return.committed", "sweep.commit", "sweep.committed")
"""A worker that starts again, and one that finds another's loss, come by here. Those of the API are
in ``tests/integration/api/test_failpoints.py``."""
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
    assert set(GIVING_UP) < names
    return sorted(names - set(GIVING_UP))


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
    any_shop: Shop,
    points: Callable[[str], Path],
    undisturbed: Story,
):
    shop = any_shop
    kind = point if point in COUNTED else point.split(".", maxsplit=1)[0]
    once = points(f"{rule(point, action)}@{2 if point.startswith(OFTEN) else 1}")
    shop.variables |= VARIABLES
    shop.start_worker(wait=False)
    job_id = shop.submit(spec_of(shop.dataset()), ring=False)
    survive(shop, job_id)
    until(lambda: list(once.iterdir()), 20)  # what is done after the end too
    story = Story.of(shop, job_id)
    if action != "kill" and kind in COUNTED and "dropped" in story.log:
        story.check_but_counted(undisturbed, COUNTED[kind])
    else:
        story.check(undisturbed)
    check_attempts(shop, job_id)
    assert [event.type for event in shop.events(job_id)].count("end") == 1


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("point", "action"), cases(GIVING_UP))
@pytest.mark.parametrize("database_url", [DATABASE], indirect=True)
def test_whatever_happens_while_a_lost_attempt_is_given_up_the_job_ends_as_if_it_had_not(
    point: str,
    action: str,
    any_shop: Shop,
    points: Callable[[str], Path],
    undisturbed: Story,
):
    """Its worker is killed; that one starts again, or another takes over, and comes by there."""
    shop = any_shop
    shop.variables |= VARIABLES
    once = points("spool.append=pause:60@120")
    shop.start_worker("w1")
    job_id = shop.submit(spec_of(shop.dataset()))
    until(lambda: list(once.iterdir()))
    until(lambda: shop.payloads(job_id, "checkpoint"))
    lost = shop.workers.pop("w1")
    lost.kill()
    lost.wait()
    points(rule(point, action))
    successor = "w1" if point.startswith("return") else "w2"
    shop.start_worker(successor, wait=False)
    survive(shop, job_id, successor)
    assert len(list(once.iterdir())) == 2
    Story.of(shop, job_id).check(undisturbed)
    assert len(check_attempts(shop, job_id)) >= 2
    assert [event.type for event in shop.events(job_id)].count("end") == 1
