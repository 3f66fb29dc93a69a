"""What a probe may ask for: names inside layers, sparse gradients, the loss, and refusals."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from engine.data.batches.rows import MemoryRows
from engine.data.sources.joined import source_rows
from engine.losses.loss_sums import Term
from engine.probes.statistics.summarize import summarize
from engine.probes.watched.select import may_match
from glasshouse.spec import Probe
from tests.unit.engine.runs import captured, errors, of_type, planned, run, spec
from tests.unit.engine.test_kinds import everything, job, layer
from tests.unit.engine.test_watching import by_numpy


def watching(*layers, **changes):
    return {"layers": [*layers], "kinds": ["output"], "every": 1, **changes}


def matched(name, *probes):
    return [item["matched"] for item in planned(job(name, probes=list(probes)))["probes"]]


def warnings_of(plan):
    return {item["pointer"]: item["detail"] for item in plan["warnings"]}


def test_globs_without_a_dot_stay_outside_of_layers():
    inside = ["self_attn.0", "dropout1", "norm1", "linear1", "dropout", "linear2", "dropout2"]
    names = [f"block0.{name}" for name in [*inside, "norm2"]]
    outside = ["rows", "wide", "act", "block0", "pooled", "fc"]
    everywhere, within, one = matched(
        "transformer", watching("*"), watching("block0.*"), watching("block0.self_attn")
    )
    assert everywhere == outside
    assert sorted(within) == sorted(names)
    assert one == ["block0.self_attn.0"]


def test_a_module_that_nothing_calls_is_refused_with_the_reason():
    found = errors(job("transformer", probes=[watching("block0.self_attn.out_proj")]))
    assert list(found) == ["/probes/0/layers/0"]
    assert "nothing calls it as a module" in found["/probes/0/layers/0"]
    plan = planned(job("transformer", probes=[watching("block0.*")]))
    assert "block0.self_attn.out_proj will not be seen" in warnings_of(plan)["/probes/0/layers/0"]


@pytest.mark.parametrize("glob", ["lstm.cell", "lstm.step.3", "lstm.h*"])
def test_the_inner_steps_of_a_fused_lstm_are_refused_with_how_to_open_them(glob):
    found = errors(job("lstm", probes=[watching(glob)]))
    reason = found["/probes/0/layers/0"]
    assert "fused LSTM" in reason
    assert "lstm.0, lstm.1.0, lstm.1.1" in reason
    assert "LSTMCell" in reason


def test_a_state_is_refused_where_the_optimizer_keeps_none(digits):
    probe = watching("conv1", kinds=["optim_state"])
    plain = {"type": "SGD", "args": {"lr": 0.1}}
    found = errors(spec(optimizer=plain, probes=[probe]))
    assert "SGD with these arguments keeps no state" in found["/probes/0/kinds/0"]
    with_momentum = planned(spec(probes=[probe]))["probes"][0]
    assert with_momentum["matched"] == [
        "conv1.weight.momentum_buffer",
        "conv1.bias.momentum_buffer",
    ]
    assert with_momentum["bytes_per_step"] == 4 * (6 * 9 + 6)


@pytest.mark.parametrize(
    ("probe", "pointer", "word"),
    [
        (watching("conv9"), "/probes/0/layers/0", "matches no layer or parameter"),
        (watching("flat", kinds=["param"]), "/probes/0/kinds/0", "no parameters"),
        (watching("relu1.inner"), "/probes/0/layers/0", "matches no layer"),
        (watching("loss", kinds=["output_grad"]), "/probes/0/kinds/0", "no output_grad"),
        (watching("conv1", point="cut"), "/probes/0/point", "'raw' or 'clipped'"),
        (watching("conv1", kinds=["weight"]), "/probes/0/kinds/0", "'optim_state'"),
    ],
)
def test_what_cannot_be_seen_is_refused_at_its_place(probe, pointer, word):
    found = errors(spec(probes=[probe]))
    assert word in found[pointer], found


def test_ten_thousand_probes_are_refused_by_the_limit():
    found = errors(spec(probes=[watching("conv1")] * 10_000))
    assert list(found) == ["/probes"]
    assert "at most 1,000" in found["/probes"]


def test_a_glob_that_has_none_of_the_kinds_is_reported(digits):
    probe = watching("conv1", "relu1", kinds=["param"])
    assert "relu1" in warnings_of(planned(spec(probes=[probe])))["/probes/0/layers/1"]


# --- gradients -------------------------------------------------------------------------------


def overwritten(*readers):
    """A view that is read by some layers and then overwritten through another's in-place op."""
    return [
        layer("conv1", "Conv2d", out_channels=6, kernel_size=3),
        layer("flat", "Flatten"),
        *readers,
        layer("act", "ReLU", ["flat"], inplace=True),
    ]


