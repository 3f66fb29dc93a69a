import json

import pytest
import torch
from torch import nn

from engine.core.problems import Findings, SpecProblems
from engine.network.functions import FUNCTIONS
from engine.network.layer_types import layer_classes
from engine.network.network import Network
from engine.network.sequence_lengths import assign_lengths
from engine.network.shapes import FieldShape, trace
from glasshouse.spec import Graph

FIELDS = {
    "x": FieldShape((6, 8), torch.float32),
    "image": FieldShape((3, 8, 8), torch.float32),
    "n": FieldShape((), torch.int64, 5),
}


def traced(*layers, outputs=None):
    text = json.dumps({"layers": layers, "outputs": outputs})
    return trace(Graph.model_validate_json(text), FIELDS, 4, Findings())


def layer(name, type_, *inputs, **args):
    return {"name": name, "type": type_, "inputs": list(inputs) or None, "args": args}


def values(*layers, outputs=None, **batch):
    found = traced(*layers, outputs=outputs)
    torch.manual_seed(0)
    network = Network(found.graph(), found.outputs)
    return network, network(batch)


def test_sizes_that_follow_from_the_input_may_be_omitted():
    cases = [
        (layer("a", "Linear", "x", out_features=3), {"in_features": 8}),
        (layer("a", "Conv1d", "x", out_channels=3, kernel_size=2), {"in_channels": 6}),
        (layer("a", "BatchNorm2d", "image"), {"num_features": 3}),
        (layer("a", "GroupNorm", "image", num_groups=3), {"num_channels": 3}),
        (layer("a", "LayerNorm", "x"), {"normalized_shape": [8]}),
        (layer("a", "RMSNorm", "x"), {"normalized_shape": [8]}),
        (layer("a", "GRU", "x", hidden_size=2), {"input_size": 8}),
        (layer("a", "MultiheadAttention", "x", "x", "x", num_heads=2), {"embed_dim": 8}),
        (layer("a", "TransformerEncoderLayer", "x", nhead=2), {"d_model": 8}),
        (layer("a", "Embedding", "n", embedding_dim=2), {"num_embeddings": 5}),
        (layer("a", "Bilinear", "x", "x", out_features=2), {"in1_features": 8, "in2_features": 8}),
    ]
    for one, sizes in cases:
        args = traced(one).layers[0].layer.args
        assert {name: args[name] for name in sizes} == sizes


@pytest.mark.parametrize("name", ["forward", "train", "keys", "_modules", "training", "children"])
def test_a_layer_may_have_the_name_of_something_else(name):
    found = traced(
        layer(name, "Linear", "x", out_features=2), layer("fc", "Linear", out_features=2)
    )
    network = Network(found.graph(), ("fc",))
    assert f"{name}.weight" in network.state_dict()
    network.load_state_dict(network.state_dict())
    assert network({"x": torch.ones(1, 6, 8)})["fc"].shape == (1, 6, 2)
    network.eval()
    assert not network.layers["fc"].training


def test_leaves_of_a_tuple_can_be_read_and_the_bare_name_is_the_first():
    x = torch.randn(4, 6, 8)
    network, found = values(
        layer("rnn", "LSTM", "x", hidden_size=3, batch_first=True),
        layer("again", "LSTM", "x", "rnn.1.0", "rnn.1.1", hidden_size=3, batch_first=True),
        outputs=["rnn", "rnn.1.0", "again"],
        x=x,
    )
    output, (hidden, cell) = network.layers["rnn"](x)
    assert torch.equal(found["rnn"], output)
    assert torch.equal(found["rnn.1.0"], hidden)
    assert torch.equal(found["again"], network.layers["again"](x, (hidden, cell))[0])


def test_a_recurrent_layer_can_be_unrolled_into_cells_whose_steps_are_layers():
    x = torch.randn(4, 6, 8)
    steps: list[dict] = []
    for number in range(6):
        steps.append(layer(f"x{number}", "select", "x", dim=1, index=number))
        if number == 0:
            steps.append(layer("cell0", "LSTMCell", "x0", hidden_size=3))
            continue
        before = f"cell{number - 1}"
        again = {"name": f"cell{number}", "shared_with": "cell0"}
        steps.append({**again, "inputs": [f"x{number}", f"{before}.0", f"{before}.1"]})
    names = [f"cell{number}.0" for number in range(6)]
    network, found = values(*steps, layer("all", "stack", *names, dim=1), x=x, outputs=["all"])
    fused = nn.LSTM(8, 3, batch_first=True)
    cell = network.layers["cell0"]
    fused.load_state_dict({f"{name}_l0": item for name, item in cell.state_dict().items()})
    assert torch.allclose(found["all"], fused(x)[0], atol=1e-6)
    assert len(network.state_dict()) == 4


