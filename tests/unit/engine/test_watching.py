import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine.core.readback import Readback
from engine.data.batches.batch import Batch
from engine.network.layers import LayerFailed
from engine.network.network import Network
from engine.probes.probe_set import Probes
from engine.probes.statistics import plain_torch as plain
from engine.probes.statistics.summarize import summarize
from engine.probes.step_records import RecordSender
from engine.probes.watched.probe import ActiveProbe
from engine.probes.watched.requested import RequestedProbes
from engine.process.rank import Assignment
from engine.process.rank import run as run_assignment
from engine.training.report import Outputs
from glasshouse.spec import Graph, Probe
from tests.unit.engine.runs import captured, cnn, losses, of_type, planned, run, spec, write_job

CPU = torch.device("cpu")
KINDS = ["output", "output_grad", "param", "param_grad"]
EVERY_KIND = [*KINDS, "input", "update", "optim_state"]
BATCH = Batch({"x": torch.ones(5, 2, 4)}, {}, slice(0, 5))


def probe(**changes):
    whole = {"layers": ["*"], "kinds": KINDS, "every": 1, "want": ["stats", "full"]}
    return {**whole, "max_overhead": None, **changes}


def test_captures_equal_what_autograd_gives(digits, tmp_path):
    """Step 0 by hand, with a clone of each output taken before the in-place layer overwrites it."""
    records = run(tmp_path, spec(probes=[probe()], stop={"steps": 1}), digits)
    found = {(layer, kind): item for (_, layer, kind), item in captured(records, tmp_path).items()}
    images = torch.from_numpy(np.load(digits / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(digits / "train" / "1.npy"))
    torch.manual_seed(3)
    network = cnn()
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3 * 1_000_003))[:64]
    x = images[order].float() / 255
    names = ["conv1", "relu1", "pool1", "flat", "drop", "fc"]
    seen, outputs = {}, {}
    for name, layer in zip(names, network, strict=True):
        if name == "relu1":
            layer = nn.ReLU()  # noqa: PLW2901 - the twin that keeps its input
        x = layer(x)
        x.retain_grad()
        outputs[name] = x
        seen[name, "output"] = x.detach().clone()
    nn.functional.cross_entropy(x, labels[order]).backward()
    seen.update({(name, "output_grad"): item.grad for name, item in outputs.items()})
    for name, layer in (("conv1", network[0]), ("fc", network[5])):
        for key, value in layer.named_parameters():
            seen[f"{name}.{key}", "param"] = value.detach()
            seen[f"{name}.{key}", "param_grad"] = value.grad
    assert found.keys() == seen.keys()
    for key, expected in seen.items():
        assert torch.equal(found[key], expected), key


def test_statistics_of_a_step_are_those_of_its_captures(digits, tmp_path):
    records = run(tmp_path, spec(probes=[probe(every=3)]), digits)
    captures = captured(records, tmp_path)
    stats = of_type(records, "stats")
    assert [item["step"] for item in stats] == [0, 3, 6, 9]
    for record in stats:
        for layer, kind, *figures in record["rows"]:
            expected = by_numpy(captures.pop((record["step"], layer, kind)))
            assert figures == pytest.approx(expected, rel=1e-6, abs=1e-300)
    assert not captures


