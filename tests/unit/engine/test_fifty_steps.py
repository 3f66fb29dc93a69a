"""Every optimizer, scheduler, clip, average and metric: torch used by hand over fifty steps."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from engine.metrics.torch_metrics import metric_classes
from engine.optim.lr_schedulers import InverseTimeLR, scheduler_classes
from engine.optim.optimizers import optimizer_classes
from tests.unit.engine.runs import cnn, errors, losses, of_type, run, spec

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, of its own classes
NUM_STEPS = 50
NAMES = {"0": "conv1", "5": "fc"}
Hook = Callable[[nn.Module, torch.optim.Optimizer, int], Any]


def nothing(*_: Any) -> None:
    """Nothing is done."""


def by_hand(
    table: Path,
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    network: Callable[[], nn.Module] = cnn,
    clip: Callable[[list[nn.Parameter]], Any] = nothing,
    after: Hook = nothing,
    scores: Callable[[torch.Tensor, torch.Tensor], Any] = nothing,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain torch: losses and last weights."""
    images = torch.from_numpy(np.load(table / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(table / "train" / "1.npy"))
    torch.manual_seed(3)
    made = network()
    optimizer = make(made.parameters())
    told: list[float] = []
    for epoch in range(NUM_STEPS // 5):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(3 * 1_000_003 + epoch))
        for rows in order.split(64):
            given = made(images[rows].float() / 255)
            loss = nn.functional.cross_entropy(given, labels[rows])
            loss.backward()
            scores(given.detach(), labels[rows])
            clip([*made.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            after(made, optimizer, len(told))
            told.append(loss.item())
    state = {f"{NAMES.get(k[0], k[0])}{k[1:]}": v for k, v in made.state_dict().items()}
    return told, state


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def job(**changes: Any) -> dict[str, Any]:
    return spec(**{"stop": {"steps": NUM_STEPS}, **changes})


def check(directory: Path, records: Any, expected: Any, part: str = "model") -> None:
    """The same losses and weights, bit for bit."""
    told, weights = expected
    assert losses(records) == told
    found = load_file(directory / f"checkpoints/step-{NUM_STEPS}/{part}.safetensors")
    assert found.keys() == weights.keys()
    for name, item in weights.items():
        assert torch.equal(found[name], item), name


# --- optimizers -----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ASGD": ("ASGD", {"lr": 0.05, "lambd": 0.001, "t0": 10.0}),
    "Adadelta": ("Adadelta", {"lr": 1.0, "rho": 0.95}),
    "Adafactor": ("Adafactor", {"lr": 0.05}),
    "Adagrad": ("Adagrad", {"lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "Adam": ("Adam", {"lr": 0.01}),
    "Adam, amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    "Adam, fused": ("Adam", {"lr": 0.01, "fused": True}),
    "AdamW": ("AdamW", {"lr": 0.01, "betas": [0.8, 0.95]}),
    "Adamax": ("Adamax", {"lr": 0.01}),
    "NAdam": ("NAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.01}),
    "RAdam": ("RAdam", {"lr": 0.01}),
    "RMSprop": ("RMSprop", {"lr": 0.01}),
    "RMSprop, centred": ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Rprop": ("Rprop", {"lr": 0.01}),
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD, momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "SGD, nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD, foreach": ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": True}),
}


def test_no_optimizer_is_omitted():
    """Muon and SparseAdam take other parameters, and come below."""
    tried = {name for name, _ in OPTIMIZERS.values()} | {"Muon", "SparseAdam"}
    assert tried == set(optimizer_classes())
    torchs = {
        name
        for name, item in vars(torch.optim).items()
        if isinstance(item, type) and issubclass(item, torch.optim.Optimizer)
    }
    assert torchs - tried == {"Optimizer", "LBFGS"}
    assert "closure" in errors(spec(optimizer={"type": "LBFGS"}))["/optimizer/type"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.long
def test_each_optimizer_takes_the_steps_that_torch_takes(name, digits, tmp_path):
    kind, args = OPTIMIZERS[name]
    records = run(tmp_path, job(optimizer={"type": kind, "args": args}), digits)
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in args.items()}
    check(tmp_path, records, by_hand(digits, lambda p: getattr(torch.optim, kind)(p, **given)))


def test_muon_takes_the_steps_that_torch_takes_of_matrices(digits, tmp_path):
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10, "bias": False}},
    ]
    args = {"lr": 0.02, "momentum": 0.9}
    records = run(
        tmp_path, job(network={"layers": layers}, optimizer={"type": "Muon", "args": args}), digits
    )

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 10, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x.flatten(1))

    told, state = by_hand(digits, lambda p: torch.optim.Muon(p, **args), network=Flat)
    check(tmp_path, records, (told, state))


def test_sparse_adam_takes_the_steps_that_torch_takes(digits, tmp_path):
    args = {"num_embeddings": 10, "embedding_dim": 10, "sparse": True}
    layers = [{"name": "fc", "type": "Embedding", "args": args, "inputs": ["label"]}]
    optimizer = {"type": "SparseAdam", "args": {"lr": 0.05}}
    records = run(tmp_path, job(network={"layers": layers}, optimizer=optimizer), digits)
    labels = torch.from_numpy(np.load(digits / "train" / "1.npy"))
    torch.manual_seed(3)
    embedding = nn.Embedding(10, 10, sparse=True)
    made = torch.optim.SparseAdam(embedding.parameters(), lr=0.05)
    told: list[float] = []
    for epoch in range(NUM_STEPS // 5):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(3 * 1_000_003 + epoch))
        for rows in order.split(64):
            loss = nn.functional.cross_entropy(embedding(labels[rows]), labels[rows])
            loss.backward()
            made.step()
            made.zero_grad()
            told.append(loss.item())
    check(tmp_path, records, (told, {"fc.weight": embedding.weight.detach()}))


# --- schedulers -----------------------------------------------------------------------------------

WARM = {"type": "LinearLR", "args": {"start_factor": 0.1, "total_iters": 5}}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "ConstantLR": {"factor": 0.5, "total_iters": 7},
    "CosineAnnealingLR": {"T_max": 20, "eta_min": 0.001},
    "CosineAnnealingWarmRestarts": {"T_0": 7, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 6, "mode": "triangular2"},
    "ExponentialLR": {"gamma": 0.95},
    "InverseTimeLR": {"gamma": 0.1, "power": 0.5},
    "LinearLR": {"start_factor": 0.1, "total_iters": 10},
    "MultiStepLR": {"milestones": [5, 20, 21], "gamma": 0.5},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": NUM_STEPS + 1, "three_phase": True},
    "PolynomialLR": {"total_iters": 40, "power": 2.0},
    "StepLR": {"step_size": 9, "gamma": 0.3},
    "SWALR": {"swa_lr": 0.05, "anneal_epochs": 12, "anneal_strategy": "linear"},
    "SequentialLR": {
        "schedulers": [WARM, {"type": "CosineAnnealingLR", "args": {"T_max": 45}}],
        "milestones": [5],
    },
    "ChainedScheduler": {
        "schedulers": [WARM, {"type": "ExponentialLR", "args": {"gamma": 0.9}}],
    },
}


def test_no_scheduler_is_omitted():
    """ReduceLROnPlateau is judged by evaluations, and comes below."""
    assert {*SCHEDULERS, "ReduceLROnPlateau"} == set(scheduler_classes())


def schedule(name: str, optimizer: torch.optim.Optimizer) -> Any:
    linear = lr_scheduler.LinearLR
    match name:
        case "SequentialLR":
            both = [linear(optimizer, 0.1, total_iters=5)]
            both.append(lr_scheduler.CosineAnnealingLR(optimizer, T_max=45))  # pyright: ignore
            return lr_scheduler.SequentialLR(optimizer, both, milestones=[5])  # pyright: ignore
        case "ChainedScheduler":
            first = linear(optimizer, 0.1, total_iters=5)
            return lr_scheduler.ChainedScheduler(
                [first, lr_scheduler.ExponentialLR(optimizer, 0.9)]
            )
        case "InverseTimeLR":
            return InverseTimeLR(optimizer, **SCHEDULERS[name])
        case "SWALR":
            return SWALR(optimizer, **SCHEDULERS[name])
        case _:
            return getattr(lr_scheduler, name)(optimizer, **SCHEDULERS[name])


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.long
def test_each_scheduler_leads_to_the_weights_that_it_leads_to_in_torch(name, digits, tmp_path):
    made: list[Any] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        made.append(schedule(name, optimizer))
        return optimizer

    def after(_network: Any, optimizer: torch.optim.Optimizer, _step: int) -> None:
        made[0].step()

    records = run(tmp_path, job(scheduler={"type": name, "args": SCHEDULERS[name]}), digits)
    check(tmp_path, records, by_hand(digits, make, after=after))


def test_a_plateau_leads_to_the_weights_that_it_leads_to_in_torch(digits, tmp_path):
    args = {"patience": 0, "factor": 0.5, "threshold": 0.05}
    scheduler = {"type": "ReduceLROnPlateau", "metric": "validation/loss", "args": args}
    data = {"validation": {"dataset": "ds_1", "split": "test"}}
    whole = job(data=data, evaluate={"every_steps": 1}, scheduler=scheduler)
    records = run(tmp_path, whole, digits)
    judged = [
        r["values"]["validation/loss"]
        for r in of_type(records, "metrics")
        if "validation/loss" in r["values"]
    ]
    made: list[Any] = []

    def after(_network: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        if not made:
            made.append(lr_scheduler.ReduceLROnPlateau(optimizer, **args))
        made[0].step(judged[step])

    check(tmp_path, records, by_hand(digits, sgd, after=after))
    assert made[0].optimizer.param_groups[0]["lr"] < 0.1


# --- clips ----------------------------------------------------------------------------------------

CLIPS: dict[str, tuple[float, Callable[[list[nn.Parameter]], Any]]] = {
    "value": (0.002, lambda found: clip_grad_value_(found, 0.002)),
    "norm": (0.05, lambda found: [clip_grad_norm_([item], 0.05) for item in found]),
    "global_norm": (0.2, lambda found: clip_grad_norm_(found, 0.2)),
}


@pytest.mark.parametrize("name", CLIPS)
def test_each_clip_leads_to_the_weights_that_it_leads_to_in_torch(name, digits, tmp_path):
    most, clip = CLIPS[name]
    records = run(tmp_path, job(grad_clip={"type": name, "max": most}), digits)
    check(tmp_path, records, by_hand(digits, sgd, clip=clip))
    figures = [r["values"] for r in of_type(records, "metrics") if "loss" in r["values"]]
    assert figures[-1]["clipped_steps"] > NUM_STEPS / 2


# --- averages -------------------------------------------------------------------------------------

AVERAGES: dict[str, tuple[dict[str, Any], Any]] = {
    "ema": ({"type": "ema", "decay": 0.9}, get_ema_multi_avg_fn(0.9)),
    "ema, late": ({"type": "ema", "start_step": 20, "every_steps": 3}, get_ema_multi_avg_fn(0.999)),
    "swa": ({"type": "swa", "start_step": 10, "every_steps": 2}, None),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_each_average_is_that_of_torchs_averaged_model(name, digits, tmp_path):
    average, rule = AVERAGES[name]
    made: list[AveragedModel] = []
    start, every = average.get("start_step", 0), average.get("every_steps", 1)

    def after(network: nn.Module, _optimizer: object, step: int) -> None:
        if not made:
            made.append(AveragedModel(network, multi_avg_fn=rule))
        if step >= start and (step - start) % every == 0:
            made[0].update_parameters(network)

    records = run(tmp_path, job(average=average), digits)
    told, newest = by_hand(digits, sgd, after=after)
    check(tmp_path, records, (told, newest), "newest")
    found = load_file(tmp_path / f"checkpoints/step-{NUM_STEPS}/model.safetensors")
    for key, item in made[0].module.state_dict().items():
        torch.testing.assert_close(found[f"{NAMES[key[0]]}{key[1:]}"], item, rtol=1e-5, atol=1e-7)


def test_a_window_is_the_mean_of_the_newer_sum_and_the_last_full_one(digits, tmp_path):
    """PaddlePaddle's, which torch has not: at most 8 steps each, so 48 to 49 and 40 to 47."""
    window = {"average_window_rate": 1.0, "min_average_window": 8, "max_average_window": 8}
    seen: list[dict[str, torch.Tensor]] = []

    def after(network: nn.Module, _optimizer: object, _step: int) -> None:
        seen.append(deepcopy(network.state_dict()))

    run(tmp_path, job(average={"type": "window", **window}), digits)
    by_hand(digits, sgd, after=after)
    found = load_file(tmp_path / f"checkpoints/step-{NUM_STEPS}/model.safetensors")
    for key in seen[0]:
        mean = torch.stack([item[key] for item in seen[40:]]).mean(0)
        torch.testing.assert_close(found[f"{NAMES[key[0]]}{key[1:]}"], mean, rtol=1e-5, atol=1e-7)


# --- metrics --------------------------------------------------------------------------------------

SCALARS = [
    f"Multiclass{name}"
    for name in (
        *("Accuracy", "Precision", "Recall", "F1Score", "Specificity", "JaccardIndex"),
        *("CohenKappa", "MatthewsCorrCoef", "HammingDistance", "HingeLoss", "CalibrationError"),
        *("AUROC", "AveragePrecision"),
    )
]


@pytest.mark.long
def test_each_metric_of_a_batch_is_that_of_torchmetrics_at_every_step(digits, tmp_path):
    """All other classes: ``test_epoch_metrics.py``, over batches and over all rows."""
    metrics = [
        {"type": name, "args": {"num_classes": 10}, "inputs": ["fc", "label"], "every": 1}
        for name in SCALARS
    ]
    metrics.append({"type": "accuracy", "inputs": ["fc", "label"]})
    expected: list[dict[str, float]] = []

    def scores(given: torch.Tensor, labels: torch.Tensor) -> None:
        found = {"accuracy": float((given.argmax(1) == labels).float().mean())}
        for name in SCALARS:
            metric = metric_classes()[name](num_classes=10)
            metric.update(given, labels)
            found[name] = float(metric.compute())
        expected.append(found)

    records = run(tmp_path, job(metrics=metrics), digits)
    check(tmp_path, records, by_hand(digits, sgd, scores=scores))
    told = [r["values"] for r in of_type(records, "metrics") if "loss" in r["values"]]
    for found, wanted in zip(told, expected, strict=True):
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)
