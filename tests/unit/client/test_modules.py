"""Modules of a user's own: traced, equal to what the engine builds, or refused with the line."""

import inspect
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh
from engine.network.network import Network
from engine.network.shapes import layer_parameters
from glasshouse import jsonio
from glasshouse.client.modules.layers import arguments_of
from glasshouse.client.modules.plain_torch import Rebuilt
from glasshouse.client.modules.reshapes import reshaping
from glasshouse.client.modules.sample_batches import match, trace_for
from glasshouse.client.modules.tracing import Traced
from glasshouse.client.modules.weight_names import names_in_module
from glasshouse.spec import Graph
from tests.unit.client.own_modules import CASES, Case, dense


def traced(module: nn.Module, fields: dict[str, Any], **named: str) -> Traced:
    return trace_for(module, fields, None, named)[0]


def batch_of(fields: dict[str, Any], num_rows: int = 4) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for name, field in fields.items():
        if field["type"] == "dense":
            made[name] = torch.randn(num_rows, *field["shape"])
            continue
        lengths = torch.tensor([6, 2, 5, 3])[:num_rows]
        made[name] = torch.randint(1, field["dim"], (num_rows, 6))
        made[name][torch.arange(6) >= lengths[:, None]] = 0
        made[f"{name}.lengths"] = lengths
    return made


def engines_network(found: Traced) -> tuple[Network, str]:
    """What the service builds of it, with the weights."""
    graph = Graph.model_validate_json(jsonio.dumps(found.graph))
    assert graph.outputs is not None
    network = Network(graph, graph.outputs)
    network.load_state_dict(found.weights)
    return network, graph.outputs[0]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.long
def test_the_engine_gives_what_the_module_gives_bit_for_bit(case: Case):
    torch.manual_seed(3)
    module = case.module()
    network, output = engines_network(traced(module, case.fields))
    batch = batch_of(case.fields)
    given = {name: batch[field] for name, field in match(module, case.fields).items()}
    for mode in (False, True):
        module.train(mode)
        network.train(mode)
        torch.manual_seed(5)
        expected = module(**given)
        torch.manual_seed(5)
        assert torch.equal(network(batch)[output], expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_weight_that_is_used_has_the_modules_name(case: Case):
    module = case.module()
    found = traced(module, case.fields)
    names = names_in_module(found.graph, found.weights)
    own = module.state_dict()
    told = {name for many in names.values() for name in many}
    assert own.keys() - told <= {"mask"}, "a buffer of which a part is read is a constant"
    for weight, many in names.items():
        assert all(torch.equal(own[name], found.weights[weight]) for name in many)


def test_a_module_is_afterwards_what_it_was():
    module = CASES["resnet"].module().train()
    module.get_submodule("bn1").eval()
    before = {name: item.clone() for name, item in module.state_dict().items()}
    drawn = torch.random.get_rng_state()
    traced(module, CASES["resnet"].fields)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(item, before[name]) for name, item in module.state_dict().items())
    assert module.training
    assert not module.get_submodule("bn1").training
    assert all(item.grad is None for item in module.parameters())


def test_layers_are_named_after_the_modules_and_say_where_they_stood():
    found = traced(CASES["mlp"].module(), CASES["mlp"].fields)
    assert [(layer["name"], layer["path"]) for layer in found.graph["layers"]] == [
        ("body_0_0", "body.0.0"),
        ("body_0_1", "body.0.1"),
        ("body_1", "body.1"),
        ("body_2", "body.2"),
        ("body_3", "body.3"),
        ("heads_a", "heads.a"),
    ]
    assert found.graph["layers"][0]["args"] == {"in_features": 6, "out_features": 8}


def test_a_module_called_twice_is_shared_and_a_frozen_one_is_not_trained():
    found = traced(CASES["two towers"].module(), CASES["two towers"].fields)
    layers = {layer["name"]: layer for layer in found.graph["layers"]}
    assert layers["tower_1"]["shared_with"] == "tower"
    assert layers["scale"]["type"] == "Parameter"
    found = traced(CASES["resnet"].module(), CASES["resnet"].fields)
    layers = {layer["name"]: layer for layer in found.graph["layers"]}
    assert layers["conv1"]["trainable"] is False
    assert "trainable" not in layers["fc"]


def test_detach_is_stop_gradient_and_frozen_weights_of_ones_own_stay():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return y * y.detach() + self.fixed

    found = traced(Own(), {"x": dense(4)})
    layers = {layer["name"]: layer for layer in found.graph["layers"]}
    assert layers["detach"]["stop_gradient"] is True
    assert layers["fixed"]["trainable"] is False


