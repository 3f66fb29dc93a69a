"""An optimizer for sparse gradients beside the one for all else: two of torch's, used by hand."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau

from engine.core.problems import SpecProblems
from engine.network.network import Network
from engine.optim.parameter_options import make_optimizer
from engine.plan.plan import parse_spec
from engine.training.settable import changed_job, settable
from tests.unit.engine.ragged import job, meta_of, write_ragged
from tests.unit.engine.runs import captured, errors, losses, of_type, planned, run

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's, once

WIDTH, NUM_ROWS, NUM_STEPS = 40, 31, 50
PLACES = [[(7 * row + 3 * k) % WIDTH for k in range(1 + row % 4)] for row in range(NUM_ROWS)]
PLACES = [[*dict.fromkeys(places)] for places in PLACES]
ROWS = [{"ones": places, "label": sum(places) % 2} for places in PLACES]
BAG = {
    "name": "bag",
    "type": "EmbeddingBag",
    "args": {"embedding_dim": 5, "mode": "sum", "sparse": True},
    "inputs": ["x"],
}
FC = {"name": "fc", "type": "Linear", "args": {"out_features": 2}}
ADAMW = {"type": "AdamW", "args": {"lr": 0.01}}
SPARSE: dict[str, dict[str, Any]] = {
    "SGD": {"type": "SGD", "args": {"lr": 0.3}},
    "momentum": {"type": "SGD", "args": {"lr": 0.1, "momentum": 0.9}},
    "nesterov": {"type": "SGD", "args": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "Adagrad": {"type": "Adagrad", "args": {"lr": 0.2}},
    "SparseAdam": {"type": "SparseAdam", "args": {"lr": 0.05}},
}
Pair = tuple[torch.optim.Optimizer, torch.optim.Optimizer]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_ragged(tmp_path_factory.mktemp("sparse"), ROWS)


def spec(sparse: str | None, dense: Any = ADAMW, **changes: Any) -> dict[str, Any]:
    network = changes.pop("network", [BAG, FC])
    optimizer = dense if sparse is None else {**dense, "sparse": SPARSE[sparse]}
    fields = {
        "x": {"type": "sparse_binary", "dim": WIDTH, "column": "ones"},
        "label": {"type": "integer", "dim": 2},
    }
    data = {"fields": fields, "batch_size": 4, **changes.pop("data", {})}
    whole = {"optimizer": optimizer, "stop": {"steps": NUM_STEPS}, **changes}
    return job(network, data=data, **whole)


def made(sparse: str, bag: nn.Module, fc: nn.Module) -> Pair:
    cls = getattr(torch.optim, SPARSE[sparse]["type"])
    dense = torch.optim.AdamW(fc.parameters(), lr=0.01)
    return dense, cls(bag.parameters(), **SPARSE[sparse]["args"])


def by_hand(
    sparse: str, num_steps: int = NUM_STEPS, after: Any = lambda *_: None, clip: float | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain torch with two optimizers; ``after`` sees them after each step."""
    torch.manual_seed(3)
    bag, fc = nn.EmbeddingBag(WIDTH, 5, mode="sum", sparse=True), nn.Linear(5, 2)
    both = made(sparse, bag, fc)
    labels = torch.tensor([row["label"] for row in ROWS])
    told: list[float] = []
    for epoch in range(num_steps):
        generator = torch.Generator().manual_seed(3 * 1_000_003 + epoch)
        for rows in torch.randperm(NUM_ROWS, generator=generator).split(4):
            if len(told) == num_steps:
                break
            read = [PLACES[row] for row in rows]
            ends = torch.tensor([0, *(len(item) for item in read[:-1])]).cumsum(0)
            flat = torch.tensor([place for item in read for place in item])
            loss = nn.functional.cross_entropy(fc(bag(flat, ends)), labels[rows])
            loss.backward()
            if sparse in ("momentum", "nesterov") or clip:  # each row once, as in a dense gradient
                bag.weight.grad = bag.weight.grad.coalesce()  # pyright: ignore
            if clip:
                norms = [
                    bag.weight.grad._values().norm(),
                    *(p.grad.norm() for p in fc.parameters()),
                ]  # pyright: ignore
                factor = min(1.0, clip / (float(torch.stack(norms).norm()) + 1e-6))
                for item in (*bag.parameters(), *fc.parameters()):
                    item.grad.mul_(factor)  # pyright: ignore
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
            after(both, len(told), loss.item())
            told.append(loss.item())
    return told, {"bag.weight": bag.weight.detach(), "fc.weight": fc.weight.detach()}


