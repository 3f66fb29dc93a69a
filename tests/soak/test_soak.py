"""The soak itself, for a minute and a half: what it counts, and that it sees what is wrong."""

import dataclasses

import pytest

from tests.chaos.verifier import Record
from tests.soak.__main__ import Plan, grown, report_lines, soak, table
from tests.soak.samples import BOUNDS
from tests.soak.work import compare

STEPS = [("metrics", step, f'{{"loss": {step}}}') for step in range(3)]
GOLDEN = Record("succeeded", {"loss": [(0, 1.0)]}, [*STEPS, ("checkpoint", 2)], "ab")


def but(**changes) -> Record:
    return dataclasses.replace(GOLDEN, **changes)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_short_soak_hits_what_runs_and_finds_nothing_wrong(database_url: str):
    plan = Plan(1.5, workers=2, clients=40, every_s=1.0, kills_s=(1.0, 4.0), least=10)
    report = soak(dataclasses.replace(plan, database=database_url))
    assert report["wrong"] == [], table(report)
    assert len(report["killed"]) >= 3, "some kinds of processes were never hit"
    assert report["attempts"] > sum(report["jobs"].values()), "nothing that ran was hit"
    clients = report["clients"]
    assert clients["most_open"] >= 35
    assert min(clients["events"], clients["ends"], clients["cut"], clients["lost"]) > 0
    lines = {(row["line"], row["figure"]) for row in report["figures"]}
    for line in ("api one", "worker north", "fork_server north"):
        assert {(line, figure) for figure in ("rss_mib", "descriptors", "threads")} <= lines
    assert ("store", "wal_mib") in lines
    assert len(report_lines(report)) == 1 + len(report["figures"])


def test_every_figure_has_a_bound_and_sizes_are_judged_once_they_can_settle():
    assert Plan().sizes_settle
    assert not Plan(minutes=1.5).sizes_settle
    assert {"rss_mib", "descriptors", "wal_mib", "dead_rows"} <= BOUNDS.keys()


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("short", GOLDEN),
        ("paused", but(log=[*STEPS, ("checkpoint", 1), ("checkpoint", 2)])),
        ("cancelled", but(state="cancelled", log=STEPS[:2], weights="cd")),
        ("cancelled", GOLDEN),
    ],
    ids=["short", "paused", "cancelled", "cancelled too late"],
)
def test_a_job_that_ended_correctly_is_not_reported(kind: str, found: Record):
    assert compare(kind, found, GOLDEN) == []


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("short", but(state="failed")),
        ("short", but(log=GOLDEN.log[1:])),
        ("short", but(log=STEPS)),
        ("watched", but(metrics={})),
        ("paused", but(weights="cd")),
        ("paused", but(state="cancelled")),
        ("cancelled", but(state="cancelled", log=STEPS[1:])),
        ("cancelled", but(state="failed")),
    ],
)
def test_a_job_that_ended_wrongly_is_reported(kind: str, found: Record):
    assert compare(kind, found, GOLDEN)


def test_descriptors_that_are_left_open_are_reported_by_their_sort():
    assert grown({"socket": 10}, {"socket": 12, "pipe": 2}) == []
    assert grown({"socket": 10}, {"socket": 60, "pipe": 2}) == ["60 socket and not 10"]
