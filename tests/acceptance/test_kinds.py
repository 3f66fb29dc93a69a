"""The kinds of tensor through the client: what goes in, what the update does and goes by."""

import numpy as np
import pytest

import glasshouse as gh
from tests.acceptance.specs import small

BETAS = (0.9, 0.999)


def test_inputs_updates_and_states_of_a_job_are_those_of_adam(client: gh.Client, digits: str):
    kinds = ["input", "output", "param", "param_grad", "update", "optim_state"]
    probe = {"layers": ["*", "loss*"], "kinds": kinds, "every": 1, "want": ["stats", "full"]}
    adam = {"type": "Adam", "args": {"lr": 0.01}}
    job = client.jobs.create(small(digits, optimizer=adam, probes=[probe])).wait()
    fc = job.layers["fc"]

    assert np.array_equal(fc.input(step=2), job.layers["flat"].output(step=2))
    for step in range(4):
        change = fc.param("weight", step=step + 1) - fc.param("weight", step=step)
        np.testing.assert_allclose(fc.update("weight", step=step), change, atol=1e-7)
    first, second = (fc.param_grad("weight", step=step) for step in (0, 1))
    expected = BETAS[0] * (1 - BETAS[0]) * first + (1 - BETAS[0]) * second
    average = fc.optim_state("weight.exp_avg", step=1)
    np.testing.assert_allclose(average, expected, rtol=1e-4, atol=1e-8)
    assert fc.optim_state("weight.step", step=1) == 2

    samples = job.layers["loss.samples"].output(step=0)
    assert samples.shape == job.layers["loss.rows"].output(step=0).shape == (100,)
    assert samples.mean() == pytest.approx(float(job.layers["loss"].output(step=0)), rel=1e-5)
    assert fc.stats("input").steps.tolist() == [0, 1, 2, 3, 4]
    shown = {entry["name"]: entry for entry in job.layers.table()}["fc"]
    assert shown["state_names"] == ["step", "exp_avg", "exp_avg_sq"]
    assert {"fc.weight", "fc.weight.exp_avg"} <= shown["tensors"].keys()


def test_what_a_layer_cannot_show_is_refused_with_the_reason(client: gh.Client, digits: str):
    with pytest.raises(gh.APIError) as refused:
        probe = {"layers": ["fc"], "kinds": ["optim_state"], "every": 1}
        client.jobs.create(small(digits, probes=[probe]))
    assert "keeps no state" in str(refused.value)
    with pytest.raises(gh.APIError, match="at most 1,000"):
        probe = {"layers": ["fc"], "kinds": ["output"], "every": 1}
        client.jobs.create(small(digits, probes=[probe] * 10_000))


def test_clipping_and_shared_layers_train_and_infer(client: gh.Client, digits: str):
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "a", "type": "Linear", "args": {"out_features": 64}},
        {"name": "act", "type": "ReLU", "args": {"inplace": True}},
        {"name": "b", "shared_with": "a"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    changes = {
        "network": {"layers": layers},
        "grad_clip": {"type": "global_norm", "max": 0.1},
        "probes": [
            {"layers": ["a.weight"], "kinds": ["param_grad"], "every": 1, "point": "clipped"}
        ],
    }
    job = client.jobs.create(small(digits, **changes)).wait()
    norms = job.metrics("grad_norm").numpy()
    assert len(norms) == 5
    assert min(norms) > 0.1
    assert max(job.layers["a.weight"].stats("param_grad")["l2"]) <= 0.1
    shown = {entry["name"]: entry for entry in job.layers.table()}
    assert shown["b"]["shared_with"] == "a"
    assert [shown[name]["parameters"] for name in ("a", "b")] == [64 * 64 + 64, 0]
    rows = np.zeros((3, 1, 8, 8), np.float32)
    found = client.infer(job, inputs=rows, outputs=["b"])
    assert found["b"].shape == (3, 64)
