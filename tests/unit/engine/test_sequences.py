"""Rows of different lengths: every number against each row alone, or against torch by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.flop_counter import FlopCounterMode

from engine.core.tensor_names import input_leaves
from engine.data.batches.rows import shuffled
from engine.data.columns.loaded import LoadedSequence
from engine.data.columns.ragged import RaggedColumn
from engine.data.columns.table import Table
from engine.data.sources.loading import load
from engine.network.layer_types import layers_with_lengths
from engine.network.lengths import Lengths
from engine.network.network import Network
from engine.plan.step_memory import LiveBytes
from engine.process.planner import answer
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    DenseSequenceField,
    Graph,
    IntegerField,
    IntegerSequenceField,
    Layer,
    Sequences,
    Source,
)
from tests.unit.engine.ragged import LSTM, TEXTS, job, layers, meta_of, texts, write_ragged
from tests.unit.engine.runs import captured, errors, losses, of_type, planned, run

CPU = torch.device("cpu")
IDS = IntegerSequenceField(type="integer_sequence", dim=10)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return texts(tmp_path)


def loaded(table: Path, limit: Sequences | None = None, **fields: Any):
    source = Source(dataset="d")
    return load(source, fields, Table(table), seed=0, device=CPU, limit=limit or Sequences())


# --- batches ---------------------------------------------------------------------------------


def test_a_batch_is_padded_to_its_longest_row(table):
    rows = loaded(table, ids=IDS)
    batch = rows.batch(slice(1, 4))
    assert batch["ids"].tolist() == [[6, 0, 0, 0], [5, 3, 5, 0], [8, 9, 7, 9]]
    assert batch["ids.lengths"].tolist() == [1, 3, 4]
    assert (batch["ids"].dtype, batch["ids.lengths"].dtype) == (torch.int64, torch.int64)
    batch = rows.batch(torch.tensor([3, 10]))
    assert batch["ids"].tolist() == [[8, 9, 7, 9], [3, 0, 0, 0]]


def test_the_padding_value_is_the_fields(table):
    field = IntegerSequenceField(type="integer_sequence", dim=10, padding_value=-100)
    assert loaded(table, ids=field).batch(slice(5, 7))["ids"][0].tolist() == [
        6,
        2,
        -100,
        -100,
        -100,
    ]


def test_vectors_are_padded_with_zeros_and_scaled(table):
    field = DenseSequenceField(type="dense_sequence", dim=2, scale=10.0)
    batch = loaded(table, steps=field).batch(slice(5, 7))
    assert batch["steps"].dtype == torch.float32
    torch.testing.assert_close(
        batch["steps"][0], torch.tensor([[6.0, 10], [2, 10], [0, 0], [0, 0], [0, 0]])
    )
    assert batch["steps.lengths"].tolist() == [2, 5]


def test_an_epoch_has_every_row_once_in_the_order_of_seed_and_epoch(table):
    rows = loaded(table, ids=IDS, label=IntegerField(type="integer", dim=2))
    order = shuffled(len(TEXTS), 3, 1)
    seen: list[list[int]] = []
    for batch in rows.epoch(5, drop_last=False, order=(3, 1)):
        for ids, length, label in zip(
            batch["ids"], batch["ids.lengths"], batch["label"], strict=True
        ):
            assert label == length % 2
            seen.append(ids[:length].tolist())
    assert seen == [TEXTS[i] for i in order]
    later = [b["ids.lengths"] for b in rows.epoch(5, drop_last=False, order=(3, 1), first=1)]
    assert torch.cat(later).tolist() == [len(TEXTS[i]) for i in order[5:]]


def test_a_fraction_takes_its_rows_and_only_their_steps(table):
    source = Source(dataset="d", fraction=(0.0, 0.5))
    rows = load(source, {"ids": IDS}, Table(table), seed=1, device=CPU)
    numbers = shuffled(len(TEXTS), 0, 0)  # any order: the rows are found by number
    assert sorted(numbers.tolist()) == list(range(12))
    batch = next(iter(rows.in_order(12)))
    taken = batch.row_numbers.tolist()
    assert len(taken) == 6
    assert batch["ids.lengths"].tolist() == [len(TEXTS[i]) for i in taken]
    field = rows.fields["ids"]
    assert len(field.values) == sum(len(TEXTS[i]) for i in taken)


def test_columns_of_tensors_are_sequences_of_one_length(tmp_path):
    table = write_ragged(tmp_path, [{"ids": [1, 2, 3]}, {"ids": [4, 5, 6]}])
    batch = loaded(table, ids=IDS).batch(slice(0, 2))
    assert batch["ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch["ids.lengths"].tolist() == [3, 3]


def test_a_batch_of_empty_rows_has_one_step_of_padding(tmp_path):
    table = write_ragged(tmp_path, [{"ids": []}, {"ids": []}, {"ids": [1]}])
    rows = loaded(table, ids=IDS)
    assert rows.batch(slice(0, 2))["ids"].tolist() == [[0], [0]]
    assert rows.batch(slice(0, 2))["ids.lengths"].tolist() == [0, 0]


@pytest.mark.parametrize("bad", [10, -1])
def test_an_integer_out_of_range_is_named_by_row_and_step(tmp_path, bad):
    rows = [{"ids": [1] * (n % 4)} for n in range(50)]
    rows[37] = {"ids": [1, 2, bad]}
    table = write_ragged(tmp_path, rows)
    with pytest.raises(DataFailed, match=rf"row 37 of split 'all' has {bad} as value 2 of column"):
        loaded(table, ids=IDS)


def test_offsets_that_do_not_fit_are_refused(table):
    (column,) = [c for c in meta_of(table)["columns"] if c["name"] == "ids"]
    path = (table / "all" / column["file"]).with_suffix(".offsets.npy")
    good = np.load(path)
    for bad in (good[:-1], good + 1, good[::-1].copy(), np.append(good[:-1], 10**9)):
        np.save(path, bad)
        with pytest.raises(DataFailed, match="its offsets do not fit its values"):
            loaded(table, ids=IDS)


def test_the_rows_of_steps_are_found_behind_empty_rows():
    column = RaggedColumn("x", "all", np.arange(3), np.array([0, 0, 2, 2, 2, 3]))
    assert column.rows_of(np.arange(3)).tolist() == [1, 4]


# --- rows that are too long ------------------------------------------------------------------


def test_long_rows_are_truncated_and_counted(table):
    rows = loaded(table, Sequences(max_length=3), ids=IDS)
    assert rows.num_rows == 12
    batch = rows.batch(slice(0, 5))
    assert batch["ids"].tolist() == [[3, 1, 4], [6, 0, 0], [5, 3, 5], [8, 9, 7], [3, 2, 3]]
    cut = sum(max(0, len(row) - 3) for row in TEXTS)
    assert rows.left_out == {
        "steps behind max_length 3 of field 'ids', in 6 rows of split 'all'": cut
    }


def test_long_rows_are_dropped_with_all_their_fields(table):
    rows = loaded(
        table,
        Sequences(max_length=2, overflow="drop"),
        ids=IDS,
        label=IntegerField(type="integer", dim=2),
    )
    batch = next(iter(rows.in_order(100)))
    assert batch["ids"].tolist() == [[6, 0], [6, 2], [2, 8], [3, 0], [9, 9]]
    assert batch["label"].tolist() == [1, 0, 0, 1, 0]
    assert batch.row_numbers.tolist() == [1, 5, 8, 10, 11]
    assert rows.left_out == {"rows longer than max_length 2 of split 'all'": 7}
    with pytest.raises(DataFailed, match="has no rows that are short enough"):
        loaded(
            texts(table.parent / "b", [[1, 2]]), Sequences(max_length=1, overflow="drop"), ids=IDS
        )


def test_a_long_row_is_an_error_that_names_it(table):
    with pytest.raises(DataFailed, match=r"row 9 of split 'all' has 8 steps in column 'ids'"):
        loaded(table, Sequences(max_length=7, overflow="error"), ids=IDS)
    assert loaded(table, Sequences(max_length=8, overflow="error"), ids=IDS).num_rows == 12


def test_what_is_omitted_is_an_event_of_the_job(table, tmp_path):
    limit = {"sequence": {"max_length": 4, "overflow": "drop"}}
    records = run(tmp_path / "run", job(data=limit), table)
    assert of_type(records, "dropped") == [
        {
            "type": "dropped",
            "at": of_type(records, "dropped")[0]["at"],
            "what": "rows longer than max_length 4 of split 'all'",
            "count": 5,
        }
    ]
    assert len(losses(records)) == 3 * 2  # seven rows in batches of five


# --- layers ----------------------------------------------------------------------------------


def _vectors(lengths: list[int], width: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, width) for n in lengths]


def _padded(rows: list[torch.Tensor], fill: float = float("nan")) -> torch.Tensor:
    """Padded with what would be seen everywhere if any of it were read."""
    return pad_sequence(rows, batch_first=True, padding_value=fill)


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize(
    "args",
    [
        {},
        {"bidirectional": True},
        {"num_layers": 2},
        {"num_layers": 2, "bidirectional": True, "bias": False},
        {"batch_first": False, "bidirectional": True},
    ],
)
@pytest.mark.parametrize("states", [False, True])
def test_a_recurrent_layer_gives_what_each_row_gives_alone(kind, args, states):
    rows = _vectors([4, 1, 6, 3])
    args = {"input_size": 3, "hidden_size": 5, "batch_first": True} | args
    layer = layers_with_lengths()[kind](**args)
    plain = getattr(nn, kind)(**args | {"batch_first": True})
    plain.load_state_dict(layer.state_dict())
    num_states = args.get("num_layers", 1) * (1 + args.get("bidirectional", False))
    parts = 2 if kind == "LSTM" else 1
    begin = [torch.randn(num_states, 4, 5) for _ in range(parts)] if states else None
    x = _padded(rows, 7.0).requires_grad_()
    lengths = torch.tensor([4, 1, 6, 3])
    hx = None if begin is None else (tuple(begin) if kind == "LSTM" else begin[0])
    given = x if args["batch_first"] else x.transpose(0, 1)
    output, state = layer(given, hx, lengths=Lengths(lengths))
    output = output if args["batch_first"] else output.transpose(0, 1)
    got = state if isinstance(state, tuple) else (state,)
    for number, row in enumerate(rows):
        one = (
            None if begin is None else [part[:, number : number + 1].contiguous() for part in begin]
        )
        hx = None if one is None else (tuple(one) if kind == "LSTM" else one[0])
        alone, last = plain(row[None], hx)
        torch.testing.assert_close(output[number, : len(row)], alone[0])
        assert (output[number, len(row) :] == 0).all()
        for mine, theirs in zip(got, last if isinstance(last, tuple) else (last,), strict=True):
            torch.testing.assert_close(mine[:, number], theirs[:, 0])
    output.square().sum().backward()
    for number, row in enumerate(rows):
        assert (x.grad[number, len(row) :] == 0).all()
        assert (x.grad[number, : len(row)] != 0).all()


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_a_row_without_a_step_keeps_its_state(kind):
    layer = layers_with_lengths()[kind](2, 3, batch_first=True)
    x = torch.randn(3, 4, 2)
    lengths = Lengths(torch.tensor([2, 0, 4]))
    output, state = layer(x, lengths=lengths)
    assert (output[1] == 0).all()
    for part in state if isinstance(state, tuple) else (state,):
        assert (part[:, 1] == 0).all()
        assert (part[:, 0] != 0).all()
    begin = torch.randn(1, 3, 3)
    hx = (begin, begin) if kind == "LSTM" else begin
    _, state = layer(x, hx, lengths=lengths)
    for part in state if isinstance(state, tuple) else (state,):
        assert torch.equal(part[:, 1], begin[:, 1])


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("num_steps", [1, 6, 37])
@pytest.mark.long
def test_without_data_a_recurrent_layer_has_torchs_sizes_and_products(kind, batch_first, num_steps):
    """Most steps are then run beside each other: a plan of thousands takes no longer."""
    args: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "batch_first": batch_first}
    shape = (3, num_steps, 5) if batch_first else (num_steps, 3, 5)
    found: list[Any] = []
    for maker in (layers_with_lengths()[kind], getattr(nn, kind)):
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            layer = maker(5, 4, **args)
            x, begin = torch.zeros(shape, requires_grad=True), torch.zeros(4, 3, 4)
            output, state = layer(x, (begin, begin) if kind == "LSTM" else begin)
            states = state if isinstance(state, tuple) else (state,)
        output.sum().backward()
        sizes = [[*item.shape] for item in (output, *states, x.grad)]
        found.append((sizes, counter.get_total_flops()))
    assert found[0] == found[1]


@pytest.mark.long
def test_few_steps_that_are_run_count_for_the_memory_of_all():
    """Against all of them run one after the other."""
    sizes: dict[int, int] = {}
    calls: dict[int, int] = {}
    for turns in (16, 10_000):
        with torch.device("meta"):
            layer = layers_with_lengths()["LSTM"](32, 64, batch_first=True)
            layer.meta_steps = turns
            with LiveBytes() as live, FlopCounterMode(display=False) as counter:
                output, _ = layer(torch.zeros(20, 203, 32, requires_grad=True))
                output.sum().backward()
        sizes[turns] = live.peak
        calls[turns] = counter.get_total_flops()
    assert sizes[16] == pytest.approx(sizes[10_000], rel=0.15)
    assert calls[16] == pytest.approx(calls[10_000], rel=0.03)


def test_lengths_are_no_input_tensor_that_a_probe_sees():
    x, lengths = torch.zeros(2, 3, 4), Lengths(torch.tensor([1, 3]), torch.tensor([1, 3]))
    assert [name for name, _ in input_leaves("gru", (x,), {"lengths": lengths})] == ["gru"]


def test_without_lengths_they_are_torchs_own_layers():
    for kind in ("RNN", "LSTM", "GRU"):
        layer, plain = layers_with_lengths()[kind](2, 3), getattr(nn, kind)(2, 3)
        plain.load_state_dict(layer.state_dict())
        x = torch.randn(5, 4, 2)
        assert torch.equal(layer(x)[0], plain(x)[0])


BY_HAND = {
    "sum": lambda row: row.sum(0),
    "average": lambda row: row.mean(0),
    "max": lambda row: row.max(0).values,
    "sqrt_n": lambda row: row.sum(0) / len(row) ** 0.5,
    "first": lambda row: row[0],
    "last": lambda row: row[-1],
}


@pytest.mark.parametrize("mode", BY_HAND)
@pytest.mark.parametrize("width", [None, 3])
def test_a_pool_gives_what_each_row_gives_alone(mode, width):
    rows = _vectors([4, 1, 6, 3])
    rows = rows if width else [row[:, 0] for row in rows]
    for row in rows:
        row.requires_grad_()
    pool = layers_with_lengths()["SequencePool"](mode)
    assert torch.equal(
        pool(torch.stack([rows[0], rows[0]]))[1], BY_HAND[mode](rows[0])
    ) or mode in ("average", "sqrt_n", "sum")
    padded = _padded([*rows, rows[0][:0]])
    pooled = pool(padded, lengths=Lengths(torch.tensor([4, 1, 6, 3, 0])))
    expected = torch.stack([BY_HAND[mode](row) for row in rows])
    torch.testing.assert_close(pooled[:4], expected)
    assert (pooled[4] == 0).all()
    weights = torch.randn_like(expected)
    mine = torch.autograd.grad((pooled[:4] * weights).sum(), rows, retain_graph=True)
    theirs = torch.autograd.grad((expected * weights).sum(), rows)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_a_bag_leaves_out_what_a_row_is_padded_with(mode, last):
    args = {"num_embeddings": 10, "embedding_dim": 3, "mode": mode, "include_last_offset": last}
    bag = layers_with_lengths()["EmbeddingBag"](**args)
    rows = [torch.tensor(row, dtype=torch.int64) for row in [[3, 0, 4], [6], [], [5, 5]]]
    lengths = Lengths(torch.tensor([len(row) for row in rows]))
    got = bag(pad_sequence(rows, batch_first=True), lengths=lengths)
    for number, row in enumerate(rows):
        values = bag.weight[row]
        if not len(row):
            expected = torch.zeros(3)
        else:
            expected = {"sum": values.sum(0), "mean": values.mean(0), "max": values.amax(0)}[mode]
        torch.testing.assert_close(got[number], expected)
    got.sum().backward()
    assert (bag.weight.grad[[1, 2, 7, 8, 9]] == 0).all()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_rows_of_one_length_are_summed_as_beside_a_longer_one(mode, last):
    """Nothing of such a batch is padding, and nothing is looked for in it."""
    args = {"num_embeddings": 10, "embedding_dim": 3, "mode": mode, "include_last_offset": last}
    bag = layers_with_lengths()["EmbeddingBag"](**args)
    ids, more = torch.tensor([[3, 0, 4], [6, 6, 1]]), torch.tensor([[5, 2, 7, 8]])
    weights = [torch.randn(3, 4)] if mode == "sum" else []
    lengths = Lengths(torch.tensor([3, 3]))
    short = bag(ids, *(x[:2, :3] for x in weights), lengths=lengths)
    lengths = Lengths(torch.tensor([3, 3, 4]))
    beside = bag(torch.cat([F.pad(ids, (0, 1)), more]), *weights, lengths=lengths)
    assert torch.equal(short, beside[:2])
    gradients = [torch.autograd.grad(x[:2].sum(), bag.weight)[0] for x in (short, beside)]
    torch.testing.assert_close(*gradients)


def test_a_bag_without_lengths_is_torchs_own():
    bag = layers_with_lengths()["EmbeddingBag"](10, 3, mode="sum")
    plain = nn.EmbeddingBag(10, 3, mode="sum")
    plain.load_state_dict(bag.state_dict())
    ids, weights = torch.tensor([[1, 2], [3, 3]]), torch.tensor([[0.5, 2.0], [1.0, -1.0]])
    assert torch.equal(bag(ids), plain(ids))
    assert torch.equal(bag(ids, weights), plain(ids, per_sample_weights=weights))
    flat, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    assert torch.equal(bag(flat, offsets), plain(flat, offsets))


def test_a_shared_layer_takes_the_lengths_of_each_call():
    graph = Graph(
        layers=(
            Layer(name="a", type="SequencePool", args={"mode": "sum"}, inputs=("x",), lengths="n"),
            Layer(name="b", shared_with="a", inputs=("x",), lengths="m"),
        )
    )
    network = Network(graph, ("a", "b"))
    x = torch.ones(2, 4)
    values = network({"x": x, "n": torch.tensor([1, 2]), "m": torch.tensor([3, 4])})
    assert values["a"].tolist() == [1, 2]
    assert values["b"].tolist() == [3, 4]
    assert network.layers["a"](x).tolist() == [4, 4]


def _loaded(is_integer: bool, **more: Any) -> LoadedSequence:
    """Rows of 2, 2, 3 and no steps."""
    values = torch.tensor([5, 1, 2, 7, 6, 3, 4], dtype=torch.uint8)
    starts, lengths = torch.tensor([0, 2, 4, 7]), torch.tensor([2, 2, 3, 0])
    shown = values if is_integer else values[:, None]
    return LoadedSequence(shown, starts, lengths, is_integer=is_integer, **more)


@pytest.mark.parametrize("more", [{}, {"divide_by": 3.0}, {"scale": -2.0}])
def test_a_batch_of_equal_rows_is_part_of_one_with_a_longer_row(more):
    for item in (_loaded(False, **more), _loaded(True, padding_value=9)):
        equal, lengths = item.batch(torch.tensor([1, 0]), CPU)
        beside, _ = item.batch(torch.tensor([1, 0, 2, 3]), CPU)
        assert lengths.tolist() == [2, 2]
        assert equal.dtype == (torch.int64 if item.is_integer else torch.float32)
        assert torch.equal(equal, beside[:2, :2])
        padding = 9 if item.is_integer else 0.0
        assert (beside[:2, 2] == padding).all()
        assert (beside[3] == padding).all()
        equal.zero_()  # its own memory, whatever is done to it
        assert item.values.flatten().tolist() == [5, 1, 2, 7, 6, 3, 4]


# --- the planner -----------------------------------------------------------------------------


def test_layers_take_the_lengths_of_the_field_whose_steps_they_see(table):
    plan = planned(job(), meta_of(table))
    assert [layer["lengths"] for layer in plan["spec"]["network"]["layers"]] == [
        None, "ids.lengths", "ids.lengths", None,
    ]  # fmt: skip
    shapes = {row["name"]: row["output_shape"] for row in plan["layers"]}
    assert shapes["emb"] == [8, 4]  # the longest row has eight steps
    assert shapes["pool"] == [5]
    again = planned(plan["spec"], meta_of(table))
    assert again["spec"] == plan["spec"]


def test_the_longest_row_is_that_of_the_split_and_of_the_limit(table):
    spec = job(data={"sequence": {"max_length": 6}})
    shapes = {row["name"]: row["output_shape"] for row in planned(spec, meta_of(table))["layers"]}
    assert shapes["emb"] == [6, 4]
    spec = job(data={"sequence": {"max_length": 6, "overflow": "error"}})
    assert "has 8 steps" in errors(spec, meta_of(table))["/data/sequence/max_length"]
    assert "needs max_length" in " ".join(
        errors(job(data={"sequence": {"overflow": "drop"}}), meta_of(table)).values()
    )
    spec = job(data={"sequence": {"max_length": 6, "overflow": "drop"}})
    warned = planned(spec, meta_of(table))["warnings"]
    assert "/data/sequence/overflow" in [item["pointer"] for item in warned]


def test_memory_counts_the_steps_that_are_there(table):
    plan = planned(job(), meta_of(table))
    steps = sum(map(len, TEXTS))
    assert plan["memory"]["data_bytes"] == steps * 4 + 12 * 16 + 12 * 8


SUM = {"name": "fc", "type": "SequencePool", "args": {"mode": "sum"}}
CONV = {"out_channels": 4, "kernel_size": 3}
FLAT = [
    {"name": "flat", "type": "Flatten"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 2}},
]


@pytest.mark.parametrize(
    ("network", "pointer", "says"),
    [
        (layers(*FLAT), "/network/layers/2", "fits one length only; pool over the steps"),
        (
            layers(
                {"name": "lstm", "type": "LSTM", "args": {"hidden_size": 5}},
                {"name": "pool", "type": "SequencePool", "args": {"mode": "last"}},
                FLAT[1],
            ),
            "/network/layers/1/args/batch_first",
            "set batch_first to true",
        ),
        (
            layers(
                {"name": "turned", "type": "transpose", "args": {"dim0": 1, "dim1": 2}},
                {"name": "conv", "type": "Conv1d", "args": CONV},
                {"name": "back", "type": "transpose", "args": {"dim0": 1, "dim1": 2}},
                {"name": "pool", "type": "SequencePool", "args": {"mode": "max"}},
                FLAT[1],
            ),
            "/network/layers/4/lengths",
            "whose steps are not those of one sequence field; name the layer's lengths",
        ),
        (
            layers({**SUM, "lengths": "fo"}),
            "/network/layers/1/lengths",
            "neither a layer nor a data field",
        ),
        (
            layers({**SUM, "lengths": "emb"}),
            "/network/layers/1/lengths",
            "it has the shape [5, 8, 4] and float32, and lengths are one int64 per row",
        ),
        (
            layers({"name": "fc", "type": "ReLU", "lengths": "ids.lengths"}),
            "/network/layers/1/lengths",
            "ReLU takes no lengths; these do: DotProductAttention, EmbeddingBag, GRU, LSTM,",
        ),
        (
            [{"name": "fc", "type": "Embedding", "args": {"embedding_dim": 2},
              "inputs": ["label.lengths"]}],
            "/network/layers/0/inputs/0",
            "there is no 'label.lengths'",
        ),
        (
            layers({"name": "pool", "type": "SequencePool", "args": {"mode": "middle"}}, FLAT[1]),
            "/network/layers/1/args/mode",
            "",
        ),
    ],
)  # fmt: skip
def test_what_cannot_know_its_lengths_is_refused(table, network, pointer, says):
    assert says in errors(job(network), meta_of(table))[pointer]


def test_convolutions_that_keep_the_steps_keep_the_lengths(table):
    network = layers(
        {"name": "turned", "type": "transpose", "args": {"dim0": 1, "dim1": 2}},
        {"name": "conv", "type": "Conv1d", "args": {**CONV, "padding": 1}},
        {"name": "back", "type": "transpose", "args": {"dim0": 1, "dim1": 2}},
        {"name": "pool", "type": "SequencePool", "args": {"mode": "max"}},
        FLAT[1],
    )
    plan = planned(job(network), meta_of(table))
    assert plan["spec"]["network"]["layers"][4]["lengths"] == "ids.lengths"


def test_steps_may_come_first_for_a_recurrent_layer_that_wants_them_there(table):
    network = layers(
        {"name": "turned", "type": "transpose", "args": {"dim0": 0, "dim1": 1}},
        {"name": "gru", "type": "GRU", "args": {"hidden_size": 3}},
        {"name": "state", "type": "select", "args": {"dim": 0, "index": 0}, "inputs": ["gru.1"]},
        FLAT[1],
    )
    plan = planned(job(network), meta_of(table))
    assert plan["spec"]["network"]["layers"][2]["lengths"] == "ids.lengths"


def test_of_two_sequences_each_layer_has_its_own(table, tmp_path):
    rows = [{"a": [1, 2, 3], "b": [1], "label": 0}, {"a": [1], "b": [2, 2, 2], "label": 1}]
    two = write_ragged(tmp_path / "two", rows)
    bag = {"embedding_dim": 3, "mode": "sum"}
    network = [
        {"name": "one", "type": "EmbeddingBag", "args": bag, "inputs": ["a"]},
        {"name": "two", "type": "EmbeddingBag", "args": bag, "inputs": ["b"]},
        {"name": "both", "type": "cat", "args": {"dim": 1}, "inputs": ["one", "two"]},
        FLAT[1],
    ]
    fields = {name: {"type": "integer_sequence", "dim": 5} for name in ("a", "b")}
    fields["label"] = {"type": "integer", "dim": 2}
    plan = planned(job(network, data={"fields": fields}), meta_of(two))
    found = [layer["lengths"] for layer in plan["spec"]["network"]["layers"]]
    assert found == ["a.lengths", "b.lengths", None, None]


@pytest.mark.parametrize(
    ("field", "pointer", "says"),
    [
        ({"type": "integer", "dim": 10}, "", "have 1 to 8 steps; use the type integer_sequence"),
        ({"type": "dense"}, "", "have 1 to 8 steps; use the type integer_sequence"),
        ({"type": "dense_sequence", "dim": 2}, "/dim", "needs lists of vectors of 2 values"),
        ({"type": "integer_sequence", "dim": 10, "column": "label"}, "/column", "needs a list"),
        ({"type": "integer_sequence", "dim": 9, "column": "steps"}, "/column", "lists of integers"),
    ],
)
def test_a_field_that_does_not_fit_its_column_is_refused(table, field, pointer, says):
    fields = {"ids": field, "label": {"type": "integer", "dim": 2}}
    found = errors(job(data={"fields": fields}), meta_of(table))
    assert says in found[f"/data/fields/ids{pointer}"]


def test_an_embedding_must_have_all_the_ids(table):
    network = [dict(layer) for layer in LSTM]
    network[0] = {**network[0], "args": {"embedding_dim": 4, "num_embeddings": 9}}
    found = errors(job(network), meta_of(table))
    assert "/network/layers/0/args/num_embeddings" in found
    assert planned(job(), meta_of(table))["spec"]["network"]["layers"][0]["args"] == {
        "num_embeddings": 10,
        "embedding_dim": 4,
    }


def test_the_catalog_has_the_pool():
    reply = answer({"id": 1, "do": "catalog", "section": "layers"})
    (pool,) = [item for item in reply["entries"] if item["name"] == "SequencePool"]
    assert pool["schema"]["properties"]["mode"]["enum"] == [
        "sum", "average", "max", "sqrt_n", "first", "last",
    ]  # fmt: skip
    assert pool["inputs"] == {"min": 1, "max": 1}
    assert pool["summary"].startswith("Reduces steps to one value per row")


# --- training --------------------------------------------------------------------------------


def by_hand(num_epochs: int = 3) -> list[float]:
    """The LSTM of the job, each row alone."""
    torch.manual_seed(3)
    emb, lstm = nn.Embedding(10, 4), nn.LSTM(4, 5, batch_first=True)
    fc = nn.Linear(5, 2)
    parameters = [*emb.parameters(), *lstm.parameters(), *fc.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found: list[float] = []
    for epoch in range(num_epochs):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(3 * 1_000_003 + epoch))
        for start in range(0, 12, 5):
            rows = [TEXTS[i] for i in order[start : start + 5]]
            pooled = [lstm(emb(torch.tensor(row))[None])[0][0].mean(0) for row in rows]
            labels = torch.tensor([len(row) % 2 for row in rows])
            loss = nn.functional.cross_entropy(fc(torch.stack(pooled)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


def test_training_on_sequences_equals_each_row_run_alone(table, tmp_path):
    assert losses(run(tmp_path / "run", job(), table)) == pytest.approx(by_hand(), rel=1e-5)


def test_training_continues_in_the_middle_of_an_epoch(table, tmp_path):
    spec = job(checkpoint={"every_steps": 1, "keep_last": 20})
    whole = run(tmp_path / "whole", spec, table)
    saved = tmp_path / "whole" / of_type(whole, "checkpoint")[3]["dir"]
    resume = {"dir": str(saved), "step": 4}
    rest = run(tmp_path / "rest", spec, table, resume=resume)
    assert losses(rest) == losses(whole)[4:]


def test_lengths_may_be_read_like_any_input(table, tmp_path):
    network = layers(
        {"name": "pool", "type": "SequencePool", "args": {"mode": "sum"}},
        {"name": "count", "type": "unsqueeze", "args": {"dim": 1}, "inputs": ["ids.lengths"]},
        {"name": "mean", "type": "div", "inputs": ["pool", "count"]},
        {"name": "fc", "type": "Linear", "args": {"out_features": 2}},
    )
    pooled = layers(
        {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
        {"name": "fc", "type": "Linear", "args": {"out_features": 2}},
    )
    one = losses(run(tmp_path / "one", job(network), table))
    two = losses(run(tmp_path / "two", job(pooled), table))
    assert one == pytest.approx(two, rel=1e-6)


def test_a_probe_sees_the_padded_tensor_with_zeros_behind_each_row(table, tmp_path):
    probe = {"layers": ["lstm*", "pool"], "kinds": ["output", "input"], "every": 1}
    probe["want"] = ["full"]
    records = run(tmp_path / "run", job(probes=[probe], stop={"steps": 1}), table)
    found = captured(records, tmp_path / "run")
    order = shuffled(12, 3, 0)[:5]
    lengths = [len(TEXTS[i]) for i in order]
    steps = found[0, "lstm.0", "output"]
    assert steps.shape == (5, max(lengths), 5)
    for row, length in zip(steps, lengths, strict=True):
        assert (row[length:] == 0).all()
        assert (row[:length] != 0).all()
    pooled = torch.stack([row[:n].mean(0) for row, n in zip(steps, lengths, strict=True)])
    torch.testing.assert_close(found[0, "pool", "output"], pooled)
    assert torch.equal(found[0, "pool", "input"], steps)
    last = torch.stack([row[n - 1] for row, n in zip(steps, lengths, strict=True)])
    torch.testing.assert_close(found[0, "lstm.1.0", "output"][0], last)