def weights(directory: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(directory / "checkpoints" / f"step-{step}" / "model.safetensors")


def check(directory: Path, records: Any, expected: Any, num_steps: int = NUM_STEPS) -> None:
    told, last = expected
    assert losses(records) == told
    kept = weights(directory, num_steps)
    assert all(torch.equal(kept[name], item) for name, item in last.items())


@pytest.mark.parametrize("sparse", SPARSE)
@pytest.mark.long
def test_fifty_steps_are_those_of_two_optimizers_by_hand_bit_for_bit(sparse, table, tmp_path):
    check(tmp_path, run(tmp_path, spec(sparse), table), by_hand(sparse))


@pytest.mark.parametrize("sparse", ["momentum", "nesterov"])
def test_sparse_momentum_is_the_momentum_of_dense_gradients(sparse, table, tmp_path):
    """Also where one optimizer has all: each row once, it is the dense sum bit for bit."""
    network = [{**BAG, "args": {**BAG["args"], "sparse": False}}, FC]
    told = [
        losses(run(tmp_path / name, spec(None, SPARSE[sparse], network=layers), table))
        for name, layers in (("sparse", [BAG, FC]), ("dense", network))
    ]
    assert told[0] == told[1]


def test_momentum_does_not_grow_with_the_steps(table):
    """torch's own has another row for each that a gradient has, at every step."""
    parsed: Any = parse_spec(planned(spec("momentum"), meta_of(table))["spec"])
    network = Network(parsed.network, ("fc",))
    optimizer = make_optimizer(parsed.optimizer, parsed.network, network)
    bag: Any = network.layers["bag"]
    for _ in range(30):
        bag(torch.randint(WIDTH, (8, 4))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = optimizer.state[bag.weight]["momentum_buffer"]
    assert kept._nnz() <= WIDTH


@pytest.mark.parametrize("sparse", SPARSE)
@pytest.mark.long
def test_a_run_that_continues_ends_bit_for_bit_as_one_that_never_stopped(sparse, table, tmp_path):
    whole = spec(sparse, checkpoint={"every_steps": 1, "keep_last": 3})
    whole["scheduler"] = {"type": "ExponentialLR", "args": {"gamma": 0.97}}
    records = run(tmp_path / "whole", whole, table)
    there = {"dir": str(tmp_path / "whole/checkpoints/step-23"), "step": 23}
    resumed = run(tmp_path / "rest", whole, table, resume=there)
    assert losses(resumed) == losses(records)[23:]
    for name in ("model", "optimizer"):
        one, other = (
            (tmp_path / item / f"checkpoints/step-50/{name}.safetensors").read_bytes()
            for item in ("whole", "rest")
        )
        assert one == other, name


def test_gradients_are_clipped_together(table, tmp_path):
    clip = {"type": "global_norm", "max": 0.05}
    records = run(tmp_path, spec("SparseAdam", grad_clip=clip, stop={"steps": 20}), table)
    expected, _ = by_hand("SparseAdam", 20, clip=0.05)
    assert losses(records) == pytest.approx(expected, rel=1e-5)


def test_watching_sees_both_and_changes_no_bit(table, tmp_path):
    kinds = ["param_grad", "update", "optim_state", "param"]
    probe = {"layers": ["*"], "kinds": kinds, "every": 1, "want": ["stats", "full"]}
    for sparse, states in (
        ("SparseAdam", ("step", "exp_avg", "exp_avg_sq")),
        ("Adagrad", ("sum",)),
    ):
        short = {"stop": {"steps": 6}}
        records = run(tmp_path / sparse, spec(sparse, probes=[probe], **short), table)
        check(tmp_path / sparse, records, by_hand(sparse, 6), 6)
        seen = captured(records, tmp_path / sparse)
        for key in states:
            assert (5, f"bag.weight.{key}", "optim_state") in seen
        assert (5, "fc.weight.exp_avg", "optim_state") in seen
        for name in ("bag.weight", "fc.weight"):
            moved = seen[3, name, "update"]
            torch.testing.assert_close(seen[4, name, "param"] - seen[3, name, "param"], moved)
            assert moved.any()


# --- rates ---------------------------------------------------------------------------------------


def rates(records: Any) -> list[tuple[float, float]]:
    found = [r["values"] for r in of_type(records, "metrics") if "lr" in r["values"]]
    return [(item["lr"], item["lr/sparse"]) for item in found]


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_moves_each_from_its_own_base(table, tmp_path):
    schedules: list[Any] = []

    def after(both: Pair, step: int, _loss: float) -> None:
        if not step:
            schedules.extend(ExponentialLR(item, 0.9) for item in both)
        for item in schedules:
            item.step()

    scheduler = {"type": "ExponentialLR", "args": {"gamma": 0.9}}
    records = run(tmp_path, spec("SparseAdam", scheduler=scheduler), table)
    check(tmp_path, records, by_hand("SparseAdam", after=after))
    assert rates(records)[:2] == [(0.01, 0.05), (0.9 * 0.01, 0.9 * 0.05)]


def test_one_cycle_keeps_the_ratio_of_the_two(table, tmp_path):
    scheduler = {"type": "OneCycleLR", "args": {"max_lr": 0.1}}
    records = run(tmp_path, spec("SparseAdam", scheduler=scheduler), table)
    tiny = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.01)
    schedule = OneCycleLR(tiny, 0.1, total_steps=NUM_STEPS)
    for dense, sparse in rates(records)[:-1]:
        assert dense == pytest.approx(tiny.param_groups[0]["lr"], rel=1e-12)
        assert sparse == pytest.approx(5 * dense, rel=1e-9)
        tiny.step()
        schedule.step()


def test_a_plateau_lowers_both(table, tmp_path):
    plateau = {"patience": 0, "factor": 0.5, "threshold": 0.3}
    changes = {
        "data": {"validation": {"dataset": "ds_1"}},
        "evaluate": {"every_steps": 1},
        "scheduler": {
            "type": "ReduceLROnPlateau", "metric": "validation/loss", "args": plateau,
        },
        "stop": {"steps": 12},
    }  # fmt: skip
    records = run(tmp_path, spec("Adagrad", **changes), table)
    judged = [
        r["values"]["validation/loss"]
        for r in of_type(records, "metrics")
        if "validation/loss" in r["values"]
    ]
    tiny = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule, factors = ReduceLROnPlateau(tiny, **plateau), []
    for loss in judged:
        factors.append(tiny.param_groups[0]["lr"])
        schedule.step(loss)
    expected = [(0.01 * f, 0.2 * f) for f in factors[:12]]
    assert [*chain(*rates(records))] == pytest.approx([*chain(*expected)])
    assert factors[-1] < 1


def test_averages_are_of_all_weights(table, tmp_path):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    run(tmp_path, spec("SparseAdam", average={"type": "ema", "decay": 0.9}), table)
    kept: list[Any] = []

    def after(both: Pair, _step: int, _loss: float) -> None:
        network = nn.ParameterList([both[1].param_groups[0]["params"][0]])
        if not kept:
            kept.append(AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        kept[0].update_parameters(network)

    by_hand("SparseAdam", after=after)
    (mean,) = kept[0].parameters()
    torch.testing.assert_close(weights(tmp_path, NUM_STEPS)["bag.weight"], mean.detach())


@pytest.mark.parametrize("schedule", [False, True])
def test_each_rate_is_set_by_its_own_path(schedule, table, tmp_path):
    order = {"id": "cmd_1", "by": None, "set": {"optimizer.sparse.lr": 0.5}}
    applied = order | {"step": 3, "old": {"optimizer.sparse.lr": 0.05}, "new": order["set"]}
    more = {"scheduler": {"type": "ExponentialLR", "args": {"gamma": 0.5}}} if schedule else {}
    whole = spec("SparseAdam", stop={"steps": 6}, **more)
    records = run(tmp_path, whole, table, commands=[applied])
    factors = [0.5**step if schedule else 1.0 for step in range(6)]
    expected = [(0.01 * f, (0.05 if n < 3 else 0.5) * f) for n, f in enumerate(factors)]
    assert [*chain(*rates(records))] == pytest.approx([*chain(*expected)])
    [told] = of_type(records, "command")
    assert (told["state"], told["old"]) == ("applied", {"optimizer.sparse.lr": 0.05})


def test_what_can_be_set_is_of_each(table):
    parsed: Any = parse_spec(planned(spec("SparseAdam"), meta_of(table))["spec"])
    found = settable(parsed)
    assert {"optimizer.weight_decay", "optimizer.sparse.lr", "optimizer.sparse.betas"} <= {*found}
    assert "optimizer.sparse.weight_decay" not in found
    changed = changed_job(parsed, {"optimizer.sparse.lr": 0.7, "optimizer.lr": 0.3})
    assert (changed.optimizer.args["lr"], changed.optimizer.of_sparse.args["lr"]) == (0.3, 0.7)
    alone: Any = parse_spec(planned(spec(None, SPARSE["SGD"]), meta_of(table))["spec"])
    for job_, path, value in ((parsed, "lr", -1.0), (parsed, "speed", 1.0), (alone, "lr", 0.1)):
        with pytest.raises(SpecProblems) as caught:
            changed_job(job_, {f"optimizer.sparse.{path}": value})
        assert caught.value.problems[0].pointer == f"/set/optimizer.sparse.{path}"


# --- what layers say, and what is refused ---------------------------------------------------------


def test_a_layer_scales_its_rate_and_the_others_decay(table, tmp_path):
    """Decay and l1 of the job are those of the dense parameters."""
    dense = {"type": "SGD", "args": {"lr": 0.1, "weight_decay": 0.01}, "l1": 0.001}
    network = [{**BAG, "lr_scale": 0.5}, FC]
    whole = spec("SGD", dense, network=network, stop={"steps": 10})
    scaled = losses(run(tmp_path / "a", whole, table))
    halved = {**dense, "sparse": {"type": "SGD", "args": {"lr": 0.15}}}
    assert scaled == losses(run(tmp_path / "b", spec(None, halved, stop={"steps": 10}), table))
    assert scaled != losses(run(tmp_path / "c", spec("SGD", dense, stop={"steps": 10}), table))


def refusals() -> list[Any]:
    dense_bag = {**BAG, "args": {**BAG["args"], "sparse": False}}
    frozen = {**BAG, "trainable": False}
    beside = {**ADAMW, "sparse": SPARSE["SparseAdam"]}
    return [
        ({**ADAMW, "sparse": {"type": "Adam"}}, [BAG, FC], "/optimizer/sparse/type", "SparseAdam"),
        ({**ADAMW, "sparse": {}}, [BAG, FC], "/optimizer/sparse/type", "this field is required"),
        ({**ADAMW, "sparse": {"type": "SGD", "l1": 1.0}}, [BAG, FC], "/optimizer/sparse/l1", ""),
        (
            {**ADAMW, "sparse": {"type": "SparseAdam", "args": {"lr": -1.0}}},
            [BAG, FC], "/optimizer/sparse/args/lr", "Invalid learning rate",
        ),
        (
            {**ADAMW, "sparse": {"type": "SparseAdam", "args": {"momentum": 0.5}}},
            [BAG, FC], "/optimizer/sparse/args/momentum", "no argument",
        ),
        (
            {**ADAMW, "sparse": {"type": "Adagrad", "args": {"weight_decay": 0.1}}},
            [BAG, FC], "/optimizer/sparse/args/weight_decay", "every row",
        ),
        (beside, [dense_bag, FC], "/optimizer/sparse", "leave it out"),
        (beside, [frozen, FC], "/optimizer/sparse", "leave it out"),
        (beside, [{**BAG, "name": "fc"}], "/optimizer/sparse", "the optimizer itself"),
        (beside, [{**BAG, "l1": 0.1}, FC], "/network/layers/0/l1", "every row"),
        (beside, [{**BAG, "weight_decay": 1.0}, FC], "/network/layers/0/weight_decay", "every row"),
        (ADAMW, [BAG, FC], "/optimizer", '"sparse": {"type": "SparseAdam"}'),
        (SPARSE["SparseAdam"], [BAG, FC], "/optimizer", '"sparse": {"type": "SparseAdam"}'),
    ]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "network", "pointer", "words"), refusals())