@pytest.mark.parametrize("inplace", [False, True])
def test_the_statistics_of_a_relu_and_of_its_input_are_those_of_their_captures(
    digits, tmp_path, inplace
):
    conv = {"out_channels": 3, "kernel_size": 3, "padding": 1}
    relu = {"type": "ReLU", "args": {"inplace": inplace}}
    layers = [
        {"name": "conv1", "type": "Conv2d", "args": conv},
        {"name": "relu1", **relu},
        {"name": "again", "type": "ReLU"},
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    job = spec(network={"layers": layers}, probes=[probe(kinds=["output", "output_grad"])])
    records = run(tmp_path, job, digits)
    captures = captured(records, tmp_path)
    for record in of_type(records, "stats"):
        for layer, kind, *figures in record["rows"]:
            tensor = captures.pop((record["step"], layer, kind))
            np.testing.assert_array_equal(figures, summarize(tensor), err_msg=f"{layer} {kind}")
    assert not captures


def test_rows_come_in_the_order_of_the_network(digits, tmp_path):
    records = run(tmp_path, spec(probes=[probe(want=["stats"])], stop={"steps": 1}), digits)
    layers = [row[0].partition(".")[0] for row in of_type(records, "stats")[0]["rows"]]
    assert list(dict.fromkeys(layers)) == ["conv1", "relu1", "pool1", "flat", "drop", "fc"]


def by_numpy(tensor: torch.Tensor) -> list[float]:
    """The figures in numpy, in float64."""
    x = tensor.detach().to(torch.float64).numpy().reshape(-1)
    finite = x[np.isfinite(x)]
    counts = [float(np.isnan(x).sum()), float(np.isinf(x).sum())]
    zeros = float((x == 0).mean()) if x.size else math.nan
    if finite.size == 0:
        return [math.nan] * 6 + [zeros, *counts]
    low, high = finite.min(), finite.max()
    with np.errstate(over="ignore"):
        l2, std = np.sqrt((finite**2).sum()), finite.std()
    absmax = np.abs(finite).max()
    return [float(v) for v in (finite.mean(), std, low, high, l2, absmax, zeros, *counts)]


def _tensors():
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(3, 700, generator=generator)
    holes = normal.clone()
    holes[0, :5] = math.nan
    holes[1, 7] = math.inf
    holes[2, 8] = -math.inf
    return {
        "normal": normal,
        "a large offset": normal * 1e-3 + 1e4,
        "not contiguous": normal.t()[::3],
        "half": normal.half(),
        "bfloat16": normal.bfloat16(),
        "float64": normal.double() * 1e100,
        "float64 whose squares overflow": torch.tensor([1e200, -2e200], dtype=torch.float64),
        "integers": torch.arange(-5, 9),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "booleans": torch.tensor([True, False, True]),
        "one element": torch.tensor([2.5]),
        "a scalar": torch.tensor(-2.5),
        "nothing": torch.empty(0, 3),
        "zeros": torch.zeros(7),
        "with holes": holes,
        "all NaN": torch.full((4,), math.nan),
        "all infinite": torch.tensor([math.inf, -math.inf]),
        "denormals": torch.tensor([1e-45, -3e-45, 0.0]),
        "the largest floats": torch.tensor([3.4e38, -3.4e38, 1.0]),
    }


@pytest.mark.parametrize("name", _tensors())
def test_figures_agree_with_numpy_in_float64(name):
    tensor = _tensors()[name]
    before = tensor.clone()
    expected = by_numpy(tensor)
    if "overflow" in name:
        expected[1] = 1.5e200
        expected[4] = math.sqrt(5) * 1e200
    found = summarize(tensor)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-300, nan_ok=True)
    assert torch.equal(tensor.nan_to_num(), before.nan_to_num())
    figures = plain.figures_on_device(tensor)
    assert figures.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-300, nan_ok=True)


def _small(probes: list[dict], out_dir: Path, emit):
    import json

    sizes = {
        "lstm": {"input_size": 4, "hidden_size": 3},
        "fc": {"in_features": 3, "out_features": 2},
    }
    layers = [
        {"name": "lstm", "type": "LSTM", "args": sizes["lstm"], "inputs": ["x"]},
        {"name": "fc", "type": "Linear", "args": sizes["fc"], "inputs": ["lstm"]},
    ]
    graph = Graph.model_validate_json(json.dumps({"layers": layers}))
    network = Network(graph, ("fc",))
    parsed = [Probe.model_validate_json(json.dumps(item)) for item in probes]
    return network, Probes(network, parsed, emit=emit, readback=Readback(CPU), out_dir=out_dir)


def _step(network, probes, step):
    with probes.at(step, BATCH):
        network(BATCH)["fc"].sum().backward()


def _num_hooks(network):
    return sum(len(module._forward_hooks) for module in network.modules())