def test_inputs_go_to_a_layer_in_their_order():
    x = torch.randn(4, 6, 8)
    network, found = values(
        layer("q", "Linear", "x", out_features=8),
        layer("mha", "MultiheadAttention", "q", "x", "x", num_heads=2),
        outputs=["mha", "q"],
        x=x,
    )
    assert torch.equal(found["mha"], network.layers["mha"](found["q"], x, x)[0])


def test_what_no_later_layer_reads_is_let_go():
    _, found = values(
        layer("a", "ReLU", "x"), layer("b", "ReLU"), layer("c", "chunk", chunks=2, dim=1),
        layer("d", "ReLU", "c.1"), layer("e", "ReLU", "b"), outputs=["e"], x=torch.ones(4, 6, 8),
    )  # fmt: skip
    assert set(found) == {"x", "e"}


FUNCTION_CASES = {
    "matmul": (["x", "xt"], {}, lambda x, t: x @ t),
    "bmm": (["x", "xt"], {}, torch.bmm),
    "mul": (["x", "x"], {}, torch.mul),
    "add": (["x"], {"other": 2.0}, lambda x: x + 2),
    "sub": (["x", "x"], {"alpha": 3.0}, lambda a, b: torch.sub(a, b, alpha=3)),
    "div": (["x"], {"other": 4.0}, lambda x: x / 4),
    "pow": (["x"], {"exponent": 2.0}, lambda x: x**2),
    "neg": (["x"], {}, torch.neg),
    "exp": (["x"], {}, torch.exp),
    "log": (["x"], {}, torch.log),
    "sqrt": (["x"], {}, torch.sqrt),
    "abs": (["x"], {}, torch.abs),
    "clamp": (["x"], {"min": 0.2, "max": "Infinity"}, lambda x: x.clamp(min=0.2)),
    "cat": (["x", "x"], {"dim": 1}, lambda a, b: torch.cat([a, b], 1)),
    "stack": (["x", "x"], {"dim": 1}, lambda a, b: torch.stack([a, b], 1)),
    "gather": (["x", "best"], {"dim": 2}, lambda x, i: x.gather(2, i)),
    "index_select": (["x", "n"], {"dim": 1}, lambda x, n: x.index_select(1, n)),
    "masked_fill": (
        ["x", "x"], {"value": "-Infinity"}, lambda x, m: x.masked_fill(m.bool(), -torch.inf)),
    "where": (["x", "x", "x"], {}, lambda c, a, b: torch.where(c.bool(), a, b)),
    "einsum": (["x", "xt"], {"equation": "btd,bds->bts"}, lambda a, b: a @ b),
    "reshape": (["x"], {"shape": [-1, 48]}, lambda x: x.reshape(-1, 48)),
    "flatten": (["x"], {"start_dim": 1}, lambda x: x.flatten(1)),
    "unflatten": (["x"], {"dim": 2, "sizes": [2, 4]}, lambda x: x.unflatten(2, (2, 4))),
    "permute": (["x"], {"dims": [0, 2, 1]}, lambda x: x.permute(0, 2, 1)),
    "transpose": (["x"], {"dim0": 1, "dim1": 2}, lambda x: x.transpose(1, 2)),
    "unsqueeze": (["x"], {"dim": 1}, lambda x: x.unsqueeze(1)),
    "squeeze": (["x"], {"dim": 1}, lambda x: x.squeeze(1)),
    "softmax": (["x"], {"dim": 2}, lambda x: x.softmax(2)),
    "log_softmax": (["x"], {"dim": 2}, lambda x: x.log_softmax(2)),
    "sigmoid": (["x"], {}, torch.sigmoid),
    "tanh": (["x"], {}, torch.tanh),
    "relu": (["x"], {}, torch.relu),
    "gelu": (["x"], {"approximate": "tanh"}, lambda x: nn.functional.gelu(x, approximate="tanh")),
    "mean": (["x"], {"dim": [1, 2]}, lambda x: x.mean((1, 2))),
    "sum": (["x"], {"dim": 1, "keepdim": True}, lambda x: x.sum(1, keepdim=True)),
    "amax": (["x"], {"dim": 1}, lambda x: x.amax(1)),
    "amin": (["x"], {"dim": [1, 2]}, lambda x: x.amin((1, 2))),
    "argmax": (["x"], {"dim": 2}, lambda x: x.argmax(2)),
    "narrow": (["x"], {"dim": 1, "start": 1, "length": 2}, lambda x: x.narrow(1, 1, 2)),
    "select": (["x"], {"dim": 1, "index": -1}, lambda x: x.select(1, -1)),
    "chunk": (["x"], {"chunks": 2, "dim": 1}, lambda x: x.chunk(2, 1)[0]),
    "split": (["x"], {"split_size_or_sections": [2, 4], "dim": 1}, lambda x: x.split([2, 4], 1)[0]),
    "square": (["x"], {}, lambda x: x * x),
    "reciprocal": (["x"], {}, torch.reciprocal),
    "maximum": (["x", "x"], {}, torch.maximum),
    "minimum": (["x", "x"], {}, torch.minimum),
    "norm": (["x"], {"p": 1, "dim": 2}, lambda x: torch.linalg.vector_norm(x, ord=1, dim=2)),
    "cumsum": (["x"], {"dim": 1}, lambda x: x.cumsum(1)),
    "flip": (["x"], {"dims": [1, 2]}, lambda x: x.flip(1, 2)),
    "one_hot": (["n"], {"num_classes": 5}, lambda n: torch.eye(5)[n]),
    "cosine_similarity": (
        ["x", "x"], {"dim": 2}, lambda a, b: nn.functional.cosine_similarity(a, b, dim=2)),
    "scaled_dot_product_attention": (
        ["x", "x", "x"], {"is_causal": True},
        lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)),
    "linear": (["x", "x8"], {}, lambda x, w: x @ w.T),
    "embedding": (["n", "x8"], {}, lambda n, w: w[n]),
    "layer_norm": (
        ["x"], {"normalized_shape": [8], "eps": 0.1},
        lambda x: nn.functional.layer_norm(x, (8,), eps=0.1)),
    "expand": (["n", "xt"], {"sizes": [0, -1]}, lambda n, x: n.expand(4, 4)),
    "eq": (["n"], {"other": 3.0}, lambda n: n == 3),
    "ne": (["n", "n"], {}, torch.ne),
    "lt": (["x"], {"other": 0.5}, lambda x: x < 0.5),
    "le": (["x", "x"], {}, torch.le),
    "gt": (["x"], {"other": 0.5}, lambda x: x > 0.5),
    "ge": (["x", "x"], {}, torch.ge),
    "logical_and": (["x", "x"], {}, torch.logical_and),
    "logical_or": (["x", "x"], {}, torch.logical_or),
    "logical_not": (["x"], {}, torch.logical_not),
    "tril": (["x"], {"diagonal": 1}, lambda x: x.tril(1)),
    "triu": (["x"], {"diagonal": -1}, lambda x: x.triu(-1)),
    "positions": (["x"], {"dim": 1}, lambda _: torch.arange(6)),
    "causal_mask": (["x"], {"dim": 1}, lambda _: torch.ones(6, 6).tril().bool()),
}  # fmt: skip


