"""What people pass to `Client.train`: torch's objects, names, and what is refused with advice."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import glasshouse as gh
from engine.losses.losses import build_loss, loss_classes
from engine.optim.lr_schedulers import build_scheduler, scheduler_classes
from engine.optim.optimizers import build_optimizer, optimizer_classes
from glasshouse import jsonio
from glasshouse.client.modules.torch_objects import describe
from glasshouse.client.modules.weight_names import with_rates
from glasshouse.client.training.arguments import accept, device_of
from glasshouse.client.training.specs import train_spec
from glasshouse.spec import Loss, Optimizer, parse_job
from glasshouse.suggestions import nearest
from tests.stub_api import answer, job
from tests.unit.client.test_training import LAYERS, Recorder, checked

Connect = Callable[..., gh.Client]
X, Y = np.zeros((6, 4), np.float32), np.array([0, 1, 2, 0, 1, 2])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


class OwnLoss(nn.CrossEntropyLoss):
    pass


class OwnOptimizer(torch.optim.SGD):
    pass


def rows() -> TensorDataset:
    return TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


def taken(network: Any = LAYERS, data: Any = (X, Y), **options: Any) -> dict[str, Any]:
    return dict(accept(network, data, options).options)


# --- losses ----------------------------------------------------------------------------------


def other_than(default: Any, name: str) -> Any:
    """A value of an argument that is not its default."""
    special = {"reduction": "sum", "weight": torch.tensor([1.0, 2.0, 3.0])}
    if name in special:
        return special[name]
    if name == "p":
        return 3 - default
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return type(default)(default + 1)
    return torch.tensor([0.5, 2.0, 1.0])


@pytest.mark.parametrize("name", [n for n in loss_classes() if n != "LinearCrossEntropyLoss"])
def test_a_loss_that_is_read_and_built_again_has_the_same_arguments(name: str):
    cls = loss_classes()[name]
    assert describe(cls(), "loss") == {"type": name}
    known = list(inspect.signature(cls).parameters.values())
    own = {"size_average", "reduce", "distance_function"}
    given = {
        item.name: other_than(item.default, item.name) for item in known if item.name not in own
    }
    found = describe(cls(**given), "loss")
    assert found["type"] == name
    assert set(found["args"]) == set(given)
    rebuilt = build_loss(Loss(**found, inputs=("a", "b")))
    for key, value in given.items():
        held = getattr(rebuilt, key)
        assert torch.equal(held, value) if isinstance(value, torch.Tensor) else held == value, key


def test_an_instance_as_the_loss_says_its_type_and_arguments(connect: Connect):
    service = Recorder()
    client = connect(*service.routes)
    weight = torch.tensor([1.0, 2.0, 0.5])
    for loss in (
        nn.CrossEntropyLoss(weight, label_smoothing=0.25),
        {"type": nn.CrossEntropyLoss(weight, label_smoothing=0.25), "inputs": ["fc", "y"]},
        [nn.CrossEntropyLoss(weight, label_smoothing=0.25)],
    ):
        client.train(LAYERS, (X, Y), loss=loss, epochs=1)
    args = {"weight": [1.0, 2.0, 0.5], "label_smoothing": 0.25}
    whole = {"type": "CrossEntropyLoss", "args": args, "inputs": ["fc", "y"]}
    assert [spec["loss"] for spec in service.specs] == [whole, whole, [whole]]
    client.train(LAYERS, (X, Y), loss=nn.CrossEntropyLoss, epochs=1)
    assert service.specs[-1]["loss"] == {"type": "CrossEntropyLoss", "inputs": ["fc", "y"]}


# --- optimizers ------------------------------------------------------------------------------

_TRIED = [name for name in optimizer_classes() if name not in ("SparseAdam", "Muon")]


@pytest.mark.parametrize("name", _TRIED)
def test_an_optimizer_that_is_read_and_built_again_has_the_same_options(name: str):
    cls = optimizer_classes()[name]
    learned = [nn.Parameter(torch.ones(2, 2))]
    given = {"lr": 0.0625} | (
        {"weight_decay": 0.5} if "weight_decay" in cls(learned).defaults else {}
    )
    if "betas" in cls(learned).defaults:
        given["betas"] = (0.5, 0.75)
    made = cls(learned, **given)
    found = describe(made, "optimizer")
    assert found["args"].keys() == given.keys()
    rebuilt = build_optimizer(Optimizer(**found), learned)
    same = [
        {k: v for k, v in one.param_groups[0].items() if k != "params"} for one in (made, rebuilt)
    ]
    assert same[0] == same[1]


def test_an_optimizer_may_be_a_class_a_partial_or_an_instance():
    net = Net()
    plain = {"type": "Adam", "args": {"lr": 0.01}}
    assert taken(optimizer=torch.optim.Adam)["optimizer"] == {"type": "Adam"}
    partial = functools.partial(torch.optim.Adam, lr=0.01)
    assert taken(optimizer=partial)["optimizer"] == plain
    made = torch.optim.Adam(net.parameters(), lr=0.01)
    assert taken(net, optimizer=made)["optimizer"] == plain
    lr_scheduler.LinearLR(made, start_factor=0.5)  # it has halved the rate already
    assert taken(net, optimizer=made)["optimizer"] == plain
    assert taken(optimizer="Adam")["optimizer"] == "Adam"
    both = {"type": functools.partial(torch.optim.SGD, lr=0.1), "l1": 0.5}
    assert taken(optimizer=both)["optimizer"] == {"type": "SGD", "args": {"lr": 0.1}, "l1": 0.5}


def test_groups_become_what_layers_have_for_themselves():
    net = Net()
    groups = [
        {"params": [net.body.weight, net.head.bias]},
        {"params": [net.head.weight], "lr": 0.05, "weight_decay": 0.25},
        {"params": [net.body.bias], "lr": 0.1},
    ]
    made = torch.optim.SGD(groups, lr=0.1, weight_decay=0.5)
    found = accept(net, (X, Y), {"optimizer": made, "epochs": 1})
    args = {"lr": 0.1, "weight_decay": 0.5}
    assert found.options["optimizer"] == {"type": "SGD", "args": args}
    graph = {
        "layers": [
            {"name": "a", "type": "Linear", "path": "body"},
            {"name": "b", "type": "Linear", "path": "head"},
        ]
    }
    weights = ["a.weight", "a.bias", "b.weight", "b.bias"]
    first, second = with_rates(graph, weights, found.rates)["layers"]
    assert first == graph["layers"][0]
    assert second == graph["layers"][1] | {
        "lr_scale": {"weight": 0.5},
        "weight_decay": {"weight": 0.25},
    }


# --- schedulers ------------------------------------------------------------------------------

SCHEDULERS: list[tuple[str, dict[str, Any]]] = [
    ("StepLR", {"step_size": 3, "gamma": 0.5}),
    ("MultiStepLR", {"milestones": [2, 2, 5], "gamma": 0.5}),
    ("ConstantLR", {"factor": 0.25, "total_iters": 3}),
    ("LinearLR", {"start_factor": 0.5, "end_factor": 0.75, "total_iters": 4}),
    ("ExponentialLR", {"gamma": 0.9}),
    ("PolynomialLR", {"total_iters": 6, "power": 2.0}),
    ("CosineAnnealingLR", {"T_max": 7, "eta_min": 0.01}),
    ("CosineAnnealingWarmRestarts", {"T_0": 2, "T_mult": 3, "eta_min": 0.01}),
]


def course(scheduler: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    rates: list[float] = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("name", "args"), SCHEDULERS)
def test_a_scheduler_that_is_read_and_built_again_takes_the_same_course(
    name: str, args: dict[str, Any]
):
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5) for _ in range(2))
    made = scheduler_classes()[name](first, **args)
    found = taken(scheduler={"type": made, "unit": "epochs"})["scheduler"]
    assert found == {"type": name, "args": args, "unit": "epochs"}
    again = build_scheduler(name, found["args"], second)
    assert course(made, first) == course(again, second)


# --- names and data --------------------------------------------------------------------------


def test_names_alone_are_metrics_and_probes(connect: Connect):
    service = Recorder()
    client = connect(*service.routes)
    client.train(LAYERS, (X, Y), metrics=["accuracy"], probes="*", epochs=1)
    spec = service.specs[0]
    assert spec["metrics"] == [{"type": "accuracy", "inputs": ["fc", "y"]}]
    probe = {"layers": ["*"], "kinds": ["output"], "want": ["stats"], "every": 1}
    assert spec["probes"] == [probe]
    checked(spec)
    f1 = {"type": "MulticlassF1Score", "args": {"num_classes": 3}, "every": 1}
    client.train(LAYERS, (X, Y), metrics=[f1], probes=["fc", {**probe, "every": 5}], epochs=1)
    spec = service.specs[1]
    assert spec["metrics"] == [{**f1, "inputs": ["fc", "y"]}]
    assert spec["probes"] == [{**probe, "layers": ["fc"]}, {**probe, "every": 5}]
    client.train(LAYERS, (X, Y), metrics="accuracy", probes=probe, epochs=1)
    assert service.specs[2]["metrics"][0]["inputs"] == ["fc", "y"]
    assert service.specs[2]["probes"] == [probe]
    with pytest.raises(ValueError, match=r"mean needs inputs: \{'type': 'mean', 'inputs'"):
        client.train(LAYERS, (X, Y), metrics=["mean"], epochs=1)


def test_a_data_loader_gives_its_dataset_its_batches_and_its_order(connect: Connect):
    service = Recorder()
    client = connect(*service.routes)
    loader = DataLoader(rows(), batch_size=3, shuffle=True, drop_last=True)
    judge = DataLoader(rows(), batch_size=2)
    client.train(LAYERS, loader, validation=judge, epochs=1)
    data = service.specs[0]["data"]
    assert (data["batch_size"], data["shuffle"], data["drop_last"]) == (3, {"enabled": True}, True)
    np.testing.assert_array_equal(service.uploads[0]["y_train"], Y)
    np.testing.assert_array_equal(service.uploads[0]["y_validation"], Y)
    client.train(LAYERS, DataLoader(rows(), batch_size=3), batch_size=2, epochs=1)
    data = service.specs[1]["data"]
    assert (data["batch_size"], data["shuffle"]) == (2, {"enabled": False})
    client.train(LAYERS, loader, validation={"held_out": judge}, epochs=1)
    assert [*service.specs[2]["data"]["validation"]] == ["held_out"]
    np.testing.assert_array_equal(service.uploads[-1]["y_train"], Y)
    assert "drop_last" not in data


def test_an_inference_takes_a_data_loader_in_its_order(connect: Connect):
    service = Recorder(**{"fc/value": np.zeros((6, 3), np.float32)})
    service.trained = {
        "network": {"type": "graph", "layers": LAYERS},
        "data": {"fields": {"x": {"type": "dense", "shape": [4]}, "y": {"type": "integer"}}},
    }
    client = connect(*service.routes)
    client.infer("job_1", DataLoader(rows(), batch_size=4), device="cpu")
    assert len(service.specs[0]["inputs"]["x"]) == 6
    assert service.specs[0]["devices"] == {"type": "cpu"}
    parse_job(jsonio.dumps(service.specs[0]))
    with pytest.raises(TypeError, match="shuffles"):
        client.infer("job_1", DataLoader(rows(), shuffle=True))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"device": "cuda"}, {"type": "cuda"}),
        ({"device": "cuda:2"}, {"type": "cuda", "ids": [2]}),
        ({"device": torch.device("cuda", 1)}, {"type": "cuda", "ids": [1]}),
        ({"device": torch.device("cpu")}, {"type": "cpu"}),
        ({"devices": "cpu"}, {"type": "cpu"}),
        ({"devices": {"type": "cpu", "threads": 2}}, {"type": "cpu", "threads": 2}),
    ],
)
def test_a_device_is_named_as_torch_names_it(given: dict[str, Any], wanted: dict[str, Any]):
    assert taken(**given)["devices"] == wanted
    assert "device" not in taken(**given)


# --- what is refused -------------------------------------------------------------------------


def loader_of(**options: Any) -> DataLoader[Any]:
    return DataLoader(rows(), **options)


def stepped() -> torch.optim.Optimizer:
    made = torch.optim.SGD([weight := nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(1)
    made.step()
    return made


NET = Net()


def of_groups(**second: Any) -> torch.optim.Optimizer:
    groups = [{"params": NET.body.parameters()}, {"params": NET.head.parameters(), **second}]
    return torch.optim.SGD(groups, lr=0.1)


STEP = functools.partial(lr_scheduler.StepLR, step_size=3)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one layer": ({"network": LAYERS[1]}, "one layer (Linear): pass a list of layers"),
    "neither": ({"network": {"nodes": []}}, "pass {'layers': [...]}"),
    "a preset misspelled": (
        {"network": "resnet81"},
        "unknown preset 'resnet81'; did you mean resnet18?",
    ),
    "a preset of nothing": ({"network": "qqq"}, "unknown preset 'qqq'; use cbow"),
    "a module class": (
        {"network": Net},
        "Net is a class: pass an instance of it: Net(…)",
    ),
    "a number": ({"network": 3}, "a list of layers, the name of a preset or an nn.Module"),
    "no targets": ({"data": X}, "one array of shape [6, 4] without targets: pass a pair (x, y)"),
    "a tensor alone": ({"data": torch.ones(2, 3)}, "one array of shape [2, 3] without targets"),
    "a path": ({"data": "/data/x.csv"}, "Upload it: data=client.datasets.upload('/data/x.csv')"),
    "a loss of one's own": (
        {"loss": OwnLoss()},
        "OwnLoss is not a class of torch.nn, and the service does",
    ),
    "what it extends": ({"loss": OwnLoss()}, "you can use CrossEntropyLoss, which it extends"),
    "a function": (
        {"loss": nn.functional.cross_entropy},
        "a function; pass a class of torch.nn or an instance",
    ),
    "its class": ({"loss": nn.functional.mse_loss}, "such as MSELoss"),
    "a distance": (
        {"loss": nn.TripletMarginWithDistanceLoss(distance_function=nn.PairwiseDistance(p=1))},
        "TripletMarginWithDistanceLoss has distance_function=PairwiseDistance()",
    ),
    "a lambda": ({"loss": lambda a, b: a - b}, "is a function"),
    "an optimizer of one's own": (
        {"optimizer": OwnOptimizer},
        "you can use SGD, which it extends",
    ),
    "a partial by place": (
        {"optimizer": functools.partial(torch.optim.SGD, [])},
        "pass the arguments of partial(SGD) as keywords",
    ),
    "an optimizer at work": ({"optimizer": stepped()}, "has already made steps"),
    "groups of a graph": (
        {"optimizer": of_groups(lr=1.0)},
        "set lr_scale and weight_decay of the layers",
    ),
    "groups that differ": (
        {"network": NET, "optimizer": of_groups(momentum=0.5)},
        "differ in momentum (0 and 0.5); in a spec, only lr and weight_decay can differ",
    ),
    "a group at rest": ({"network": NET, "optimizer": of_groups(lr=0.0)}, "requires_grad_(False)"),
    "missing parameters": (
        {"network": NET, "optimizer": torch.optim.SGD(NET.body.parameters(), lr=0.1)},
        "it does not have head.weight, head.bias. Pass all parameters",
    ),
    "another's parameters": (
        {"network": NET, "optimizer": torch.optim.SGD(Net().parameters(), lr=0.1)},
        "it has parameters that the network does not have",
    ),
    "a scheduler without a unit": (
        {"scheduler": lr_scheduler.StepLR(stepped(), 3)},
        "the unit of StepLR is required",
    ),
    "a scheduler of functions": (
        {"scheduler": {"type": lr_scheduler.LambdaLR(stepped(), float), "unit": "epochs"}},
        "the arguments of a LambdaLR cannot be read from the object",
    ),
    "arguments twice": (
        {"scheduler": {"type": STEP, "args": {"gamma": 1}, "unit": "steps"}},
        "the StepLR object has its arguments: remove args",
    ),
    "a sampler": (
        {"data": loader_of(sampler=WeightedRandomSampler([1.0] * 6, 6))},
        "the sampler WeightedRandomSampler",
    ),
    "a part of the rows": (
        {"data": loader_of(sampler=RandomSampler(rows(), num_samples=3))},
        "the sampler RandomSampler",
    ),
    "no batches": ({"data": loader_of(batch_size=None)}, "batch_size None"),
    "a collate_fn": ({"data": loader_of(collate_fn=list)}, "the collate_fn list"),
    "a GPU": (
        {"options": {"device": "gpu"}},
        "unknown device 'gpu'; did you mean cuda? Use 'auto', 'cpu'",
    ),
    "a device of letters": ({"options": {"device": "cuda:a"}}, "use a name like 'cuda:1'"),
    "two devices": (
        {"options": {"device": "cpu", "devices": {}}},
        "set device or devices, not both",
    ),
    "an unknown option": ({"options": {"optimiser": 1}}, "optimiser; did you mean optimizer?"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.long
def test_what_cannot_be_trained_is_refused_with_what_to_give(connect: Connect, case: str):
    service = Recorder()
    change, words = REFUSED[case]
    given = {"network": LAYERS, "data": (X, Y), **change}
    network, data = given.pop("network"), given.pop("data")
    options = given | given.pop("options", {})
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        connect(*service.routes).train(network, data, epochs=1, **options)
    assert service.uploads == service.specs == []


def test_a_device_is_one_of_few():
    assert device_of("auto") == {"type": "auto"}
    with pytest.raises(ValueError, match="'cpu:1' has an index; use 'cpu'"):
        device_of("cpu:1")


def test_a_fork_moves_to_a_device_and_keeps_the_rest_of_its_patch(connect: Connect):
    asked: list[Any] = []

    async def fork(request: Request) -> Response:
        asked.append(await request.json())
        return answer(job(id="job_2"), 201)

    client = connect(Route("/api/v1/jobs/job_1/fork", fork, methods=["POST"]))
    client.jobs.fork("job_1", {"seed": 2, "devices": {"worker": "host-a"}}, device="cuda:1")
    client.jobs.fork("job_1", device=torch.device("cpu"))
    cleared = {"count": None, "ids": None}
    on_cuda = {"worker": "host-a", "count": None, "type": "cuda", "ids": [1]}
    assert [body["spec"] for body in asked] == [
        {"seed": 2, "devices": on_cuda},
        {"devices": {**cleared, "type": "cpu"}},
    ]


def test_a_preset_of_other_sizes_is_refused_in_words_of_its_own():
    network = {"type": "preset", "preset": "mlp", "args": {"hiden": [4]}}
    with pytest.raises(ValueError, match="did you mean hidden") as caught:
        train_spec(network, {"fields": {}}, {"epochs": 1})
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize("name", ["/data/x.csv", "ds_1?force=true", "ds_1#a", "", "a b"])
def test_an_invalid_id_never_becomes_a_path(connect: Connect, name: str):
    client = connect()
    with pytest.raises(ValueError, match="is not a valid dataset id"):
        client.datasets.get(name)
    with pytest.raises(ValueError, match="is not a valid job id"):
        client.jobs.cancel(name)


@pytest.mark.parametrize(
    ("name", "known", "wanted"),
    [
        ("Liner", ["Linear", "Bilinear", "LSTM"], ["Linear"]),
        ("conv2d", ["Conv1d", "Conv2d", "ConvTranspose2d"], ["Conv2d"]),
        ("out_feature", ["in_features", "out_features", "bias"], ["out_features"]),
        ("stepsize", ["step_size", "gamma"], ["step_size"]),
        ("learning_rate", ["lr", "betas"], ["lr"]),
        ("label_smooth", ["label_smoothing", "reduction"], ["label_smoothing"]),
        ("color", ["in_features", "out_features", "bias"], []),
        ("x", [], []),
    ],
)
def test_the_intended_name_is_suggested(name: str, known: list[str], wanted: list[str]):
    assert nearest(name, known) == wanted