def test_a_gradient_that_is_never_computed_is_refused_not_missing():
    layers = [
        *overwritten(layer("double", "mul", ["flat"], other=2.0)),
        layer("sum", "add", ["double", "act"]),
        layer("fc", "Linear", out_features=10),
    ]
    probe = watching("flat", kinds=["output_grad"])
    found = errors(spec(network={"layers": layers}, probes=[probe]))
    assert "overwritten in place" in found["/probes/0/kinds/0"]


def test_layers_before_one_that_is_tried_on_a_tiny_batch_have_gradients(digits, tmp_path):
    """What depends on the values of a tensor cannot be traced without them."""
    args = {"in_features": 64, "n_classes": 10, "cutoffs": [4], "div_value": 2.0}
    layers = [
        layer("flat", "Flatten", ["image"]),
        layer("wide", "Linear", out_features=64),
        layer("best", "AdaptiveLogSoftmaxWithLoss", ["wide", "label"], **args),
    ]
    fields = {
        "image": {"type": "dense"},
        "label": {"type": "integer", "dim": 10},
        "zero": {"type": "dense", "column": "label", "scale": 0.0},
    }
    tried = spec(
        network={"layers": layers, "outputs": ["best.0"]},
        loss={"type": "L1Loss", "inputs": ["best.0", "zero"]},
        data={"fields": fields},
        probes=[watching("*", kinds=["output_grad", "param_grad", "input"])],
        stop={"steps": 1},
    )
    said = planned(tried)["probes"][0]["matched"]
    assert {"wide", "best.0", "wide.weight", "best.head.weight"} <= {*said}
    (record,) = of_type(run(tmp_path, tried, digits), "stats")
    shown = {row[0] for row in record["rows"]}
    assert shown == {*said}
    found = errors({**tried, "probes": [watching("best.head")]})
    assert "cannot be followed ahead of time" in found["/probes/0/layers/0"]


def sparse_job(**changes):
    layers = [
        layer("words", "Embedding", ["token"], num_embeddings=40, embedding_dim=5, sparse=True),
        layer("fc", "Linear", out_features=10),
    ]
    fields = {"token": {"type": "integer", "dim": 10, "column": "label"}}
    fields["label"] = {"type": "integer", "dim": 10}
    return spec(
        network={"layers": layers},
        data={"fields": fields, "batch_size": 8},
        **{"optimizer": {"type": "SGD", "args": {"lr": 0.1}}, "stop": {"steps": 2}, **changes},
    )