def test_every_listed_function_has_a_case():
    assert FUNCTION_CASES.keys() == FUNCTIONS.keys()


@pytest.mark.parametrize("name", FUNCTION_CASES)
def test_a_listed_function_does_what_torch_does(name):
    inputs, args, expected = FUNCTION_CASES[name]
    x, n = torch.rand(4, 6, 8), torch.tensor([0, 3, 1, 2])
    given = {"x": x, "xt": x.transpose(1, 2), "n": n, "best": x.argmax(2, keepdim=True)}
    given["x8"] = x[0]
    _, found = values(
        layer("xt", "transpose", "x", dim0=1, dim1=2),
        layer("best", "argmax", "x", dim=2, keepdim=True),
        layer("x8", "select", "x", dim=0, index=0),
        layer("it", name, *inputs, **args),
        outputs=["it", "xt", "best", "x8"],
        x=x,
        n=n,
    )
    assert torch.equal(found["it"], expected(*[given[item] for item in inputs]))


def test_a_mask_says_what_may_be_attended_to():
    x = torch.rand(4, 6, 8)
    masked, causal = (
        values(
            layer("mask", "causal_mask", "x", dim=1),
            layer("it", "scaled_dot_product_attention", "x", "x", "x", *more, **args),
            x=x,
        )[1]["it"]
        for more, args in ((["mask"], {}), ([], {"is_causal": True}))
    )
    assert torch.allclose(masked, causal, atol=1e-6)


