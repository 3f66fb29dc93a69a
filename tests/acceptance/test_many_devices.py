"""A job of several processes, as a client sees and steers it."""

import json
from typing import Any

import httpx2
import numpy as np
import pytest

import glasshouse as gh
from tests.acceptance.services import ROOT, LocalService
from tests.acceptance.specs import FIELDS, lasting, small
from tests.waiting import until

TWO: dict[str, Any] = {"parallel": {"strategy": "data", "processes": 2}}
PROBE: dict[str, Any] = {"layers": ["fc"], "kinds": ["output"], "every": 1}
PARTS: dict[str, Any] = {"parallel": {"strategy": "fsdp", "processes": 2}}
DIVIDED: dict[str, Any] = {"parallel": {"strategy": "tensor", "processes": 2}}


def test_a_running_job_shows_its_processes(
    client: gh.Client, http: httpx2.Client, local_service: LocalService, digits: str
):
    job = client.jobs.create(lasting(digits, 100_000, **TWO))
    until(lambda: (job.refresh().progress or {}).get("step"))
    shown = http.get(f"/jobs/{job.id}").json()
    assert [one["id"] for one in shown["devices"]] == ["cpu:0", "cpu:1"]
    columns = ("rank", "device", "threads", "state")
    assert [tuple(one[name] for name in columns) for one in shown["ranks"]] == [
        (0, "cpu:0", 1, "running"),
        (1, "cpu:1", 1, "running"),
    ]
    changed = job.set(lr=0.01).wait(timeout=60)
    assert changed.state == "applied"
    probe = job.probe("conv1", kinds=["output"], every=1)
    until(lambda: probe.refresh().state == "active", 30)
    probe.remove()
    job.cancel()
    until(lambda: job.refresh().state == "cancelled")
    ended = http.get(f"/jobs/{job.id}").json()["ranks"]
    assert [(one["rank"], one["state"]) for one in ended] == [(0, "cancelled"), (1, "cancelled")]


@pytest.mark.parametrize("several", [TWO, PARTS, DIVIDED])
def test_a_fork_continues_with_another_number_of_processes(
    several: dict[str, Any], client: gh.Client, digits: str
):
    """With the same global batch it is the same run: the rows of step 7 on are the same."""
    data = {"train": {"dataset": digits, "split": "train"}, "fields": FIELDS}
    spec = small(
        digits,
        **several,
        data={**data, "global_batch_size": 100},
        stop={"steps": 7},
        checkpoint={"every_steps": 7},
    )
    first = client.jobs.create(spec).wait(timeout=60)
    whole = client.jobs.create(small(digits, stop={"steps": 20})).wait(timeout=60)
    change = {"parallel": None, "data": {"global_batch_size": None, "batch_size": 100}}
    rest = first.fork({**change, "stop": {"steps": 20}}, load="all").wait(timeout=60)
    found, expected = dict(rest.metrics("loss")), dict(whole.metrics("loss"))
    assert [*found] == [*range(7, 20)]
    assert [*found.values()] == pytest.approx([expected[step] for step in found], rel=1e-5)


@pytest.mark.parametrize("several", [PARTS, DIVIDED])
def test_a_sharded_job_is_steered_paused_and_resumed(
    several: dict[str, Any], client: gh.Client, http: httpx2.Client, digits: str
):
    """Commands, probes of whole parameters, saves by time, a pause, inference."""
    spec = lasting(digits, 100_000, **several, checkpoint={"every_s": 0.2})
    job = client.jobs.create(spec)
    until(lambda: (job.refresh().progress or {}).get("step"))
    assert job.set(lr=0.01).wait(timeout=60).state == "applied"
    probe = job.probe("fc", kinds=["param"], want=["full"], every=1)
    until(lambda: probe.refresh().state == "active", 30)
    weight = until(lambda: _newest(http, f"/jobs/{job.id}/layers/fc.weight/param"), 30)
    assert weight["shape"] == [10, weight["shape"][1]]
    probe.remove()
    until(lambda: len(job.checkpoints()) > 1, 30)
    job.pause()
    until(lambda: job.refresh().state == "paused", 60)
    before = job.refresh().progress
    job.resume()
    until(lambda: (job.refresh().progress or {})["step"] > before["step"] + 50, 60)
    assert job.checkpoint().wait(timeout=60).state == "applied"
    job.cancel()
    until(lambda: job.refresh().state == "cancelled")


def _newest(http: httpx2.Client, path: str) -> dict[str, Any] | None:
    answer = http.get(path)
    return answer.json() if answer.status_code == 200 else None