def test_an_invalid_option_is_refused_with_its_place(optimizer, network, pointer, words, table):
    found = errors(spec(None, optimizer, network=network), meta_of(table))
    assert words in found[pointer], found


def test_a_schedule_that_moves_a_momentum_needs_it_of_both(table):
    cycle = {"type": "OneCycleLR", "args": {"max_lr": 0.1}}
    assert "/scheduler/args" in errors(spec("Adagrad", scheduler=cycle), meta_of(table))


def test_a_checkpoint_of_one_optimizer_does_not_fit_two(table, tmp_path):
    run(tmp_path / "a", spec(None, SPARSE["SGD"], stop={"steps": 2}), table)
    there = {"dir": str(tmp_path / "a/checkpoints/step-2"), "step": 2}
    with pytest.raises(AssertionError, match="checkpoint_mismatch"):
        run(tmp_path / "b", spec("SGD", stop={"steps": 2}), table, resume=there)


def test_the_plan_counts_what_both_keep(table):
    found = planned(spec("SparseAdam"), meta_of(table))
    rows = {item["name"]: item["state_names"] for item in found["layers"]}
    assert rows["bag"] == ["step", "exp_avg", "exp_avg_sq"]
    dense, sparse = 2 * 4 * (5 * 2 + 2) + 2 * 4, 2 * 4 * 5 * WIDTH
    assert abs(found["memory"]["optimizer_state_bytes"] - dense - sparse) <= 16