def test_leaves_of_a_tuple_have_names_and_the_layer_means_the_first(tmp_path):
    seen: list = []
    everything = {"layers": ["lstm.*"], "kinds": ["output", "output_grad"], "every": 1}
    network, probes = _small([everything], tmp_path, seen.append)
    _step(network, probes, 0)
    rows = [(row[0], row[1]) for row in seen[0]["rows"]]
    assert rows == [
        ("lstm.0", "output"),
        ("lstm.0", "output_grad"),
        ("lstm.1.0", "output"),
        ("lstm.1.1", "output"),
    ]
    seen.clear()
    network, probes = _small([{**everything, "layers": ["lstm"]}], tmp_path, seen.append)
    _step(network, probes, 0)
    assert {row[0] for row in seen[0]["rows"]} == {"lstm.0"}


def test_hooks_exist_on_due_steps_only_and_none_remain(tmp_path):
    network, probes = _small([{"layers": ["*"], "kinds": KINDS, "at": [1, 4]}], tmp_path, print)
    for step in range(6):
        with probes.at(step, BATCH):
            assert bool(_num_hooks(network)) == (step in {1, 4})
        assert _num_hooks(network) == 0


def test_hooks_stay_between_steps_that_follow_and_see_nothing_there(tmp_path):
    seen: list = []
    alarm = {"layers": ["*"], "kinds": ["output"], "on": "nonfinite", "want": ["stats", "full"]}
    network, probes = _small([{**alarm, "stop": 3}], tmp_path, seen.append)
    for step in range(3):
        _step(network, probes, step)
        assert bool(_num_hooks(network)) == (step < 2)
        network({"x": torch.full((5, 2, 4), math.nan)})  # an evaluation, say
    probes.close()
    assert {record["type"] for record in seen} <= {"overhead"}


def test_hooks_go_when_another_probe_looks_and_when_the_job_ends(tmp_path):
    one = {"layers": ["fc"], "kinds": ["output"], "every": 1, "max_overhead": None}
    two = {"layers": ["lstm"], "kinds": ["output"], "every": 2, "max_overhead": None}
    network, probes = _small([one, two], tmp_path, print)
    counts = []
    for step in range(4):
        with probes.at(step, BATCH):
            counts.append(_num_hooks(network))
            network(BATCH)["fc"].sum().backward()
    assert counts == [2, 1, 2, 1]
    probes.close()
    assert _num_hooks(network) == 0


def test_hooks_go_when_the_step_fails(tmp_path):
    network, probes = _small([{"layers": ["*"], "kinds": KINDS, "every": 1}], tmp_path, print)
    with pytest.raises(LayerFailed), probes.at(0, BATCH):
        network({})
    assert _num_hooks(network) == 0


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        ({"every": 3}, [0, 3, 6, 9, 12, 15, 18]),
        ({"every": 3, "start": 4, "stop": 12}, [6, 9]),
        ({"at": [7, 2, 19]}, [2, 7, 19]),
        ({"every": 5, "start": 5}, [5, 10, 15]),
    ],
)
def test_a_probe_is_due_when_its_spec_says(when, steps, tmp_path):
    import json

    text = json.dumps({"layers": ["fc"], "kinds": ["param"], "max_overhead": None, **when})
    parsed = Probe.model_validate_json(text)
    assert [step for step in range(20) if ActiveProbe(0, parsed).is_due(step)] == steps
    seen: list = []
    network, probes = _small([json.loads(text)], tmp_path, seen.append)
    for step in range(20):
        _step(network, probes, step)
    assert [record["step"] for record in seen] == steps


def test_a_probe_that_fails_is_counted_and_switched_off(tmp_path, capfd):
    seen: list = []
    bad = {"layers": ["fc"], "kinds": ["output"], "every": 1, "want": ["full"]}
    good = {"layers": ["fc"], "kinds": ["param"], "every": 1}
    network, probes = _small([bad, good], tmp_path / "file", seen.append)
    (tmp_path / "file").write_text("where the directory should be")
    for step in range(5):
        _step(network, probes, step)
    dropped = of_type(seen, "dropped")
    assert len(dropped) == 3
    assert "probe 0" in dropped[0]["what"]
    assert "off after 3" in dropped[2]["what"]
    (told,) = of_type(seen, "probe")
    assert [(item["probe"], item["action"]) for item in told["changes"]] == [("0", "failed")]
    assert "captures" in told["changes"][0]["problem"]["detail"]
    assert len(of_type(seen, "stats")) == 5
    assert network.layers["fc"].weight.grad is not None
    capfd.readouterr()


