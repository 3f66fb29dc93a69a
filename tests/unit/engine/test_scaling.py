"""float16: the steps of torch.autocast and torch.amp.GradScaler by hand, overflows among them."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ExponentialLR

from engine.core.spool import read_frames
from engine.process import rank
from tests.unit.engine.runs import (
    CNN,
    captured,
    cnn,
    errors,
    losses,
    of_type,
    planned,
    run,
    spec,
    write_job,
)

NUM_STEPS = 50
RULES = {"init_scale": 2.0**20, "growth_interval": 4}
"""So that it overflows every few steps."""
LOW: dict[str, Any] = {"precision": "float16", "grad_scaler": RULES}
Hook = Callable[[nn.Sequential, torch.amp.GradScaler], Any]


def by_hand(
    table: Path,
    num_steps: int = NUM_STEPS,
    *,
    clip: float | None = None,
    parts: int = 1,
    forward: Callable[..., torch.Tensor] = lambda network, x: network(x),
    unscaled: Hook = lambda *_: None,
    after: Callable[[torch.optim.Optimizer, torch.amp.GradScaler], Any] = lambda *_: None,
) -> tuple[list[float], list[float], nn.Sequential]:
    """Losses, scales and the network; ``parts``: batches that make a step."""
    images = torch.from_numpy(np.load(table / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(table / "train" / "1.npy"))
    torch.manual_seed(3)
    network = cnn()
    optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9)
    scaler = torch.amp.GradScaler("cpu", **RULES)
    told: list[float] = []
    scales: list[float] = []
    for epoch in range(num_steps):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(3 * 1_000_003 + epoch))
        for rows in order.split(64):
            if len(told) == num_steps:
                break
            terms: list[torch.Tensor] = []
            for some in rows.split(64 // parts):
                with torch.autocast("cpu", dtype=torch.float16):
                    scores = forward(network, images[some].float() / 255)
                assert scores.dtype == torch.float16
                loss = nn.functional.cross_entropy(scores.float(), labels[some])
                if parts > 1:
                    loss = loss * (len(some) / len(rows))
                scaler.scale(loss).backward()
                terms.append(loss.detach())
            scaler.unscale_(optimizer)
            unscaled(network, scaler)
            if clip is not None:
                clip_grad_norm_(network.parameters(), clip)
            scales.append(scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after(optimizer, scaler)
            told.append(float(sum(terms[1:], terms[0])))
    return told, scales, network


def metrics(records: Any, name: str) -> list[float]:
    found = [r["values"] for r in of_type(records, "metrics") if "loss" in r["values"]]
    return [item[name] for item in found if name in item]


def check(directory: Path, records: Any, expected: Any) -> None:
    told, scales, network = expected
    assert losses(records) == told
    assert metrics(records, "loss_scale") == scales
    fell = [b < a for a, b in pairwise(scales)]
    assert metrics(records, "overflowed_steps")[:-1] == np.cumsum(fell).tolist()
    kept = load_file(directory / f"checkpoints/step-{len(told)}/model.safetensors")
    for name, place in (("conv1", 0), ("fc", 5)):
        for key, item in network[place].named_parameters():
            assert torch.equal(kept[f"{name}.{key}"], item), name


def test_fifty_steps_are_those_of_a_grad_scaler_by_hand_bit_for_bit(digits, tmp_path):
    records = run(tmp_path, spec(**LOW, stop={"steps": NUM_STEPS}), digits)
    expected = by_hand(digits)
    check(tmp_path, records, expected)
    scales = expected[1]
    assert max(scales) > 2 * min(scales)
    assert metrics(records, "overflowed_steps")[-1] >= 3  # else nothing was scaled back
    assert not of_type(records, "finding")


def test_gradients_are_clipped_as_they_are_without_the_scale(digits, tmp_path):
    clip = {"type": "global_norm", "max": 0.5}
    records = run(tmp_path, spec(**LOW, grad_clip=clip, stop={"steps": 20}), digits)
    check(tmp_path, records, by_hand(digits, 20, clip=0.5))


def test_batches_that_make_a_step_have_one_scale_and_one_update(digits, tmp_path):
    data = {"batch_size": 16}
    records = run(tmp_path, spec(**LOW, data=data, accumulate=4, stop={"steps": 20}), digits)
    check(tmp_path, records, by_hand(digits, 20, parts=4))


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_stays_where_it_is_at_steps_that_overflow(digits, tmp_path):
    made: list[Any] = []
    scales: list[float] = []

    def after(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        if not made:
            made.append(ExponentialLR(optimizer, 0.95))
            scales.append(RULES["init_scale"])
        if scaler.get_scale() >= scales[-1]:
            made[0].step()
        scales.append(scaler.get_scale())

    scheduler = {"type": "ExponentialLR", "args": {"gamma": 0.95}}
    records = run(tmp_path, spec(**LOW, scheduler=scheduler, stop={"steps": 20}), digits)
    check(tmp_path, records, by_hand(digits, 20, after=after))
    assert metrics(records, "overflowed_steps")[-1] > 0


ALWAYS: dict[str, Any] = {"max_overhead": None}
KINDS = ["output_grad", "param_grad", "update", "param"]


def test_what_is_watched_is_without_the_scale_and_changes_no_bit(digits, tmp_path):
    """Of parameters it is that of the scaler, bit for bit; a step that overflows moves none."""
    seen: list[dict[str, torch.Tensor]] = []
    by_output: list[torch.Tensor] = []

    def forward(network: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        scores = network(x)
        scores.register_hook(lambda item: by_output.append(item.clone()))
        return scores

    def unscaled(network: nn.Sequential, scaler: torch.amp.GradScaler) -> None:
        seen.append({k: v.grad.clone() for k, v in network.named_parameters()})  # pyright: ignore
        by_output[-1] = by_output[-1].float() / scaler.get_scale()

    probe = {
        "layers": ["fc", "conv1"],
        "kinds": KINDS,
        "every": 1,
        "want": ["stats", "full"],
    } | ALWAYS
    metric = {"type": "l2", "inputs": ["fc/output_grad"]}
    whole = spec(**LOW, probes=[probe], metrics=[metric], stop={"steps": 20})
    records = run(tmp_path, whole, digits)
    expected = by_hand(digits, 20, forward=forward, unscaled=unscaled)
    check(tmp_path, records, expected)
    found = captured(records, tmp_path)
    for step in range(20):
        assert torch.equal(found[step, "fc.weight", "param_grad"], seen[step]["5.weight"])
        shown = found[step, "fc", "output_grad"]
        assert shown.dtype == torch.float32
        assert torch.equal(shown, by_output[step])
        assert metrics(records, "l2(fc/output_grad)")[step] == pytest.approx(
            float(shown.double().norm()), rel=1e-5
        )
    overflowed = np.diff([0, *metrics(records, "overflowed_steps")]) > 0
    assert overflowed.any()
    for step, has_overflowed in enumerate(overflowed):
        moved = found[step, "fc.weight", "update"]
        assert bool(moved.any()) != has_overflowed
        finite = all(torch.isfinite(item).all() for item in seen[step].values())
        assert finite != has_overflowed


def test_an_output_s_gradient_is_clipped_at_limits_that_are_scaled(digits, tmp_path):
    limit, scales = 0.003, [RULES["init_scale"]]

    def forward(network: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        scores = network(x)
        scores.register_hook(lambda item: item.clamp(-limit * scales[-1], limit * scales[-1]))
        return scores

    def after(_optimizer: object, _scaler: object) -> None:
        scales.append(scaler[0].get_scale())

    scaler: list[torch.amp.GradScaler] = []
    layers = [*CNN[:-1], {**CNN[-1], "output_grad_clip": limit}]
    records = run(tmp_path, spec(**LOW, network={"layers": layers}, stop={"steps": 20}), digits)
    keep: Hook = lambda _network, made: scaler.append(made) if not scaler else None  # noqa: E731
    check(tmp_path, records, by_hand(digits, 20, forward=forward, unscaled=keep, after=after))
    assert all(metrics(records, "output_grad_clip/fc"))


def test_a_pair_of_optimizers_leaves_out_both_updates_or_none(digits, tmp_path):
    """Sparse gradients are unscaled too."""
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "ids", "type": "gt", "args": {"other": 0.5}},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}, "inputs": ["flat"]},
        {
            "name": "emb",
            "type": "Embedding",
            "args": {"num_embeddings": 10, "embedding_dim": 10, "sparse": True},
            "inputs": ["label"],
        },
        {"name": "both", "type": "add", "inputs": ["fc", "emb"]},
    ]
    del layers[1]
    adam = {"type": "Adam", "args": {"lr": 0.01}, "sparse": {"type": "SGD", "args": {"lr": 0.1}}}
    probe = {"layers": ["*.weight"], "kinds": ["update"], "every": 1, "want": ["full"]} | ALWAYS
    whole = spec(
        network={"layers": layers},
        loss={"type": "CrossEntropyLoss", "inputs": ["both", "label"]},
        optimizer=adam,
        probes=[probe],
        stop={"steps": 20},
    )
    records = run(tmp_path / "low", whole | LOW, digits)
    exact = losses(run(tmp_path / "exact", whole, digits))
    overflowed = np.diff([0, *metrics(records, "overflowed_steps")]) > 0
    assert 0 < overflowed.sum() < 10
    for step, has_overflowed in enumerate(overflowed):
        for name in ("fc.weight", "emb.weight"):
            moved = captured(records, tmp_path / "low")[step, name, "update"]
            assert bool(moved.any()) != has_overflowed
    assert losses(records)[-1] < losses(records)[0]
    assert losses(records)[0] == pytest.approx(exact[0], rel=0.01)


def test_a_fused_optimizer_that_overflows_at_its_first_step_keeps_no_nonsense(digits, tmp_path):
    """torch's fused SGD would begin with a momentum that it has not computed."""
    fast = {"type": "SGD", "args": {"lr": 0.1, "momentum": 0.9, "fused": True}}
    high = {"precision": "float16", "grad_scaler": {"init_scale": 2.0**25, "growth_interval": 4}}
    found, plain = (
        run(tmp_path / name, spec(**high, stop={"steps": 20}, **more), digits)
        for name, more in (("fused", {"optimizer": fast}), ("plain", {}))
    )
    assert metrics(found, "overflowed_steps")[0] == 1
    assert metrics(found, "loss_scale") == metrics(plain, "loss_scale")
    assert losses(found) == pytest.approx(losses(plain), rel=1e-3)