def test_the_values_of_single_processes_are_seen_beside_those_of_all(
    client: gh.Client, local_service: LocalService, digits: str
):
    """The job of ``examples/processes.json``: in events, by the client and on the command line."""
    spec = json.loads((ROOT / "examples" / "processes.json").read_text())
    for source in ("train", "validation"):
        spec["data"][source]["dataset"] = digits
    spec["data"]["drop_last"] = True  # both processes have 32 rows in all steps
    job = client.jobs.create(spec | {"stop": {"steps": 51}}).wait(timeout=120)
    fc = job.layers["fc"]
    merged, *own = [fc.stats("output", rank=rank) for rank in (None, 0, 1)]
    assert [one.rank for one in (merged, *own)] == [None, 0, 1]
    assert len(merged.steps) > 2
    assert np.mean([one["mean"] for one in own], axis=0) == pytest.approx(merged["mean"], rel=1e-9)
    assert (own[0]["mean"] != own[1]["mean"]).all()
    assert [one.rank for one in fc.all_stats("output", rank="all")] == [None, 0, 1]
    assert {one.rank for one in fc.all_stats("output")} == {None}
    stats = [event for event in job.stream(types=["stats"]) if event.step == 0]
    rows = {part.rank: part.rows for event in stats for part in event.ranks or []}
    for rank, one in enumerate(own):
        (row,) = [row for row in rows[rank] if row[:2] == ["fc", "output"]]
        assert row[2] == one["mean"][0]

    weight = job.layers["fc.weight"]
    assert np.array_equal(weight.param(step=50, rank=1), weight.param(step=50))
    assert {one["rank"] for one in (item.data for item in job.captures())} == {None}
    assert [item.data["rank"] for item in job.captures("fc.weight", rank=1)] == [1, 1]
    found = job.tensors(["fc.weight/param"], step=50, rank=1)["fc.weight/param"]
    assert np.array_equal(found, weight.param(step=50))
    with pytest.raises(gh.NotFoundError, match="not those of rank 0") as missing:
        weight.param(rank=0)
    assert '"ranks" to [0]' in str(missing.value)
    with pytest.raises(gh.APIError, match="not those of rank 0; set its ranks to"):
        weight.stats("param", rank=0)
    with pytest.raises(gh.APIError, match="no rank 2: it has 2 processes"):
        fc.stats("output", rank=2)
    tables = [job.layers.table(rank=rank)[-1]["stats"]["output"] for rank in (None, 0, 1)]
    assert [one["mean"] for one in tables] == [one["mean"][-1] for one in (merged, *own)]

    printed = local_service.command("layers", job.id, "fc", "--rank", "1", "--json")
    (shown,) = [one for one in json.loads(printed) if one["kind"] == "output"]
    assert (shown["rank"], shown["mean"]) == (1, own[1]["mean"][-1])


def test_a_probe_of_a_running_job_gets_ranks(client: gh.Client, digits: str):
    job = client.jobs.create(lasting(digits, 100_000, **TWO))
    until(lambda: (job.refresh().progress or {}).get("step"))
    probe = job.probe("fc", kinds=["output"], every=1, ranks=[1])
    assert probe.ranks == [1]
    until(lambda: [*job.layers["fc"].all_stats("output", rank=1)], 60)
    assert [*job.layers["fc"].all_stats("output", rank=0)] == []
    probe.update(ranks="all").wait(timeout=60)
    until(lambda: [*job.layers["fc"].all_stats("output", rank=0)], 60)
    with pytest.raises(gh.APIError, match="no rank 5"):
        probe.update(ranks=[5])
    job.cancel()
    until(lambda: job.refresh().state == "cancelled")


def test_what_several_processes_cannot_do_is_refused(http: httpx2.Client, digits: str):
    for change, pointer in (
        ({"tune": True}, "/tune"),
        ({"parallel": {"strategy": "dat"}}, "/parallel/strategy"),
        ({"parallel": {"strategy": "pipelined", "processes": 2}}, "/parallel/strategy"),
        ({"parallel": {"strategy": "pipeline", "processes": 300}}, "/parallel/processes"),
        ({"parallel": {"strategy": "pipeline", "processes": 200}}, "/data/batch_size"),
        ({"parallel": {"tensor": 2, "pipeline": 2}}, "/parallel/tensor"),
        ({**PARTS, "precision": "float16"}, "/precision"),
        ({"probes": [{**PROBE, "ranks": [0, 2]}]}, "/probes/0/ranks/1"),
        ({"probes": [{**PROBE, "ranks": "each"}]}, "/probes/0/ranks"),
        (
            {"probes": [{**PROBE, "ranks": [1]}], "parallel": {"strategy": "none"}},
            "/probes/0/ranks",
        ),
        ({"parallel": {"processes": 0}}, "/parallel/processes"),
        ({"parallel": {"processes": 900}}, "/parallel/processes"),
        ({"parallel": {"processes": 2, "workers": 1}}, "/parallel/workers"),
    ):
        answer = http.post("/jobs", json=small(digits, **TWO) | change)
        assert answer.status_code == 422, change
        assert answer.json()["errors"][0]["pointer"] == pointer, answer.json()