def test_figures_of_a_sparse_gradient_count_the_absent_rows_as_zeros(digits, tmp_path):
    probe = watching("words", kinds=["param_grad", "update"], want=["stats", "full"])
    records = run(tmp_path, sparse_job(probes=[probe]), digits)
    kept = captured(records, tmp_path)
    for record in of_type(records, "stats"):
        for name, kind, *figures in record["rows"]:
            whole = kept[record["step"], name, kind]
            assert whole.shape == (40, 5)
            assert figures == pytest.approx(by_numpy(whole), rel=1e-6)
            assert figures[6] >= 0.75  # ten of the forty rows exist in the data


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are:UserWarning")  # torch 2.11
@pytest.mark.parametrize("hole", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("indices", [[1, 1, 4], [], [0, 1, 2, 3, 4, 5]])
def test_sparse_figures_are_those_of_the_dense_tensor(hole, indices):
    values = torch.randn(len(indices), 3) - 2
    if hole is not None and len(indices):
        values[0, 1] = hole
    places = torch.tensor([indices], dtype=torch.int64)
    sparse = torch.sparse_coo_tensor(places, values, (6, 3), check_invariants=True)
    found = summarize(sparse)
    assert found == pytest.approx(by_numpy(sparse.to_dense()), rel=1e-6, nan_ok=True)
    assert sparse.is_coalesced() is (not indices)


# --- the loss --------------------------------------------------------------------------------


def test_the_rows_of_a_batch_are_those_of_the_split(digits, tmp_path):
    """With a fraction, the numbers are still those under which the dataset shows the rows."""
    probe = watching("loss.rows", "loss.samples", want=["full"])
    source = {"dataset": "ds_1", "split": "train", "fraction": [0.5, 1.0]}
    records = run(
        tmp_path,
        spec(probes=[probe], stop={"steps": 2}, data={"train": source}),
        digits,
    )
    kept = captured(records, tmp_path)
    taken = source_rows(300, (0.5, 1.0), 3)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(3 * 1_000_003))
    for step in range(2):
        expected = taken[order[step * 64 : (step + 1) * 64]]
        assert torch.equal(kept[step, "loss.rows", "output"], expected)
        assert kept[step, "loss.samples", "output"].shape == (64,)
    assert kept[0, "loss.rows", "output"].dtype == torch.int64


def test_a_batch_keeps_the_numbers_of_its_rows_when_later_ones_are_made():
    rows = MemoryRows({}, 10, torch.device("cpu"))
    batches = list(rows.in_order(4))
    numbers = [batch.row_numbers.tolist() for batch in batches]
    with pytest.raises(FrozenInstanceError):
        batches[0].taken = slice(0, 1)  # type: ignore[misc]
    assert numbers == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_loss_of_several_values_per_row_gives_their_mean():
    x, y = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
    assert torch.equal(Term(nn.MSELoss()).of_rows([x, y]), ((x - y) ** 2).reshape(4, -1).mean(1))
    weights = torch.tensor([1.0, 2.0, 3.0])
    scores, target = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    loss_fn = nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1)
    expected = F.cross_entropy(scores, target, weights, reduction="none", label_smoothing=0.1)
    assert torch.equal(Term(loss_fn).of_rows([scores, target]), expected)
    assert loss_fn.reduction == "mean"


def test_a_loss_that_does_not_say_what_each_row_gives_is_refused():
    with pytest.raises(ValueError, match="gives"):
        Term(nn.CrossEntropyLoss()).of_rows([torch.randn(10), torch.tensor(3)])
    with pytest.raises(ValueError, match="no reduction"):
        Term(nn.Identity()).of_rows([torch.randn(10)])


def test_a_layer_that_is_named_loss_wins_and_the_plan_says_so(digits, tmp_path):
    layers = [layer("flat", "Flatten"), layer("loss", "Linear", out_features=10)]
    named = spec(
        network={"layers": layers},
        loss={"type": "CrossEntropyLoss", "inputs": ["loss", "label"]},
        probes=[watching("loss", want=["full"])],
        stop={"steps": 1},
    )
    plan = planned(named)
    assert "see this layer" in warnings_of(plan)["/network/layers/1/name"]
    (kept,) = captured(run(tmp_path, named, digits), tmp_path).values()
    assert kept.shape == (64, 10)
    assert list(errors({**named, "probes": [watching("loss.samples")]})) == ["/probes/0/layers/0"]


