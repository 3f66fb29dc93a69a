"""What layers say of their own: each option is what torch does by hand."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.unit.engine.runs import (
    captured,
    cnn,
    errors,
    losses,
    of_type,
    planned,
    run,
    spec,
    write_table,
)

LAYERS = {
    "conv1": {"name": "conv1", "type": "Conv2d", "args": {"out_channels": 6, "kernel_size": 3}},
    "relu1": {"name": "relu1", "type": "ReLU", "args": {"inplace": True}},
    "pool1": {"name": "pool1", "type": "MaxPool2d", "args": {"kernel_size": 2}},
    "flat": {"name": "flat", "type": "Flatten"},
    "drop": {"name": "drop", "type": "Dropout", "args": {"p": 0.25}},
    "fc": {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
}
NUM_STEPS = 6
Network = nn.Sequential


def job(options: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    layers = [{**copy.deepcopy(layer), **options.get(name, {})} for name, layer in LAYERS.items()]
    return spec(**{"network": {"layers": layers}, "stop": {"steps": NUM_STEPS}, **more})


def sgd(network: Network) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in network.parameters() if p.requires_grad], 0.1, 0.9)


def by_hand(
    table: Any,
    *,
    prepare: Callable[[Network], Any] = lambda _: None,
    make: Callable[[Network], torch.optim.Optimizer] = sgd,
    after_backward: Callable[[Network], Any] = lambda _: None,
    forward: Callable[[Network, torch.Tensor], torch.Tensor] = lambda network, x: network(x),
    after_step: Callable[[torch.optim.Optimizer, int], Any] = lambda *_: None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain torch: losses and final weights."""
    images = torch.from_numpy(np.load(table / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(table / "train" / "1.npy"))
    torch.manual_seed(3)
    network = cnn()
    prepare(network)
    optimizer = make(network)
    told: list[float] = []
    for epoch in range(2):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(3 * 1_000_003 + epoch))
        for rows in order.split(64):
            if len(told) == NUM_STEPS:
                break
            x = images[rows].float() / 255
            loss = nn.functional.cross_entropy(forward(network, x), labels[rows])
            loss.backward()
            after_backward(network)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            after_step(optimizer, len(told))
            told.append(loss.item())
    names = {"0": "conv1", "5": "fc"}
    weights = {f"{names[k[0]]}{k[1:]}": v.detach() for k, v in network.named_parameters()}
    return told, weights


def check(directory: Any, whole: dict[str, Any], table: Any, **hand: Any) -> list[dict[str, Any]]:
    """The job and torch by hand come to the same losses and weights, bit for bit."""
    records = run(directory, whole, table)
    told, weights = by_hand(table, **hand)
    assert losses(records) == told
    kept = load_file(directory / "checkpoints" / f"step-{NUM_STEPS}" / "model.safetensors")
    for name, expected in weights.items():
        assert torch.equal(kept[name], expected), name
    return records


def metrics(records: list[dict[str, Any]], name: str) -> list[float]:
    found = [r["values"] for r in of_type(records, "metrics") if "loss" in r["values"]]
    return [item[name] for item in found if name in item]


# --- frozen and cut --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv1", "fc"])
def test_a_frozen_layer_stays_and_others_are_trained(name, digits, tmp_path):
    """Weight decay and momentum included: the optimizer does not know its parameters."""
    decayed = {"type": "SGD", "args": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}

    def freeze(network: Network) -> None:
        network[{"conv1": 0, "fc": 5}[name]].requires_grad_(False)

    def make(network: Network) -> torch.optim.Optimizer:
        learned = [item for item in network.parameters() if item.requires_grad]
        return torch.optim.SGD(learned, 0.1, 0.9, weight_decay=0.1)

    whole = job({name: {"trainable": False}}, optimizer=decayed)
    check(tmp_path, whole, digits, prepare=freeze, make=make)
    row = {item["name"]: item for item in planned(whole)["layers"]}[name]
    assert row["trainable"] is False
    assert row["parameters"] > 0
    first = by_hand(digits, prepare=freeze, make=make, after_step=lambda *_: None)[1]
    torch.manual_seed(3)
    begun = {"conv1": cnn()[0].weight, "fc": None}[name]
    if begun is not None:
        assert torch.equal(first["conv1.weight"], begun)