# --- what watches over it -------------------------------------------------------------------------


def failed(directory: Path, job: dict[str, Any], table: Path) -> tuple[dict[str, Any], Any]:
    assert rank.main(write_job(directory, planned(job)["spec"], table)) == 0
    records, _ = read_frames(directory / "spool", 0, 10**6)
    assert records[-1]["state"] == "failed", records[-1]
    return records[-1]["error"], records


@pytest.mark.parametrize("action", ["fail", "skip_step", "warn"])
def test_an_overflow_is_no_finding(action, digits, tmp_path):
    guards = {"nonfinite": {"action": action}}
    records = run(tmp_path, spec(**LOW, guards=guards, stop={"steps": NUM_STEPS}), digits)
    assert losses(records) == by_hand(digits)[0]
    assert not of_type(records, "finding")
    assert "skipped_steps" not in {k for r in of_type(records, "metrics") for k in r["values"]}


@pytest.mark.parametrize("action", ["fail", "skip_step", "warn"])
def test_a_scale_that_has_fallen_too_far_ends_the_job(action, digits, tmp_path, capfd):
    loss = {"type": "CrossEntropyLoss", "inputs": ["fc", "label"], "weight": 1e30}
    guards = {"nonfinite": {"action": action}}
    whole = spec(precision="float16", loss=loss, guards=guards, stop={"steps": 100})
    error, records = failed(tmp_path, whole, digits)
    assert error["code"] == "non_finite"
    assert "loss scale has fallen below 0.0001" in error["message"]
    assert error["layer"] == "fc"
    scales = metrics(records, "loss_scale")
    assert scales == [2.0 ** (16 - step) for step in range(len(scales))]
    assert error["step"] == 30  # 2**16 * 0.5**30 is the first below it
    capfd.readouterr()