# --- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("glob", "module", "scope", "may"),
    [
        ("*1.0", "lstm", "layer", True),
        ("lstm.1", "lstm", "layer", True),
        ("lstm.1", "lstm2", "layer", False),
        ("fc", "fc1", "layer", False),
        ("*", "block0.linear1", "inner", False),
        ("*.linear1", "block0.linear1", "inner", True),
        ("block0.linear1", "block0.linear2", "inner", False),
        ("block0.linear1:2", "block0.linear1", "inner", True),
    ],
)
def test_hooks_are_made_where_a_leaf_may_match(glob, module, scope, may):
    probe = Probe.model_validate_json(f'{{"layers": ["{glob}"], "kinds": ["output"], "every": 1}}')
    assert may_match(probe, module, scope) is may


def test_the_calls_of_shared_modules_are_distinguished_inside_too(digits, tmp_path):
    block = layer("block0", "TransformerEncoderLayer", nhead=2, dim_feedforward=8, dropout=0.0)
    block["args"]["batch_first"] = True
    layers = [
        layer("rows", "reshape", ["image"], shape=[-1, 8, 8]),
        block,
        {"name": "block1", "shared_with": "block0"},
        layer("pooled", "mean", dim=1),
        layer("fc", "Linear", out_features=10),
    ]
    probes = [everything(layers=["block?", "*.linear1", "*.norm2"], kinds=["input", "output"])]
    shared = spec(network={"layers": layers}, probes=probes, stop={"steps": 1})
    kept = captured(run(tmp_path, shared, digits), tmp_path)
    assert {name for _, name, _ in kept} == {
        *("block0", "block0.linear1", "block0.norm2"),
        *("block1", "block1.linear1", "block1.norm2"),
    }
    assert torch.equal(kept[0, "block0", "output"], kept[0, "block1", "input"])
    assert torch.equal(kept[0, "block0", "output"], kept[0, "block0.norm2", "output"])
    assert torch.equal(kept[0, "block1", "output"], kept[0, "block1.norm2", "output"])
    first, second = kept[0, "block0.linear1", "output"], kept[0, "block1.linear1", "output"]
    assert not np.array_equal(first, second)


# --- what the plan says is what a step shows -------------------------------------------------

ROWS = layer("rows", "reshape", ["image"], shape=[-1, 8, 8])
FLAT = layer("flat", "Flatten")
FC = layer("fc", "Linear", out_features=10)
ZOO = {
    "bidirectional GRU": [
        ROWS,
        layer("gru", "GRU", hidden_size=4, num_layers=2, bidirectional=True, batch_first=True),
        FLAT,
        FC,
    ],
    "attention": [
        ROWS,
        layer("att", "MultiheadAttention", ["rows"] * 3, num_heads=2, batch_first=True),
        layer("both", "cat", ["att.0", "att.1"], dim=2),
        FLAT,
        FC,
    ],
    "transformer": [
        ROWS,
        layer(
            *("tr", "Transformer", ["rows", "rows"]),
            **{"d_model": 8, "nhead": 2, "num_encoder_layers": 2, "num_decoder_layers": 1},
            **{"dim_feedforward": 8, "batch_first": True},
        ),
        FLAT,
        FC,
    ],
    "decoder": [
        ROWS,
        layer(
            *("dec", "TransformerDecoderLayer", ["rows", "rows"]),
            **{"nhead": 4, "dim_feedforward": 8, "batch_first": True, "norm_first": True},
        ),
        FLAT,
        FC,
    ],
    "views": [
        layer("conv1", "Conv2d", out_channels=4, kernel_size=3),
        layer("norm", "BatchNorm2d"),
        layer("act", "Hardswish", inplace=True),
        layer("cut", "chunk", chunks=2, dim=1),
        layer("back", "cat", ["cut.1", "cut.0"], dim=1),
        layer("turned", "permute", dims=[0, 2, 3, 1]),
        layer("act2", "LeakyReLU", inplace=True),
        layer("drop", "Dropout", p=0.5),
        FLAT,
        FC,
    ],
    "an opened LSTM": [
        ROWS,
        layer("x0", "select", ["rows"], dim=1, index=0),
        layer("x1", "select", ["rows"], dim=1, index=1),
        layer("step0", "LSTMCell", ["x0"], hidden_size=6),
        {"name": "step1", "shared_with": "step0", "inputs": ["x1", "step0.0", "step0.1"]},
        FC,
    ],
}


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad"])
@pytest.mark.long
def test_a_step_shows_exactly_what_the_plan_says(name, optimizer, digits, tmp_path):
    kinds = everything()["kinds"]
    probes = [everything(kinds=[kind], want=["stats"]) for kind in kinds]
    for probe, kind in zip(probes, kinds, strict=True):
        if kind != "output":
            probe["layers"] = ["*", "*.*"]
    whole = spec(
        network={"layers": ZOO[name]},
        optimizer={"type": optimizer},
        probes=probes,
        stop={"steps": 2},
    )
    said = [item["matched"] for item in planned(whole)["probes"]]
    records = of_type(run(tmp_path, whole, digits), "stats")
    assert len(records) == 2
    for record in records:
        for kind, names in zip(kinds, said, strict=True):
            assert sorted(row[0] for row in record["rows"] if row[1] == kind) == sorted(names)
            assert names