def test_no_gradient_comes_through_a_cut(digits, tmp_path):
    def forward(network: Network, x: torch.Tensor) -> torch.Tensor:
        return network[5](network[:5](x).detach())

    whole = job({"drop": {"stop_gradient": True}})
    check(tmp_path, whole, digits, forward=forward)
    warned = {item["pointer"]: item["detail"] for item in planned(whole)["warnings"]}
    assert "no gradient reaches the parameters of layer 'conv1'" in warned["/network/layers/0"]
    probe = {"layers": ["conv1"], "kinds": ["output_grad"], "every": 1}
    assert "/probes/0/kinds/0" in errors(whole | {"probes": [probe]})


def test_stop_gradient_on_the_last_layer_leaves_nothing_to_train():
    assert list(errors(job({"fc": {"stop_gradient": True}}))) == ["/loss/inputs"]


# --- rates -----------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Any] = {
    "SGD": {"momentum": 0.9, "lr": 0.1},
    "Adam": {"lr": 0.01},
    "Adagrad": {"lr": 0.05},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_layer_has_its_own_rate_and_decay(kind, digits, tmp_path):
    args = OPTIMIZERS[kind] | {"weight_decay": 0.01}
    options = {
        "conv1": {"lr_scale": {"weight": 0.5, "b*": 2.0}, "weight_decay": 0.2},
        "fc": {"weight_decay": {"bias": 0.0}},
    }

    def make(network: Network) -> torch.optim.Optimizer:
        conv, fc = network[0], network[5]
        lr = args["lr"]
        groups = [
            {"params": [fc.weight]},
            {"params": [conv.weight], "lr": 0.5 * lr, "weight_decay": 0.2},
            {"params": [conv.bias], "lr": 2.0 * lr, "weight_decay": 0.2},
            {"params": [fc.bias], "weight_decay": 0.0},
        ]
        return getattr(torch.optim, kind)(groups, **args)

    whole = job(options, optimizer={"type": kind, "args": args})
    records = check(tmp_path, whole, digits, make=make)
    assert metrics(records, "lr") == [args["lr"]] * NUM_STEPS