def test_a_failure_around_the_update_fails_only_the_probe(digits, tmp_path, monkeypatch, capfd):
    def fail(*_):
        raise MemoryError("no room for a copy")

    plain = run(tmp_path / "plain", spec(), digits)
    for name in ("copies", "states"):
        with monkeypatch.context() as patch:
            patch.setattr(f"engine.probes.hooks.{name}", fail)
            bad = probe(layers=["fc"], kinds=["update", "optim_state", "output"], want=["stats"])
            good = probe(layers=["conv1"], kinds=["output"], want=["stats"])
            records = run(tmp_path / name, spec(probes=[bad, good]), digits)
        assert losses(records) == losses(plain)
        dropped = of_type(records, "dropped")
        assert len(dropped) == 3
        assert "probe 0: MemoryError: no room" in dropped[0]["what"]
        rows = [{row[0] for row in record["rows"]} for record in of_type(records, "stats")]
        assert len(rows) == 10
        assert "conv1" in rows[0]
        assert rows[-1] == {"conv1"}
    capfd.readouterr()


def test_scalars_in_memory_are_reported_beside_tensors_of_a_device():
    """Adam counts its steps on the CPU, wherever the parameters are."""
    seen: list = []
    there = torch.arange(9.0, dtype=torch.float64)
    rows = [("a", "param", there), ("b", "optim_state", [7.0] * 9), ("c", "param", -there)]
    RecordSender(seen.append, Readback(CPU)).send({"type": "stats"}, rows, [], [], None)
    (record,) = seen
    assert record["rows"] == [
        ["a", "param", *range(9)],
        ["b", "optim_state", *[7.0] * 9],
        ["c", "param", *(-item for item in range(9))],
    ]


# --- changed while it runs -------------------------------------------------------------------


class Asking:
    """A control that asks for other lists of probes once so many steps have ended."""

    cancel_requested = False
    threads = None
    listen = None
    orders = ()

    def __init__(self, *lists: tuple[int, RequestedProbes]) -> None:
        self.lists = lists
        self.seen: list = []

    @property
    def wanted(self):
        done = len(losses(self.seen))
        return next((found for after, found in reversed(self.lists) if done >= after), None)


def wanted(revision: int, **probes: dict):
    entries = [{"id": name, "probe": body} for name, body in probes.items()]
    return RequestedProbes.read({"revision": revision, "probes": entries})


def asked(
    directory: Path,
    table: Path,
    *lists: tuple[int, RequestedProbes],
    first: RequestedProbes | None = None,
):
    resolved = planned(spec())["spec"]
    path = write_job(directory, resolved, table) / "job.json"
    job = replace(Assignment.read(path), watched=first)
    control = Asking(*lists)
    (directory / "captures").mkdir()
    out = Outputs(directory, control.seen.append)
    assert run_assignment(job, control=control, out=out).state == "succeeded"
    return control.seen


def test_attaching_changing_and_removing_change_no_bit(digits, tmp_path):
    plain = run(tmp_path / "plain", spec(), digits)
    stats = probe(want=["stats"])
    lists = [
        (2, wanted(1, prb_a=probe(layers=["*", "*.*", "loss*"], kinds=EVERY_KIND))),
        (4, wanted(2, prb_a=probe(every=2), prb_b=stats)),
        (6, wanted(4, prb_b=stats)),
        (8, wanted(5)),
    ]
    records = asked(tmp_path / "watched", digits, *lists, first=wanted(0))
    assert losses(records) == losses(plain)
    weights = [
        load_file(tmp_path / name / of_type(found, "checkpoint")[-1]["dir"] / "model.safetensors")
        for name, found in (("plain", plain), ("watched", records))
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())

    told = [(r["step"], r["revision"], r["changes"]) for r in of_type(records, "probe")]
    assert told == [
        (2, 1, [{"probe": "prb_a", "action": "attached"}]),
        (
            4,
            2,
            [
                {"probe": "prb_a", "action": "changed"},
                {"probe": "prb_b", "action": "attached"},
            ],
        ),
        (6, 4, [{"probe": "prb_a", "action": "removed"}]),
        (8, 5, [{"probe": "prb_b", "action": "removed"}]),
    ]
    assert [r["step"] for r in of_type(records, "stats")] == [2, 3, 4, 5, 6, 7]
    assert {r["step"] for r in of_type(records, "captures")} == {2, 3, 4}


