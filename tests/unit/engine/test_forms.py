"""What a probe keeps of a tensor: quantiles, a histogram, a slice, a sample."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file

from engine.probes.tensors.slices import SliceTooLarge, TensorPart, kept, num_bytes, parts, take
from glasshouse.histogram_bins import QUANTILES, RELATIVE_ERROR, bins_of
from glasshouse.slices import BadSlice, parse
from glasshouse.spec import Probe
from tests.unit.api.test_slices import PARTS, write
from tests.unit.engine.runs import losses, of_type, planned, run, spec
from tests.unit.engine.test_plans import errors
from tests.unit.engine.test_watching import KINDS

ALL = {"layers": ["*"], "kinds": KINDS, "every": 1}


def probe(**changes) -> Probe:
    return Probe.model_validate_json(json.dumps({**ALL, **changes}))


def captures(tmp_path, records) -> dict:
    return {
        (record["step"], entry["layer"], entry["kind"], entry["form"]): (
            entry,
            file[entry["tensor"]],
        )
        for record in of_type(records, "captures")
        for file in [load_file(tmp_path / record["file"])]
        for entry in record["tensors"]
    }


def test_histograms_and_quantiles_of_a_step_are_those_of_its_tensors(digits, tmp_path):
    whole = {**ALL, "every": 4, "want": ["histogram", "quantiles", "full"]}
    records = run(tmp_path, spec(probes=[whole]), digits)
    tensors = captures(tmp_path, records)
    found = of_type(records, "stats")
    assert [record["step"] for record in found] == [0, 4, 8]
    assert [record["rows"] for record in found] == [[]] * 3
    for record in found:
        assert len(record["histograms"]) == len(record["quantiles"]) == len(tensors) / 3
        for layer, kind, bins, counts in record["histograms"]:
            x = tensors[record["step"], layer, kind, "full"][1].double().numpy()
            expected = np.unique(bins_of(x), return_counts=True)
            assert (bins, counts) == tuple(item.tolist() for item in expected)
        for layer, kind, *values in record["quantiles"]:
            x = tensors[record["step"], layer, kind, "full"][1].double().numpy()
            for mine, q in zip(values, QUANTILES.values(), strict=True):
                ends = [abs(np.quantile(x, q, method=way)) for way in ("lower", "higher")]
                assert abs(mine - np.quantile(x, q)) <= RELATIVE_ERROR * max(ends) + 1e-38


def test_two_probes_of_one_tensor_share_its_histogram(digits, tmp_path):
    fc = {"layers": ["fc"], "kinds": ["output", "param"], "every": 1}
    probes = [{**fc, "want": ["histogram"]}, {**fc, "want": ["stats", "quantiles"]}]
    record = of_type(run(tmp_path, spec(probes=probes, stop={"steps": 1}), digits), "stats")[0]
    names = [["fc", "output"], ["fc.bias", "param"], ["fc.weight", "param"]]
    for key in ("rows", "histograms", "quantiles"):
        assert [row[:2] for row in record[key]] == names


def test_every_form_at_once_changes_no_bit(digits, tmp_path):
    plain = run(tmp_path / "plain", spec(), digits)
    wants = ["stats", "histogram", "quantiles", "full", "sample"]
    watched = run(
        tmp_path / "watched",
        spec(probes=[{**ALL, "want": wants, "slice": "::-1", "max_bytes": 200_000}]),
        digits,
    )
    assert losses(watched) == losses(plain)
    weights = [
        load_file(tmp_path / name / of_type(found, "checkpoint")[-1]["dir"] / "model.safetensors")
        for name, found in (("plain", plain), ("watched", watched))
    ]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    forms = {form for _, _, _, form in captures(tmp_path / "watched", watched)}
    assert forms == {"slice", "sample"}


def test_a_slice_and_a_sample_are_parts_of_the_whole(digits, tmp_path):
    fc = {"layers": ["conv1", "fc"], "kinds": ["output"], "every": 1}
    probes = [
        {**fc, "want": ["full"]},
        {**fc, "want": ["full"], "slice": "60:2:-7,1::3"},
        {**fc, "want": ["sample"], "max_bytes": 9000},
    ]
    records = run(tmp_path, spec(probes=probes), digits)
    found = captures(tmp_path, records)
    assert len(found) == 10 * 2 * 3
    for (step, layer, kind, form), (record, tensor) in found.items():
        whole = found[step, layer, kind, "full"][1]
        assert record["captured_from"] == list(whole.shape)
        assert record["shape"] == list(tensor.shape)
        if form == "full":
            assert record["slice"] is None
            continue
        index = parse(record["slice"], tuple(whole.shape))
        assert np.array_equal(tensor.numpy(), whole.numpy()[index])
        assert record["size_bytes"] == tensor.numel() * 4
    conv = [record["slice"] for (_, layer, _, form), (record, _) in found.items()
            if (layer, form) == ("conv1", "sample")]  # fmt: skip
    assert conv == (["0:64:7"] * 4 + ["0:44:5"]) * 2
    rows = [record["shape"][0] for (_, layer, _, form), (record, _) in found.items()
            if (layer, form) == ("fc", "sample")]  # fmt: skip
    assert rows == ([64] * 4 + [44]) * 2


def test_a_short_batch_leaves_an_empty_part(digits, tmp_path):
    fc = {"layers": ["fc"], "kinds": ["output"], "every": 1, "want": ["full"]}
    probes = [{**fc, "slice": "50"}, {**fc, "slice": "50:,0"}]
    records = run(tmp_path, spec(probes=probes, stop={"epochs": 1}), digits)
    assert not of_type(records, "dropped")
    found = [entry for record in of_type(records, "captures") for entry in record["tensors"]]
    shapes = [(entry["slice"], entry["shape"]) for entry in found]
    assert shapes == [("50", [10]), ("50:,0", [14])] * 4 + [("50", [0, 10]), ("50:,0", [0])]


@given(st.lists(PARTS, min_size=1, max_size=3))
def test_a_part_is_what_numpy_takes(indices):
    x = torch.arange(125).reshape(5, 5, 5)
    part = TensorPart("slice", ",".join(map(write, indices)))
    expected = x.numpy()[tuple(indices)]
    found = take(x, part)
    assert np.array_equal(found.numpy(), expected)
    assert num_bytes(part, (5, 5, 5), 8) == expected.nbytes


def test_a_part_of_a_sparse_tensor_is_taken():
    x = torch.eye(4)
    assert torch.equal(take(x.to_sparse(), TensorPart("slice", "1:3,...")), x[1:3])


@given(st.lists(st.integers(0, 40), max_size=3), st.integers(1, 5000))
def test_a_sample_is_evenly_spaced_and_fits(shape, max_bytes):
    x = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    wanted = probe(want=["sample"], max_bytes=max_bytes)
    entry = x.numel() * 4 // shape[0] if shape and shape[0] else 0
    if entry > max_bytes:
        with pytest.raises(SliceTooLarge, match=f"smallest that works is {entry}"):
            parts(wanted, tuple(shape), 4)
        return
    ((part, found, _),) = kept([wanted], x)
    if not shape:
        assert (part.slice, found.shape) == (None, ())
        return
    assert part.form == "sample"
    start, size, step = map(int, part.slice.split(":"))
    assert (start, size) == (0, shape[0])
    assert torch.equal(found, x[::step])
    assert found.numel() * 4 <= max_bytes
    if step > 1:  # one step narrower would not fit
        assert len(range(0, size, step - 1)) * entry > max_bytes


def test_a_sample_takes_what_the_documents_say_by_default():
    assert parts(probe(want=["sample"]), (4096, 64), 4) == [TensorPart("sample", "0:4096:16")]
    assert parts(probe(want=["sample"]), (10,), 4) == [TensorPart("sample", "0:10:1")]


def test_a_part_that_several_probes_keep_is_kept_once():
    slices = [("0", False), ("0", True), ("1", False)]
    probes = [probe(want=["full"], slice=text, lossless=lossless) for text, lossless in slices]
    found = [(part.slice, lossless) for part, _, lossless in kept(probes, torch.zeros(3))]
    assert found == [("0", True), ("1", False)]


# --- the plan --------------------------------------------------------------------------------


def test_the_plan_counts_the_bytes_that_are_kept():
    fc = {"layers": ["fc"], "kinds": ["output"], "every": 1}
    probes = [
        fc,
        {**fc, "want": ["full"]},
        {**fc, "want": ["full", "stats"], "slice": "0:8,0"},
        {**fc, "want": ["sample"], "max_bytes": 400},
        {**fc, "want": ["full", "sample"], "slice": "0", "max_bytes": 400},
        {**fc, "want": ["histogram"]},
    ]
    plan = planned(spec(probes=probes))
    whole = 64 * 10 * 4
    sizes = [entry["bytes_per_step"] for entry in plan["probes"]]
    assert sizes == [whole, whole, 8 * 4, 10 * 40, 40 + 10 * 40, whole]


def test_a_slice_makes_room_under_the_limit_of_a_step():
    big = {
        "network": {"layers": [{"name": "fc", "type": "Linear", "args": {"out_features": 10**6}}]},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
    }
    big["network"]["layers"].insert(0, {"name": "flat", "type": "Flatten"})
    fc = {"layers": ["fc.weight"], "kinds": ["param"], "every": 1, "want": ["full"]}
    many = [{**fc, "layers": ["fc"], "kinds": ["output", "output_grad"]}]
    assert "limit" in errors(spec(**big, probes=many))["/probes/0/want"]
    planned(spec(**big, probes=[{**many[0], "slice": "0:4"}]))
    planned(spec(**big, probes=[{**many[0], "want": ["sample"], "max_bytes": 2**22}]))


REFUSED = {
    "a number out of range": ({"slice": "64"}, "slice", "out of range for axis 0"),
    "a range beyond the shape": (
        {"slice": "0:4,5000:6000"}, "slice", "5000:6000 has nothing of axis 1, which has size 10"),
    "no slice at all": ({"slice": "a"}, "slice", "as in numpy"),
    "a step of 0": ({"slice": "::0"}, "slice", "may not be 0"),
    "a slice of nothing": ({"slice": "0:4", "want": ["sample"]}, "slice", "add full to want"),
    "too many axes": ({"slice": "0,0,0"}, "slice", "3 axes, but the tensor has 2"),
    "no room for an entry": (
        {"want": ["sample"], "max_bytes": 39}, "max_bytes", "smallest that works is 40"),
    "no room for the whole": ({"max_bytes": 2559}, "max_bytes", "smallest that works is 2560"),
    "no room for the slice": (
        {"slice": "0:2", "max_bytes": 79}, "max_bytes", "smallest that works is 80"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_part_that_cannot_be_kept_is_refused_by_the_plan(name):
    change, field, said = REFUSED[name]
    fc = {"layers": ["fc"], "kinds": ["output"], "every": 1, "want": ["full"], **change}
    found = errors(spec(probes=[fc]))
    assert list(found) == [f"/probes/0/{field}"]
    assert said in found[f"/probes/0/{field}"]
    if name in ("no slice at all", "a step of 0", "a slice of nothing"):
        return  # wrong whatever it is of
    assert "fc/output" in found[f"/probes/0/{field}"]


def test_a_budget_too_small_says_the_smallest_that_works_for_all():
    every = {**ALL, "want": ["sample"], "max_bytes": 10}
    said = errors(spec(probes=[every]))["/probes/0/max_bytes"]
    smallest = int(said.rpartition(" ")[2])
    assert smallest == 6 * 6 * 6 * 4
    planned(spec(probes=[{**every, "max_bytes": smallest}]))
    assert errors(spec(probes=[{**every, "max_bytes": smallest - 1}]))


@pytest.mark.parametrize(
    "change",
    [
        {"slice": "0:4"},
        {"slice": "0:4", "want": ["sample"]},
        {"slice": "a", "want": ["full"]},
        {"slice": "::0", "want": ["full"]},
        {"slice": "", "want": ["full"]},
        {"slice": "...,...", "want": ["full"]},
        {"slice": "1," * 200, "want": ["full"]},
        {"max_bytes": 100},
        {"max_bytes": 0, "want": ["sample"]},
        {"max_bytes": "9", "want": ["sample"]},
        {"want": ["all"]},
        {"want": []},
    ],
)
def test_a_probe_with_a_wrong_form_is_no_probe(change):
    with pytest.raises(ValidationError):
        probe(**change)


def test_a_slice_that_is_no_slice_says_how_to_write_one():
    with pytest.raises(BadSlice, match="as in numpy"):
        parse("0:4:", ())