def test_paddlepaddles_gather_is_index_select_with_its_index_made_flat():
    x, index = torch.rand(4, 6, 8), torch.tensor([[2], [0], [2], [1]])
    _, found = values(
        layer("flat", "flatten", "n"), layer("it", "index_select", "x", "flat", dim=1), x=x, n=index
    )
    assert torch.equal(found["it"], torch.stack([x[:, int(place)] for place in index], dim=1))


@pytest.mark.parametrize(
    ("one", "pointer"),
    [
        (layer("a", "mul", "x"), "/network/layers/0"),
        (layer("a", "matmul", "x"), "/network/layers/0/inputs"),
        (layer("a", "relu", "x", "x"), "/network/layers/0/inputs"),
        (layer("a", "matmul", "x", "x"), "/network/layers/0"),
        (layer("a", "softmax", "x"), "/network/layers/0/args/dim"),
        (layer("a", "gelu", "x", approximate="x"), "/network/layers/0/args/approximate"),
    ],
)
@pytest.mark.long
def test_a_misused_function_is_refused_in_its_place(one, pointer):
    with pytest.raises(SpecProblems) as caught:
        traced(one)
    assert caught.value.problems[0].pointer == pointer


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_layer_without_required_arguments_runs_on_some_field():
    tried = 0
    for name, cls in layer_classes().items():
        for source in ("x", "image"):
            try:
                found = traced(layer("a", name, source))
            except SpecProblems:
                continue
            module = Network(found.graph(), ("a",))
            made = {k: v.tensors(k, 4)[k] for k, v in FIELDS.items()}
            batch = {k: torch.ones(v.shape, dtype=v.dtype) for k, v in made.items()}
            assert module(batch)["a"].shape == found.values["a"].shape, cls
            tried += 1
    assert tried > 60


def test_a_parameter_is_a_tensor_of_its_own_whatever_it_reads():
    network, found = values(
        layer("own", "Parameter", "x", shape=[1, 8]),
        layer("it", "add", "x", "own"),
        x=torch.ones(4, 6, 8),
    )
    assert network.state_dict()["own.weight"].tolist() == [[0.0] * 8]
    assert torch.equal(found["it"], torch.ones(4, 6, 8))
    found["it"].sum().backward()
    assert network.layers["own"].weight.grad.tolist() == [[24.0] * 8]


def test_a_parameter_of_integers_or_booleans_is_not_trained():
    network, _ = values(
        layer("own", "Parameter", "x", shape=[4], kind="int64"),
        layer("mask", "Parameter", "x", shape=[6, 8], kind="bool"),
        layer("it", "masked_fill", "x", "mask", value=0.0),
        x=torch.ones(4, 6, 8),
        outputs=["it", "own"],
    )
    assert not list(network.parameters())
    assert network.state_dict()["own.weight"].dtype is torch.int64


@pytest.mark.parametrize(
    ("args", "pointer"),
    [
        ({}, "/network/layers/0/args/shape"),
        ({"shape": [-1]}, "/network/layers/0"),
        ({"shape": [2], "kind": "float64"}, "/network/layers/0/args/kind"),
    ],
)
def test_an_invalid_parameter_is_refused(args, pointer):
    with pytest.raises(SpecProblems) as caught:
        traced(layer("own", "Parameter", "x", **args))
    assert caught.value.problems[0].pointer.startswith(pointer)


def test_a_layer_can_be_set_to_count_what_rows_are_padded_with():
    text = torch.tensor([[1, 2, 3], [4, 0, 0]])
    lengths = torch.tensor([3, 1])
    layers = [
        layer("embedding", "Embedding", "text", num_embeddings=5, embedding_dim=2),
        layer("gru", "GRU", hidden_size=3, batch_first=True),
    ]
    ends = {}
    for asked in (None, False):
        torch.manual_seed(0)
        spec = {"layers": [layers[0], layers[1] | ({} if asked is None else {"lengths": asked})]}
        graph = Graph.model_validate_json(json.dumps(spec))
        fields = {"text": FieldShape((3,), torch.int64, 5, is_sequence=True)}
        findings = Findings()
        found = assign_lengths(trace(graph, fields, 2, findings), fields, 2, findings)
        network = Network(found.graph(), ("gru.1",))
        ends[asked] = network({"text": text, "text.lengths": lengths})["gru.1"]
        torch_gru = network.layers["gru"]
    assert not torch.equal(ends[None], ends[False])
    whole = torch_gru(network.layers["embedding"](text))[1]
    assert torch.equal(ends[False], whole)
