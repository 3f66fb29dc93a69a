"""Inference on rows of different lengths: every output is what its row gives alone."""

import json

import pytest
import torch
from safetensors.torch import load_file

from engine.network.network import Network
from glasshouse.spec import parse_job
from tests.unit.engine.ragged import TEXTS, job, meta_of, texts
from tests.unit.engine.runs import errors, of_type, planned, run

LIMIT = {"sequence": {"max_length": 6}}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def trained(table, tmp_path_factory):
    """A trained job that reads six steps at most: spec, checkpoint's directory, network."""
    directory = tmp_path_factory.mktemp("trained")
    spec = job(data=LIMIT)
    resolved = planned(spec, meta_of(table))["spec"]
    records = run(directory, spec, table)
    checkpoint = directory / of_type(records, "checkpoint")[-1]["dir"]
    graph = parse_job(json.dumps(resolved)).network
    network = Network(graph, [layer.name for layer in graph.layers])
    network.load_state_dict(load_file(checkpoint / "model.safetensors"))
    return resolved, checkpoint, network.eval()


def infer(trained, table, directory, **changes):
    resolved, checkpoint, _ = trained
    data = {} if "inputs" in changes else {"data": {"dataset": "ds_1", "batch_size": 5}}
    spec = {"kind": "infer", "job": "job_x", **data, **changes}
    more = {"trained_by": resolved, "checkpoint": {"dir": str(checkpoint)}}
    records = run(directory, spec, table, **more)
    return records, load_file(directory / "artifacts" / "outputs.safetensors")


@torch.inference_mode()
def alone(trained, rows=TEXTS, most=6):
    """Each row by itself, with no padding anywhere."""
    cut = [row[:most] for row in rows]
    return [
        trained[2]({"ids": torch.tensor([row]), "ids.lengths": torch.tensor([len(row)])})
        for row in cut
    ]


def test_padded_outputs_have_zeros_behind_the_end_of_each_row(trained, table, tmp_path):
    _, found = infer(trained, table, tmp_path, outputs=["lstm", "emb", "fc"])
    lengths = [min(len(row), 6) for row in TEXTS]
    assert found["lstm/lengths"].tolist() == found["emb/lengths"].tolist() == lengths
    assert "fc/lengths" not in found
    assert found["lstm/value"].shape == (12, 6, 5)
    for number, values in enumerate(alone(trained)):
        end = lengths[number]
        for name in ("lstm", "emb"):
            mine = found[f"{name}/value"][number]
            torch.testing.assert_close(mine[:end], values[name][0])
            assert (mine[end:] == 0).all()
        torch.testing.assert_close(found["fc/value"][number], values["fc"][0])


def test_packed_outputs_have_the_steps_of_all_rows_one_after_the_other(trained, table, tmp_path):
    asked = {"outputs": ["lstm", "fc"], "fields": ["value", "id"], "sequence_layout": "packed"}
    records, found = infer(trained, table, tmp_path, **asked)
    expected = torch.cat([values["lstm"][0] for values in alone(trained)])
    torch.testing.assert_close(found["lstm/value"], expected)
    assert torch.equal(found["lstm/id"], expected.argmax(-1))
    assert found["lstm/lengths"].sum() == len(expected)
    assert found["fc/value"].shape == (12, 2)
    (result,) = of_type(records, "result")
    assert result["result"]["lstm"]["lengths"]["data"] == found["lstm/lengths"].tolist()


def test_inline_rows_can_differ_in_length_and_be_empty(trained, table, tmp_path):
    rows = [[3, 1, 4], [9], [], [1, 2, 3, 4, 5, 6, 7, 8]]
    _, found = infer(trained, table, tmp_path, inputs={"ids": rows}, outputs=["lstm", "fc"])
    assert found["lstm/lengths"].tolist() == [3, 1, 0, 6]
    for number in (0, 1, 3):
        values = alone(trained, [rows[number]])[0]
        torch.testing.assert_close(found["fc/value"][number], values["fc"][0])
    assert (found["lstm/value"][2] == 0).all()


def test_packed_steps_are_joined_below_each_other(trained, table, tmp_path):
    asked = {"outputs": ["lstm", "emb"], "sequence_layout": "packed", "flatten": {"axis": 1}}
    _, found = infer(trained, table, tmp_path, **asked)
    assert found["value"].shape == (sum(min(len(row), 6) for row in TEXTS), 9)
    assert set(found) == {"value", "lstm/lengths", "emb/lengths"}


@pytest.mark.parametrize(
    ("changes", "pointer", "says"),
    [
        ({"inputs": {"ids": [1, 2]}}, "/inputs/ids", "not a list of rows that are lists"),
        (
            {"inputs": {"ids": [[1], [1, 10]]}},
            "/inputs/ids",
            "row 1: input 'ids' takes integers in",
        ),
        ({"inputs": {"ids": [[1], [[1]]]}}, "/inputs/ids", "row 1: input 'ids' has shape [1, 1]"),
        ({"inputs": {"ids": [[1], ["a"]]}}, "/inputs/ids", "row 1"),
        ({"inputs": {"ids": []}}, "/inputs/ids", "not a list of rows"),
        (
            {"outputs": ["lstm", "fc"], "sequence_layout": "packed", "flatten": {"axis": 1}},
            "/flatten",
            "packed, the outputs differ in rows",
        ),
    ],
)
def test_what_does_not_fit_is_refused(trained, table, changes, pointer, says):
    data = {} if "inputs" in changes else {"data": {"dataset": "ds_1"}}
    spec = {"kind": "infer", "job": "job_x", **data, **changes}
    assert says in errors(spec, meta_of(table), network=trained[0])[pointer]