def test_names_that_are_too_long_or_taken_are_made_to_fit():
    deep: nn.Module = nn.Linear(3, 3)
    for _ in range(5):
        deep = nn.Sequential(OrderedDict([("a_rather_long_name", deep), ("forward_", nn.ReLU())]))
    found = traced(nn.Sequential(deep, deep), {"_0_forward_": dense(3)})
    names = [layer["name"] for layer in found.graph["layers"]]
    assert len(set(names)) == len(names)
    Graph.model_validate_json(jsonio.dumps(found.graph))


# --- arguments --------------------------------------------------------------------------------

ONE_OF_EACH: list[nn.Module] = [
    nn.Linear(3, 4, bias=False),
    nn.Bilinear(3, 4, 5),
    nn.Conv1d(4, 8, 3, stride=2, groups=2, padding="valid"),
    nn.Conv2d(4, 8, (3, 5), padding=(1, 2), dilation=2, padding_mode="reflect"),
    nn.ConvTranspose2d(4, 8, 3, stride=2, output_padding=1, bias=False),
    nn.BatchNorm2d(4, eps=1e-3, momentum=None, affine=False),
    nn.BatchNorm1d(4, track_running_stats=False),
    nn.InstanceNorm2d(4, affine=True),
    nn.GroupNorm(2, 4, affine=False),
    nn.LayerNorm((3, 4), bias=False),
    nn.LayerNorm(4, elementwise_affine=False),
    nn.RMSNorm(4, eps=1e-6),
    nn.Embedding(7, 3, padding_idx=0, max_norm=2.0, sparse=True),
    nn.EmbeddingBag(7, 3, mode="sum", include_last_offset=True),
    nn.LSTM(3, 4, 2, bias=False, batch_first=True, dropout=0.1, bidirectional=True, proj_size=2),
    nn.RNN(3, 4, nonlinearity="relu"),
    nn.GRUCell(3, 4, bias=False),
    nn.MultiheadAttention(8, 2, 0.1, add_bias_kv=True, kdim=6, vdim=5, batch_first=True),
    nn.TransformerEncoderLayer(8, 2, 16, 0.2, "gelu", batch_first=True, norm_first=True),
    nn.TransformerDecoderLayer(8, 2, 16, layer_norm_eps=1e-3, bias=False),
    nn.PReLU(3),
    nn.Softmax(dim=-1),
    nn.Hardtanh(-2.0, 2.0),
    nn.GELU("tanh"),
    nn.Dropout2d(0.4),
    nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
    nn.AvgPool1d(2, count_include_pad=False),
    nn.AdaptiveAvgPool2d((None, 3)),
    nn.Upsample(scale_factor=2.0, mode="bilinear", align_corners=True),
    nn.ConstantPad2d((1, 2, 0, 1), float("inf")),
    nn.Unflatten(1, (2, 3)),
    nn.Threshold(0.1, 20.0),
    nn.CosineSimilarity(dim=2),
    nn.LocalResponseNorm(3),
]


@pytest.mark.parametrize("module", ONE_OF_EACH, ids=lambda item: str(item)[:40])
def test_the_arguments_that_are_read_back_make_the_same_layer(module: nn.Module):
    args = arguments_of(module)
    known = layer_parameters(type(module).__name__)
    assert args.keys() <= known.keys()
    spec = {
        "layers": [{"name": "it", "type": type(module).__name__, "args": args, "inputs": ["x"]}]
    }
    built = Network(Graph.model_validate_json(jsonio.dumps(spec)), ("it",)).layers["it"]
    shapes = {name: (item.shape, item.dtype) for name, item in module.state_dict().items()}
    assert {n: (item.shape, item.dtype) for n, item in built.state_dict().items()} == shapes
    assert built.extra_repr() == module.extra_repr()
    mine = Rebuilt({**jsonio.loads(jsonio.dumps(spec)), "outputs": ["it"]})
    assert mine.state_dict().keys() == {f"it.{name}" for name in shapes}