def test_a_first_list_replaces_that_of_the_spec_and_reports_what_is_new(digits, tmp_path):
    body = probe(want=["stats"], layers=["fc"], kinds=["output"], at=[0], every=None)
    entries = [{"id": "prb_a", "probe": body, "new": True}, {"id": "prb_b", "probe": body}]
    first = RequestedProbes.read({"revision": 3, "probes": entries})
    records = asked(tmp_path, digits, first=first)
    (record,) = of_type(records, "probe")
    assert (record["step"], record["revision"]) == (0, 3)
    assert record["changes"] == [{"probe": "prb_a", "action": "attached"}]
    assert [row[0] for row in of_type(records, "stats")[0]["rows"]] == ["fc"]


def test_a_probe_that_was_switched_off_stays_off_until_it_is_changed(tmp_path, capfd):
    seen: list = []
    bad = {"layers": ["fc"], "kinds": ["output"], "every": 1, "want": ["full"]}
    network, probes = _small([], tmp_path / "file", seen.append)
    (tmp_path / "file").write_text("where the directory should be")
    probes.watch(wanted(1, prb_bad=bad), 0)
    for step in range(5):
        _step(network, probes, step)
    probes.watch(wanted(2, prb_bad=bad, prb_good={**bad, "want": ["stats"]}), 5)
    _step(network, probes, 5)
    assert len(of_type(seen, "dropped")) == 3
    assert "probe prb_bad" in of_type(seen, "dropped")[0]["what"]
    probes.watch(wanted(3, prb_bad={**bad, "every": 2}), 6)
    _step(network, probes, 6)
    assert len(of_type(seen, "dropped")) == 4
    capfd.readouterr()


@pytest.mark.parametrize("document", [{}, {"revision": 1, "probes": [{"id": "a"}]}, [], None])
def test_an_invalid_list_of_probes_is_refused(document):
    with pytest.raises(ValueError, match="not a list of probes"):
        RequestedProbes.read(document)


class Counting:
    """A control that counts, from one step boundary to the next, what the interpreter calls."""

    wanted = None
    listen = None
    threads = None
    ends_as = "cancelled"
    orders = ()

    def __init__(self) -> None:
        self.of_steps: list[int] = []
        self.num_calls = 0

    def count(self, _frame: object, event: str, _arg: object) -> None:
        self.num_calls += event in ("call", "c_call")

    @property
    def cancel_requested(self) -> bool:
        self.of_steps.append(self.num_calls)
        self.num_calls = 0
        return False


def calls_of_a_step(directory, table, probes) -> int:
    """Of most of its steps: now and then one has something to report, or to look after."""
    job = spec(probes=probes, stop={"steps": 200}, checkpoint={"every_steps": 1000})
    path = write_job(directory, planned(job)["spec"], table)
    control, records = Counting(), []
    out = Outputs(directory, records.append)
    sys.setprofile(control.count)
    try:
        run_assignment(Assignment.read(path / "job.json"), control=control, out=out)
    finally:
        sys.setprofile(None)
    assert bool(of_type(records, "stats")) == any("start" not in one for one in probes)
    return statistics.mode(control.of_steps)


def test_a_step_on_which_nothing_is_due_calls_no_function_more(digits, tmp_path):
    """A clock tells no less than what chance makes of a step; the interpreter tells all of it."""
    without = calls_of_a_step(tmp_path / "a", digits, [])
    assert calls_of_a_step(tmp_path / "b", digits, [probe(start=10**6)]) == without
    assert calls_of_a_step(tmp_path / "c", digits, [probe(start=10**6)] * 20) == without
    assert calls_of_a_step(tmp_path / "d", digits, [probe(want=["stats"])]) > without