SCALED = {"conv1": {"lr_scale": 0.1}}
SCHEDULERS: dict[str, Any] = {
    "OneCycleLR": {"max_lr": 0.2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
    "SWALR": {"swa_lr": 0.02, "anneal_epochs": 3},
    "ExponentialLR": {"gamma": 0.8},
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_schedule_moves_a_scaled_rate_alike(kind, digits, tmp_path):
    args = SCHEDULERS[kind]

    def make(network: Network) -> torch.optim.Optimizer:
        groups = [
            {"params": network[5].parameters()},
            {"params": network[0].parameters(), "lr": 0.01},
        ]
        made = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        both = {k: [v, 0.1 * v] if k.endswith("_lr") else v for k, v in args.items()}
        if kind == "OneCycleLR":
            both["total_steps"] = NUM_STEPS
        cls = torch.optim.swa_utils.SWALR if kind == "SWALR" else None
        schedulers["now"] = (cls or getattr(torch.optim.lr_scheduler, kind))(made, **both)
        return made

    schedulers: dict[str, Any] = {}
    whole = job(SCALED, scheduler={"type": kind, "args": args})
    steps = NUM_STEPS - 1  # the last of OneCycleLR is the end of it

    def after(_optimizer: torch.optim.Optimizer, step: int) -> None:
        if step < steps:
            schedulers["now"].step()

    check(tmp_path, whole, digits, make=make, after_step=after)


def test_a_rate_set_while_it_runs_is_scaled_too(digits, tmp_path):
    options = {"conv1": {"lr_scale": 0.1}, "fc": {"weight_decay": {"bias": 0.5}}}
    order = {"id": "cmd_1", "by": None, "set": {"optimizer.lr": 0.02, "optimizer.weight_decay": 1}}
    told = {"optimizer.lr": 0.1, "optimizer.weight_decay": 0}
    applied = order | {"step": 2, "old": told, "new": order["set"]}
    records = run(tmp_path, job(options), digits, commands=[applied])

    def make(network: Network) -> torch.optim.Optimizer:
        groups = [
            {"params": [network[5].weight]},
            {"params": network[0].parameters(), "lr": 0.01},
            {"params": [network[5].bias], "weight_decay": 0.5},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def after(optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 1:
            for group, (lr, decay) in zip(
                optimizer.param_groups, [(0.02, 1), (0.002, 1), (0.02, 0.5)], strict=True
            ):
                group.update(lr=lr, weight_decay=decay)

    assert losses(records) == by_hand(digits, make=make, after_step=after)[0]


# --- penalties and clipping ------------------------------------------------------------------


def test_l1_is_added_to_the_gradient_after_clipping(digits, tmp_path):
    optimizer = {"type": "SGD", "args": {"lr": 0.1, "momentum": 0.9}, "l1": 0.01}
    options = {"conv1": {"l1": {"weight": 0.05}}, "fc": {"l1": {"bias": 0.0}}}
    clip = {"type": "value", "max": 0.002}

    def after(network: Network) -> None:
        clip_grad_value_(network.parameters(), 0.002)
        rates = {"0.weight": 0.05, "0.bias": 0.01, "5.weight": 0.01, "5.bias": 0.0}
        for name, item in network.named_parameters():
            if rates[name]:
                item.grad.add_(item.detach().sign(), alpha=rates[name])  # pyright: ignore

    probe = {"layers": ["*"], "kinds": ["param_grad"], "every": 1, "point": "clipped"}
    whole = job(options, optimizer=optimizer, grad_clip=clip)
    whole["probes"] = [{**probe, "want": ["full"]}]
    records = check(tmp_path, whole, digits, after_backward=after)
    seen = captured(records, tmp_path)
    assert all(item.abs().max() <= 0.002 for item in seen.values())  # as weight_decay: not in it


CLIPS: dict[str, Any] = {
    "value": ({"type": "value", "max": 0.001}, clip_grad_value_),
    "global_norm": ({"type": "global_norm", "max": 0.01}, clip_grad_norm_),
}


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("of_all", ["global_norm", None])
def test_a_layer_is_clipped_by_itself_and_counts_for_no_norm(kind, of_all, digits, tmp_path):
    own, function = CLIPS[kind]
    norms: list[float] = []

    def after(network: Network) -> None:
        function(network[5].parameters(), own["max"])
        if of_all:
            norms.append(float(clip_grad_norm_(network[0].parameters(), 0.05)))

    clip = {"grad_clip": {"type": of_all, "max": 0.05}} if of_all else {}
    records = check(tmp_path, job({"fc": {"grad_clip": own}}, **clip), digits, after_backward=after)
    assert metrics(records, "grad_norm") == norms
    assert metrics(records, "clipped_steps") == [1, 2, 3, 4, 5, 6]


def test_a_layer_that_is_not_clipped_stays_as_it_is(digits, tmp_path):
    def after(network: Network) -> None:
        clip_grad_norm_(network[0].parameters(), 0.05)

    clip = {"type": "global_norm", "max": 0.05}
    check(tmp_path, job({"fc": {"grad_clip": False}}, grad_clip=clip), digits, after_backward=after)


@pytest.mark.parametrize("clip", ["value", "norm", "global_norm"])
def test_steps_are_counted_only_if_clipping_changes_a_gradient(clip, digits, tmp_path):
    """The limit is the middle of what the gradients reach: the larger half of steps is clipped."""
    probe = {"layers": ["*"], "kinds": ["param_grad"], "every": 1, "want": ["full"]}
    frozen = {"type": "SGD", "args": {"lr": 1e-12}}  # else clipping would change what comes next
    seen = captured(
        run(tmp_path / "free", job({}, optimizer=frozen, probes=[probe]), digits), tmp_path / "free"
    )
    reached: list[float] = []
    for step in range(NUM_STEPS):
        found = [item for (at, *_), item in seen.items() if at == step]
        norms = torch.stack([item.norm() for item in found])
        reached.append(
            {
                "value": float(max(item.abs().max() for item in found)),
                "norm": float(norms.max()),
                "global_norm": float(norms.norm()),
            }[clip]
        )
    limit = sorted(reached)[NUM_STEPS // 2 - 1] * 1.0001
    records = run(
        tmp_path / "clipped",
        job({}, optimizer=frozen, grad_clip={"type": clip, "max": limit}),
        digits,
    )
    expected = np.cumsum([value > limit for value in reached])
    assert metrics(records, "clipped_steps") == expected.tolist()
    assert expected[-1] == NUM_STEPS // 2


@pytest.mark.parametrize(
    ("limit", "low", "high"),
    [(0.003, -0.003, 0.003), ({"min": -0.0005, "max": 0.002}, -0.0005, 0.002)],
)
def test_the_gradient_by_an_output_is_clipped_before_the_layer_takes_it(
    limit, low, high, digits, tmp_path
):
    raw: list[torch.Tensor] = []

    def forward(network: Network, x: torch.Tensor) -> torch.Tensor:
        output = network(x)

        def clip(gradient: torch.Tensor) -> torch.Tensor:
            raw.append(gradient.clone())
            return gradient.clamp(low, high)

        output.register_hook(clip)
        return output

    probe = {"layers": ["fc", "relu1"], "kinds": ["output_grad"], "every": 1, "want": ["full"]}
    whole = job({"fc": {"output_grad_clip": limit}}, probes=[probe])
    records = check(tmp_path, whole, digits, forward=forward)
    seen = captured(records, tmp_path)
    shares = metrics(records, "output_grad_clip/fc")
    for step, gradient in enumerate(raw):
        assert torch.equal(seen[step, "fc", "output_grad"], gradient)  # as it comes
        bitten = (gradient != gradient.clamp(low, high)).double().mean()
        assert shares[step] == pytest.approx(float(bitten), rel=1e-6)
        assert 0 < shares[step] < 1


def test_several_batches_of_a_step_count_together(digits, tmp_path):
    """Without dropout and with a limit above all, four batches bite as often as one: never."""
    options = {"drop": {"args": {"p": 0.0}}, "fc": {"output_grad_clip": 1e-9}}
    records = run(tmp_path, job(options, data={"batch_size": 16}, accumulate=4), digits)
    assert metrics(records, "output_grad_clip/fc") == [1.0] * NUM_STEPS


def test_what_a_guard_runs_once_more_counts_for_nothing(tmp_path):
    """The second of four batches has a NaN: to find it the first one is run again, backward too."""
    x = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    x[21, 3] = np.nan
    columns = {"x": x, "label": (x[:, 0] > 0).astype(np.int64)}
    table = write_table(tmp_path / "table", columns, {"train": slice(0, 64)})
    fields = {"x": {"type": "dense", "fill": "NaN"}, "label": {"type": "integer", "dim": 10}}
    fc = {"name": "fc", "type": "Linear", "args": {"out_features": 10}, "output_grad_clip": 0.002}
    shares: list[list[float]] = []
    for name, checks in {"looked": ["loss"], "plain": []}.items():
        whole = spec(
            network={"layers": [fc]},
            data={"fields": fields, "batch_size": 16, "shuffle": {"enabled": False}},
            accumulate=4,
            guards={"nonfinite": {"check": checks}},
            stop={"steps": 1},
        )
        records = run(tmp_path / name, whole, table)
        assert len(of_type(records, "finding")) == len(checks)
        shares.append(metrics(records, "output_grad_clip/fc"))
    assert shares[0] == shares[1]
    assert 0.2 < shares[0][0] < 0.9


def test_sparse_gradients_are_clipped_as_dense_ones_are(tmp_path, digits):
    """Rows that come twice in a batch are added up before they are clipped."""

    def one(sparse: bool, clip: dict[str, Any], name: str) -> list[float]:
        layers = [
            {
                "name": "table",
                "type": "Embedding",
                "args": {"embedding_dim": 10, "sparse": sparse},
                "inputs": ["label"],
            }
        ]
        whole = spec(
            network={"layers": layers},
            loss={"type": "CrossEntropyLoss", "inputs": ["table", "label"]},
            optimizer={"type": "SGD", "args": {"lr": 5.0}},
            stop={"steps": NUM_STEPS},
            grad_clip=clip,
        )
        del whole["data"]["fields"]["image"]
        return losses(run(tmp_path / name, whole, digits))

    for kind, limit in {"value": 0.005, "norm": 0.05, "global_norm": 0.05}.items():
        clip = {"type": kind, "max": limit}
        dense, sparse = one(False, clip, f"{kind}-dense"), one(True, clip, f"{kind}-sparse")
        assert sparse == pytest.approx(dense, rel=1e-6)
        free = one(True, {"type": kind, "max": 1e9}, f"{kind}-free")
        assert sparse[-1] > free[-1] * 1.001  # it was clipped


# --- first values ----------------------------------------------------------------------------


def test_parameters_begin_with_what_torch_fills_them_with(digits, tmp_path):
    options = {
        "conv1": {"init": {"weight": {"type": "xavier_uniform_", "args": {"gain": 0.5}}}},
        "fc": {
            "init": {
                "bias": {"type": "constant_", "args": {"val": 0.25}},
                "*": {"type": "kaiming_normal_", "args": {"nonlinearity": "relu"}},
            }
        },
    }

    def prepare(network: Network) -> None:
        nn.init.xavier_uniform_(network[0].weight, gain=0.5)
        nn.init.kaiming_normal_(network[5].weight, nonlinearity="relu")
        nn.init.constant_(network[5].bias, 0.25)

    check(tmp_path, job(options), digits, prepare=prepare)


def test_the_row_of_a_padding_index_stays_zero(tmp_path, digits):
    table = {
        "name": "table",
        "type": "Embedding",
        "args": {"embedding_dim": 10, "padding_idx": 3},
        "inputs": ["label"],
        "init": {"weight": {"type": "ones_"}},
    }
    whole = spec(
        network={"layers": [table]},
        loss={"type": "CrossEntropyLoss", "inputs": ["table", "label"]},
        stop={"steps": 1},
    )
    del whole["data"]["fields"]["image"]
    run(tmp_path, whole, digits)
    kept = load_file(tmp_path / "checkpoints" / "step-1" / "model.safetensors")
    assert kept["table.weight"][3].tolist() == [0.0] * 10
    assert kept["table.weight"].abs().sum() > 80


# --- what is refused -------------------------------------------------------------------------

NONE = {"type": "Rprop", "args": {"lr": 0.01}}
AT = "/network/layers/"


@pytest.mark.parametrize(
    ("options", "more", "pointer", "detail"),
    [
        ({"relu1": {"lr_scale": 2.0}}, {}, "1/lr_scale", "has no parameters"),
        ({"relu1": {"trainable": False}}, {}, "1/trainable", "has no parameters"),
        ({"fc": {"trainable": False, "l1": 0.1}}, {}, "5/l1", "is not trainable"),
        ({"fc": {"weight_decay": {"wait": 1}}}, {}, "5/weight_decay/wait", "weight, bias"),
        ({"fc": {"l1": {"*": 1.0, "bias": 2}}}, {}, "5/l1/bias", "not named before"),
        ({"fc": {"weight_decay": 0.1}}, {"optimizer": NONE}, "5/weight_decay", "knows none"),
        ({"fc": {"init": {"weight": {"type": "he_"}}}}, {}, "5/init/weight/type", "kaiming_"),
        ({"fc": {"init": {"weight": {"type": "constant_"}}}}, {}, "5/init/weight/args/val", "val"),
        ({"fc": {"init": {"bias": {"type": "xavier_normal_"}}}}, {}, "5/init/bias", "[10]"),
        (
            {"fc": {"init": {"bias": {"type": "normal_", "args": {"std": -1}}}}},
            {},
            "5/init/bias/args",
            "std",
        ),
        (
            {"fc": {"init": {"bias": {"type": "ones_", "args": {"tensor": 1}}}}},
            {},
            "5/init/bias/args/tensor",
            "no argument",
        ),
        ({"flat": {"output_grad_clip": 1.0, "stop_gradient": True}}, {}, "3/", "no gradient"),
    ],
)
def test_options_that_fit_nothing_are_refused(options, more, pointer, detail):
    found = errors(job(options, **more))
    where = next(item for item in found if item.startswith(AT + pointer))
    assert detail in found[where]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"lr_scale": 0.0}, "lr_scale"),
        ({"lr_scale": {}}, "lr_scale"),
        ({"lr_scale": {"weight": "2"}}, "lr_scale"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"trainable": 0}, "trainable"),
        ({"grad_clip": True}, "grad_clip"),
        ({"grad_clip": {"type": "value"}}, "grad_clip"),
        ({"output_grad_clip": {"min": 0.5, "max": 1.0}}, "output_grad_clip"),
        ({"output_grad_clip": {"min": 0, "max": 0}}, "output_grad_clip"),
        ({"output_grad_clip": -1.0}, "output_grad_clip"),
        ({"init": {"we ight": {"type": "ones_"}}}, "init"),
        ({"init": {"weight": {"type": "ones_", "kwargs": {}}}}, "init"),
    ],
)
def test_invalid_options_are_refused(options, where):
    found = errors(job({"fc": options}))
    assert all(item.startswith(f"{AT}5/{where}") for item in found), found