# --- functions --------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda x: (2 - x) * 3 / (x * x + 1) + x.neg() ** 2,
    "reflected division": lambda x: 3 / (x.abs() + 1),
    "in place": lambda x: F.relu(x * 2, inplace=True).neg().mul_(3).add_(x),
    "comparisons": lambda x: torch.where(x > 0, x, -x) * (x <= 0.5).float(),
    "logic": lambda x: x.masked_fill((x > 1) | ~(x > -1), 0.0),
    "clamps": lambda x: x.clamp(-1, 1) + x.clamp_min(0) + torch.clip(x, max=0.3),
    "max and min": lambda x: x.max(dim=1)[0] + torch.min(x, 1, keepdim=True)[0][:, 0],
    "slices": lambda x: x[:, 1:3, ..., -1] + x[:, -2:, None, 0].squeeze(2),
    "unbinding": lambda x: torch.stack(x.unbind(1), dim=2).flatten(1),
    "chunks": lambda x: torch.cat(x.chunk(2, dim=1), -1).repeat(1, 1, 1)
    + torch.cat(x.split([1, 3], 1), 1)[:, :2].mean(2, keepdim=True).repeat(1, 1, 6),
    "sums": lambda x: x.sum((1, 2)) + x.mean(-1).norm(dim=1) + x.norm(p=1, dim=(1, 2)),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "softmaxes": lambda x: x.softmax(-1) + F.log_softmax(x, dim=1) + torch.sigmoid(x).tanh(),
    "activations": lambda x: F.leaky_relu(x, 0.2) + F.gelu(x, approximate="tanh") + F.silu(x)
    + F.softplus(x, beta=2) + F.hardtanh(x, -0.5, 0.5) + F.elu(x) + F.logsigmoid(x),
    "padding": lambda x: F.pad(x, (1, 2, 0, 1)).sum(-1)
    + F.pad(x, (0, 0, 0, 1), mode="replicate").sum(-1),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "ranges": lambda x: x * torch.arange(x.size(1), dtype=torch.float32)[:, None],
    "shapes": lambda x: x.reshape(x.shape[0], x.shape[1] * 3).unflatten(1, (2, -1)).mT,
    "cumulated": lambda x: x.cumsum(1).flip(1) + x.tril() + torch.triu(x, 1),
}  # fmt: skip


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.long
def test_a_function_becomes_layers_that_give_the_same_bits(name: str):
    torch.manual_seed(0)
    module = Calls(FUNCTIONS[name])
    network, output = engines_network(traced(module, {"x": dense(4, 3)}))
    x = torch.randn(5, 4, 3)
    assert torch.equal(network({"x": x})[output], module(x))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([(2, 3, 4), (3, 3, 4)], [(2, 12), (3, 12)], [("reshape", {"shape": [-1, 12]})]),
        (
            [(2, 5, 8), (3, 7, 8)],
            [(2, 5, 2, 4), (3, 7, 2, 4)],
            [("unflatten", {"dim": 2, "sizes": [2, 4]})],
        ),
        (
            [(2, 5, 2, 4), (3, 7, 2, 4)],
            [(2, 5, 8), (3, 7, 8)],
            [("flatten", {"start_dim": 2, "end_dim": 3})],
        ),
        ([(2, 5), (3, 7)], [(10,), (21,)], [("reshape", {"shape": [-1]})]),
        ([(2, 3), (3, 3)], [(2, 3), (3, 3)], []),
    ],
)  # fmt: skip
def test_a_change_of_shape_fits_every_batch(before: Any, after: Any, expected: Any):
    assert reshaping(before, after) == expected


# --- refusals ---------------------------------------------------------------------------------


class Refused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)


class BranchOnValues(Refused):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if y.sum() > 0:  # here
            y = y * 2
        return y


class LoopOverBatch(Refused):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.size(0)):  # here
            x = self.fc(x)
        return x


class UnknownFunction(Refused):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.fc(x)).real  # here


class UnknownMethod(Refused):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y.sinh()  # here


class SizeOfTheBatch(Refused):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) / x.size(0)  # here


class Numpy(Refused):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + torch.from_numpy(x.numpy())  # here


class HalfFrozen(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.fc.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)  # here


class TiedAcross(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.other.weight = self.fc.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return self.other(y)  # here


class ReadsAWeight(Refused):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y @ self.fc.weight  # here


class Doubles(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.double())  # here


class Mode(Refused):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y if self.training else y * 2


class NoGradient(Refused):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.fc(x)
        return y + self.other(x)


class ChangesWhatItNeeds(Refused):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.fc(x))
        return y.mul_(y + 1)


class Returned(Refused):
    def forward(self, x: Tensor) -> Any:
        return {"scores": self.fc(x), "rows": 3}