def state_of(optimizer, name, **changes):
    """A job that keeps what this optimizer holds of the last layer's weight, of shape (10, 54)."""
    probe = watching(f"fc.weight.{name}", kinds=["optim_state"], want=["full"], **changes)
    return spec(optimizer=optimizer, probes=[probe])


ADAFACTOR = {"type": "Adafactor", "args": {"lr": 0.01}}


def test_a_state_that_is_not_like_its_parameter_has_a_shape_of_its_own(digits, tmp_path):
    whole = planned(state_of(ADAFACTOR, "row_var"))["probes"][0]
    assert whole == {"matched": ["fc.weight.row_var"], "bytes_per_step": 40}
    part = state_of(ADAFACTOR, "row_var", slice="0:4") | {"stop": {"steps": 1}}
    assert planned(part)["probes"][0]["bytes_per_step"] == 16
    (kept,) = captured(run(tmp_path, part, digits), tmp_path).values()
    assert kept.shape == (4, 1)


@pytest.mark.parametrize(
    ("optimizer", "name", "changes", "pointer", "word"),
    [
        (ADAFACTOR, "row_var", {"slice": "12"}, "/probes/0/slice", "of shape [10, 1]"),
        (ADAFACTOR, "col_var", {"slice": "0,0,0"}, "/probes/0/slice", "of shape [1, 54]"),
        (ADAFACTOR, "row_var", {"max_bytes": 8}, "/probes/0/max_bytes", "that works is 40"),
        ({"type": "Adam", "args": {}}, "step", {"slice": "0:2"}, "/probes/0/slice", "of shape []"),
    ],
)
def test_what_does_not_fit_such_a_state_is_refused(optimizer, name, changes, pointer, word):
    found = errors(state_of(optimizer, name, **changes))
    assert list(found) == [pointer]
    assert word in found[pointer]


def test_a_glob_that_also_names_the_loss_means_layers_only_in_evaluations():
    job = spec(
        evaluate={"every_epochs": 1},
        loss={"type": "CrossEntropyLoss", "inputs": ["loss_fc", "label"]},
    )
    job["network"]["layers"][-1]["name"] = "loss_fc"
    job["data"]["validation"] = {"dataset": "ds_1", "split": "test"}
    job["probes"] = [watching("loss*", phase="evaluate"), watching("loss*")]
    evaluated, trained = (item["matched"] for item in planned(job)["probes"])
    assert evaluated == ["loss_fc"]
    assert trained == ["loss_fc", "loss", "loss.samples", "loss.rows"]
