"""Sparse vectors: what an EmbeddingBag makes of them is what a Linear makes of the whole vector."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.unit.engine.ragged import job, meta_of, write_ragged
from tests.unit.engine.runs import errors, losses, of_type, planned, run

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's, once

WIDTH = 12
PLACES = [[3, 1], [11], [], [0, 5, 7, 2], [4, 0], [9, 10, 11], [1], [2, 8, 3], [6, 5]]
ROWS = [
    {
        "ones": places,
        "pairs": [[place, (place - 4) / 2] for place in places],
        "label": len(places) % 2,
    }
    for places in PLACES
]
BAG = {"name": "bag", "type": "EmbeddingBag", "inputs": ["x"]}
FC = {"name": "fc", "type": "Linear", "args": {"out_features": 2}}
FIELDS = {
    "sparse_binary": {"type": "sparse_binary", "dim": WIDTH, "column": "ones"},
    "sparse_float": {"type": "sparse_float", "dim": WIDTH, "column": "pairs"},
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_ragged(tmp_path_factory.mktemp("sparse"), ROWS)


def spec(kind, optimizer=None, *, only_bag=False, sparse=False, **changes):
    args = {"embedding_dim": 2 if only_bag else 3, "mode": "sum", "sparse": sparse}
    bag = {**BAG, "args": args, "name": "fc" if only_bag else "bag"}
    fields = {"x": FIELDS[kind], "label": {"type": "integer", "dim": 2}}
    data = {"fields": fields, "batch_size": 4}
    changes = {"optimizer": optimizer or {"type": "SGD", "args": {"lr": 0.3}}, **changes}
    return job([bag] if only_bag else [bag, FC], data=data, **changes)


def whole(kind):
    """The vectors that are never made."""
    x = torch.zeros(len(ROWS), WIDTH)
    for number, row in enumerate(ROWS):
        for place, value in row["pairs"]:
            x[number, place] += 1.0 if kind == "sparse_binary" else value
    return x


def by_hand(kind, make_optimizer, *, only_bag=False):
    torch.manual_seed(3)
    bag = nn.EmbeddingBag(WIDTH, 2 if only_bag else 3, mode="sum")
    rest = nn.Identity() if only_bag else nn.Linear(3, 2)
    optimizer = make_optimizer([*bag.parameters(), *rest.parameters()])
    x, labels = whole(kind), torch.tensor([row["label"] for row in ROWS])
    found = []
    for epoch in range(3):
        generator = torch.Generator().manual_seed(3 * 1_000_003 + epoch)
        for rows in torch.randperm(len(ROWS), generator=generator).split(4):
            loss = nn.functional.cross_entropy(rest(x[rows] @ bag.weight), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", FIELDS)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("name", "args"), [("SGD", {"lr": 0.3}), ("Adagrad", {"lr": 0.2})])
def test_a_bag_trains_as_a_linear_layer_over_the_whole_vector(
    table, tmp_path, kind, sparse, name, args
):
    records = run(tmp_path, spec(kind, {"type": name, "args": args}, sparse=sparse), table)
    expected = by_hand(kind, lambda parameters: getattr(torch.optim, name)(parameters, **args))
    assert losses(records) == pytest.approx(expected, rel=1e-4)


def test_sparse_adam_moves_the_rows_that_were_read_and_no_other(table, tmp_path):
    optimizer = {"type": "SparseAdam", "args": {"lr": 0.1}}
    changes = {"only_bag": True, "sparse": True, "stop": {"steps": 1}}
    records = run(tmp_path, spec("sparse_float", optimizer, **changes), table)
    saved = tmp_path / of_type(records, "checkpoint")[-1]["dir"] / "model.safetensors"
    torch.manual_seed(3)
    before = nn.EmbeddingBag(WIDTH, 2, mode="sum").weight
    moved = (load_file(saved)["fc.weight"] != before).any(1)
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(3 * 1_000_003))
    read = {place for row in order[:4] for place in PLACES[row]}
    values_of_zero = {4}  # the pair [4, 0.0] gives no gradient
    assert set(torch.nonzero(moved)[:, 0].tolist()) == read - values_of_zero


@pytest.mark.parametrize("kind", FIELDS)
def test_the_planner_fills_in_what_a_bag_reads(table, kind):
    plan = planned(spec(kind), meta_of(table))
    bag = plan["spec"]["network"]["layers"][0]
    assert bag["inputs"] == (["x"] if kind == "sparse_binary" else ["x", "x.values"])
    assert (bag["lengths"], bag["args"]["num_embeddings"]) == ("x.lengths", WIDTH)
    assert planned(plan["spec"], meta_of(table))["spec"] == plan["spec"]
    num_places = sum(map(len, PLACES))
    width = 4 if kind == "sparse_binary" else 8
    assert plan["memory"]["data_bytes"] == num_places * width + 9 * 16 + 9 * 8


def test_inference_takes_places_and_values(table, tmp_path):
    records = run(tmp_path / "trained", spec("sparse_float"), table)
    checkpoint = tmp_path / "trained" / of_type(records, "checkpoint")[-1]["dir"]
    trained = json.loads((tmp_path / "trained" / "job.json").read_text())["spec"]
    more = {"trained_by": trained, "checkpoint": {"dir": str(checkpoint)}}
    found = []
    for number, source in enumerate(
        ({"data": {"dataset": "ds_1"}}, {"inputs": {"x": [row["pairs"] for row in ROWS]}})
    ):
        out = tmp_path / str(number)
        run(out, {"kind": "infer", "job": "job_x", "outputs": ["bag"], **source}, table, **more)
        found.append(load_file(out / "artifacts" / "outputs.safetensors")["bag/value"])
    weight = load_file(checkpoint / "model.safetensors")["bag.weight"]
    for got in found:
        torch.testing.assert_close(got, whole("sparse_float") @ weight)
    refused = {"kind": "infer", "job": "job_x", "inputs": {"x": [[[12, 1.0]]]}}
    said = errors(refused, meta_of(table), network=trained)["/inputs/x"]
    assert "takes places in [0, 12)" in said


@pytest.mark.parametrize(
    ("kind", "column", "pointer", "says"),
    [
        ("sparse_float", "ones", "/data/fields/x/column", "needs lists of pairs [place, value]"),
        ("sparse_binary", "pairs", "/data/fields/x/column", "needs lists of integers"),
    ],
)
def test_a_column_of_another_kind_is_refused(table, kind, column, pointer, says):
    wrong = spec(kind)
    wrong["data"]["fields"] = {
        "x": {**FIELDS[kind], "column": column},
        "label": {"type": "integer", "dim": 2},
    }
    assert says in errors(wrong, meta_of(table))[pointer]


def test_a_layer_that_would_need_the_whole_vector_is_refused(table):
    network = [{"name": "fc", "type": "Linear", "args": {"out_features": 2}, "inputs": ["x"]}]
    wrong = {**spec("sparse_binary"), "network": {"layers": network}}
    assert (
        "read it with EmbeddingBag" in errors(wrong, meta_of(table))["/network/layers/0/inputs/0"]
    )


@pytest.mark.parametrize("pair", [[12, 1.0], [-1, 1.0], [1.5, 1.0]])
def test_a_place_outside_is_named_by_row(tmp_path, pair):
    bad = write_ragged(tmp_path / "data", [*ROWS[:2], {**ROWS[0], "pairs": [[1, 2.0], pair]}])
    with pytest.raises(AssertionError, match=rf"row 2 of split 'all' has {pair[0]} as value 1 of"):
        run(tmp_path / "run", spec("sparse_float"), bad)