class ALoss(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.MSELoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.fc(x), x)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Hooked(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.fc.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Parametrized(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.utils.parametrizations.weight_norm(self.fc)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


REFUSED: dict[type[nn.Module], str] = {
    BranchOnValues: "an if or a loop depends on tensor values",
    LoopOverBatch: "uses a size of the batch",
    UnknownFunction: "fft_rfft() is not supported",
    UnknownMethod: "the method sinh() is not supported",
    SizeOfTheBatch: "a size that differs between batches",
    Numpy: "the code cannot be traced",
    HalfFrozen: "freeze the whole layer or nothing",
    TiedAcross: "its weight is shared with 'fc'",
    ReadsAWeight: "is also used elsewhere",
    Doubles: "float64",
    Mode: "differs from that of the module",
    NoGradient: "the gradient of 'fc.weight' differs from that of the module",
    ChangesWhatItNeeds: "cannot be run and trained: one of the variables",
    Returned: "must return a tensor, or a tuple or dict of tensors",
    ALoss: "'loss' (MSELoss) is a loss",
    Lazy: "is uninitialized",
    Hooked: "has hooks",
    Parametrized: "has parametrizations",
}


MISFITS: dict[str, tuple[nn.Module, str]] = {
    "linear alone": (nn.Linear(5, 2), "Linear: its input has 4 features and it wants 5"),
    "linear inside": (
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(6, 2)),
        "'2' (Linear): its input has 5 features and it wants 6; the input's shape is [batch, 5], "
        "so give in_features=5",
    ),
    "convolution": (
        nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(3, 4, 1)),
        "'1' (Conv2d): its input has 1 channel and it wants 3; the input's shape is [batch, 1, 2, "
        "2], so give in_channels=1",
    ),
    "batch norm": (nn.Sequential(nn.BatchNorm1d(9)), "'0' (BatchNorm1d): its input has 4 features"),
    "layer norm": (nn.Sequential(nn.LayerNorm(9)), "so give normalized_shape=4"),
    "recurrent": (nn.Sequential(nn.LSTM(5, 2)), "'0' (LSTM): its input has 4 features"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_layer_that_does_not_fit_says_which_size(case: str):
    module, words = MISFITS[case]
    with pytest.raises(gh.CannotTrace) as caught:
        traced(module, {"x": dense(4)})
    assert words in caught.value.reason
    assert "mat1" not in caught.value.reason


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_what_no_graph_can_say_is_refused_with_the_line(cls: type[nn.Module]):
    with pytest.raises(gh.CannotTrace) as caught:
        traced(cls(), {"x": dense(4)})
    refused = caught.value
    assert REFUSED[cls] in refused.reason
    lines, first = inspect.getsourcelines(cls)
    marked = [
        first + number for number, line in enumerate(lines) if line.rstrip().endswith("# here")
    ]
    if not marked:
        assert refused.line is None
        return
    assert (refused.file, refused.line) == (__file__, marked[0])
    assert refused.source is not None
    assert refused.source.endswith("# here")
    assert str(refused).startswith(f"{__file__}:{marked[0]}: ")


@pytest.mark.parametrize(
    ("fields", "asked", "expected"),
    [
        ({"left": dense(6), "right": dense(6)}, {}, {"left": "left", "right": "right"}),
        ({"a": dense(6), "b": dense(6)}, {"left": "b", "right": "a"}, {"left": "b", "right": "a"}),
    ],
)
def test_arguments_read_the_fields_of_their_names(fields: Any, asked: Any, expected: Any):
    assert match(CASES["two towers"].module(), fields, asked) == expected


def test_a_single_argument_reads_the_first_field_and_lengths_are_those_of_the_sequence():
    fields = {"words": {"type": "integer_sequence", "dim": 11}, "y": {"type": "integer", "dim": 3}}
    module = CASES["packed lstm"].module()
    assert match(module, fields) == {"text": "words", "lengths": "words.lengths"}
    assert match(CASES["plain gru"].module(), fields) == {"text": "words"}


def test_arguments_that_no_field_is_named_like_are_refused():
    module = CASES["two towers"].module()
    with pytest.raises(TypeError, match=r"forward\(\) takes left, right, debug, but the data has"):
        match(module, {"left": dense(6), "other": dense(6)})
    with pytest.raises(TypeError, match="use the same names"):
        match(module, {"left": dense(6), "right": dense(6)}, {"left": "nowhere"})


def test_the_client_imports_no_torch_until_a_module_is_given():
    code = (
        "import sys, glasshouse as gh; gh.Client; gh.CannotTrace; "
        "from glasshouse.client import blocking, modules; "
        "import glasshouse.client.data.weights; "
        "assert not modules.is_module(3); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