def test_a_loss_that_is_nan_or_inf_fails_the_job_as_ever(digits, tmp_path, capfd):
    whole = spec(
        **LOW,
        optimizer={"type": "SGD", "args": {"lr": 1e30}},
        guards={"nonfinite": {"action": "fail"}},
        stop={"steps": 20},
    )
    error, _ = failed(tmp_path, whole, digits)
    assert error["code"] == "non_finite"
    assert "the loss" in error["message"]
    capfd.readouterr()


def test_a_job_that_continues_from_another_takes_its_scale_along(digits, tmp_path):
    job = spec(**LOW, checkpoint={"every_steps": 1})
    whole = run(tmp_path / "a", job, digits)
    there = {"dir": str(tmp_path / "a/checkpoints/step-4")}
    init = {"checkpoint": "ckpt_x", "load": "all"}
    more = {"checkpoint": there, "trained_by": planned(spec())["spec"]}
    rest = run(tmp_path / "b", job | {"init": init}, digits, **more)
    assert metrics(rest, "loss_scale") == metrics(whole, "loss_scale")[4:]
    assert losses(rest) == losses(whole)[4:]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "TransformerEncoderLayer"])
@pytest.mark.long
def test_layers_that_go_over_steps_learn(kind, digits, tmp_path):
    args = {"hidden_size": 24} if kind != "TransformerEncoderLayer" else {"nhead": 2}
    layers = [
        {"name": "rows", "type": "reshape", "args": {"shape": [-1, 8, 8]}, "inputs": ["image"]},
        {"name": "wide", "type": "Linear", "args": {"out_features": 12}},
        {"name": "steps", "type": kind, "args": {**args, "batch_first": True}},
        {
            "name": "last",
            "type": "select",
            "args": {"dim": 1, "index": -1},
            "inputs": ["steps.0" if "hidden_size" in args else "steps"],
        },
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    adam = {"type": "Adam", "args": {"lr": 0.01}}
    whole = spec(network={"layers": layers}, optimizer=adam, stop={"epochs": 4})
    low, high = (
        losses(run(tmp_path / name, whole | {"precision": name}, digits))
        for name in ("float16", "float32")
    )
    assert low != high
    assert low[-1] == pytest.approx(high[-1], rel=0.1)


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"grad_scaler": {}}, "/grad_scaler"),
        ({"grad_scaler": RULES, "precision": "bfloat16"}, "/grad_scaler"),
        ({**LOW, "grad_scaler": {"growth_factor": 1.0}}, "/grad_scaler/growth_factor"),
        ({**LOW, "grad_scaler": {"backoff_factor": 1.0}}, "/grad_scaler/backoff_factor"),
        ({**LOW, "grad_scaler": {"growth_interval": 0}}, "/grad_scaler/growth_interval"),
        ({**LOW, "grad_scaler": {"init_scale": 0.0}}, "/grad_scaler/init_scale"),
        ({**LOW, "grad_scaler": {"enabled": False}}, "/grad_scaler/enabled"),
        ({"precision": "float8"}, "/precision"),
    ],
)
def test_an_invalid_scaler_is_refused(changes, pointer):
    assert list(errors(spec(**changes))) == [pointer]


def test_the_scale_is_a_part_of_the_checkpoint(digits, tmp_path):
    records = run(tmp_path, spec(**LOW, stop={"steps": 9}), digits)
    state = json.loads((tmp_path / "checkpoints/step-9/state.json").read_text())
    kept = state["parts"]["scaler"]
    assert kept["overflowed"] == metrics(records, "overflowed_steps")[-1]
    assert kept["scale"] == by_hand(digits, 10)[1][9]