def test_a_layer_called_once_more_has_the_options_of_the_first():
    again = {"name": "fc2", "shared_with": "fc", "inputs": ["flat"]}
    layers = [*copy.deepcopy([*LAYERS.values()]), {**again, "lr_scale": 2.0}]
    found = errors(spec(network={"layers": layers}))
    assert "set lr_scale there" in next(iter(found.values()))
    layers[-1] = {**again, "stop_gradient": True, "type": "Linear"}
    layers[5]["lr_scale"] = 2.0
    spec_of = planned(spec(network={"layers": layers, "outputs": ["fc2"]}))["spec"]
    assert spec_of["network"]["layers"][-1].get("lr_scale") is None
    assert spec_of["network"]["layers"][-1]["stop_gradient"] is True


def test_l1_of_sparse_gradients_is_refused(digits):
    table = {
        "name": "table",
        "type": "Embedding",
        "args": {"embedding_dim": 10, "sparse": True},
        "inputs": ["label"],
    }
    whole = spec(
        network={"layers": [table]},
        loss={"type": "CrossEntropyLoss", "inputs": ["table", "label"]},
        optimizer={"type": "SGD", "args": {"lr": 0.1}, "l1": 0.1},
    )
    del whole["data"]["fields"]["image"]
    assert "/optimizer/l1" in errors(whole)
    whole["network"]["layers"][0]["l1"] = 0.0
    planned(whole)
    whole["optimizer"] = {"type": "SGD", "args": {"lr": 0.1, "weight_decay": 0.1}}
    assert "every row" in errors(whole)["/optimizer/args/weight_decay"]
    whole["network"]["layers"][0] |= {"weight_decay": 0.0, "l1": None}
    planned(whole)


def test_a_spec_without_options_is_written_without_them():
    assert set(planned(spec())["spec"]["network"]["layers"][0]) == {
        *("name", "shared_with", "type", "args", "inputs", "lengths")
    }
