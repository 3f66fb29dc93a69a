"""What watching costs, as a client sees it: published, held under a budget, and told."""

from typing import Any

import glasshouse as gh
from tests.acceptance.specs import small
from tests.waiting import until

MUCH = 60
KINDS = ["output", "output_grad"]


def deep(digits: str, steps: int, **changes: Any) -> dict[str, Any]:
    """Many tiny layers: to look at each takes longer than to compute it."""
    layers: list[dict[str, Any]] = [{"name": "flat", "type": "Flatten"}]
    layers += [{"name": f"tanh{number}", "type": "Tanh"} for number in range(MUCH)]
    layers.append({"name": "fc", "type": "Linear", "args": {"out_features": 10}})
    return small(digits, network={"layers": layers}, stop={"steps": steps}) | changes


def test_a_job_that_is_watched_too_closely_slows_its_probe_down_and_says_so(
    client: gh.Client, digits: str
):
    job = client.jobs.create(deep(digits, 1_000_000))
    try:
        until(lambda: job.refresh().progress.get("step"), what="the first step")
        probe = job.probe("*", kinds=KINDS, every=1)
        assert 0 < probe.estimated_cost_s < 1
        assert (probe.max_overhead, probe.every_now, probe.cost_s) == (0.03, 1, None)
        told = until(lambda: next(job.events(["adjusted"]), None), what="an adjusted event")
        since = probe.refresh().applied_step
        assert since is not None
        assert told.step - since <= 50
        assert (told.what, told.probe) == (f"probe {probe.id}.every", probe.id)
        assert (told.by, told.from_) == ("max_overhead", 1)
        assert told.to > 1
        until(lambda: probe.refresh().cost_s, what="a measured cost")
        overhead = until(lambda: job.refresh().probe_overhead, what="probe_overhead")
        assert overhead["budget"] == 0.03
        assert overhead["fraction"] > 0
        newest = [event.to for event in job.events(["adjusted"])]
        assert until(lambda: probe.refresh().every_now > 1)
        assert probe.every == 1, newest
        free = probe.update(max_overhead=None).wait(timeout=20)
        assert (free.max_overhead, free.every_now) == (None, 1)
        assert job.refresh().probe_overhead is not None
    finally:
        job.cancel(force=True)


def test_both_phases_are_read_apart(client: gh.Client, digits: str):
    data = small(digits)["data"] | {"validation": {"dataset": digits, "split": "validation"}}
    training = {"layers": ["fc"], "kinds": ["output"], "every": 1, "want": ["stats", "full"]}
    job = client.jobs.create(
        small(
            digits,
            data=data,
            evaluate={"every_steps": 2},
            probes=[training, training | {"phase": "evaluate"}],
        )
    )
    job.wait(timeout=60)
    fc = job.layers["fc"]
    assert fc.stats("output").steps.tolist() == [0, 1, 2, 3, 4]
    judged = fc.stats("output", phase="evaluate")
    assert (judged.phase, judged.steps.tolist()) == ("evaluate", [1, 3, 4])
    of_training = fc.tensor("output", step=3)
    of_evaluation = fc.tensor("output", step=3, phase="evaluate")
    assert of_training.step == of_evaluation.step == 3
    assert not (of_training.values[:10] == of_evaluation.values[:10]).all()
    assert len({(entry.layer, entry.phase) for entry in fc.all_stats("output")}) == 2
