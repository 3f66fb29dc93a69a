"""Every loss of torch as a numerator and a denominator, over any batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.problems import SpecProblems
from engine.losses.loss_sums import StepPart, Term, total
from engine.losses.losses import Losses, build_loss, loss_classes, loss_of
from glasshouse.spec import Loss

NUM_ROWS = 83
ZERO_WEIGHT = [0.0, 5.0, 0.1, 1.0, 2.0, 0.3, 1.5]
Made = Callable[[torch.Generator], list[Tensor]]


def floats(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randn(NUM_ROWS, *shape, generator=g)


def shares(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.rand(NUM_ROWS, *shape, generator=g) * 0.98 + 0.01


def signs(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randint(2, (NUM_ROWS, *shape), generator=g).float() * 2 - 1


def classes(*shape: int, ignored: int = -100) -> Callable[[torch.Generator], Tensor]:
    """Of 7 classes; about two thirds of the targets are ignored, and all of the first rows."""

    def made(g: torch.Generator) -> Tensor:
        found = torch.randint(7, (NUM_ROWS, *shape), generator=g)
        found[torch.rand(found.shape, generator=g) < 0.66] = ignored
        found[:8] = ignored
        return found

    return made


def all_classes(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randint(7, (NUM_ROWS, *shape), generator=g)


def simplex(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randn(NUM_ROWS, *shape, generator=g).softmax(1)


def several(g: torch.Generator) -> Tensor:
    """Targets of MultiLabelMarginLoss: one to three classes, then -1."""
    found = torch.full((NUM_ROWS, 7), -1)
    for row in found:
        count = int(torch.randint(1, 4, (), generator=g))
        row[:count] = torch.randperm(7, generator=g)[:count]
    return found


def lengths_up_to(most: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randint(1, most + 1, (NUM_ROWS,), generator=g)


pytestmark = pytest.mark.filterwarnings("ignore:reduction:UserWarning")
CASES: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("L1Loss", {}, [floats(3), floats(3)]),
    ("MSELoss", {}, [floats(3, 2), floats(3, 2)]),
    ("SmoothL1Loss", {"beta": 0.5}, [floats(), floats()]),
    ("HuberLoss", {"delta": 0.5}, [floats(3), floats(3)]),
    ("BCELoss", {}, [shares(3), shares(3)]),
    ("BCELoss", {"weight": [1.0, 5.0, 0.1]}, [shares(3), shares(3)]),
    ("BCEWithLogitsLoss", {"pos_weight": [1.0, 5.0, 0.1]}, [floats(3), shares(3)]),
    ("CrossEntropyLoss", {}, [floats(7), all_classes()]),
    ("CrossEntropyLoss", {}, [floats(7), classes()]),
    ("CrossEntropyLoss", {"ignore_index": 3}, [floats(7), classes(ignored=3)]),
    ("CrossEntropyLoss", {"weight": ZERO_WEIGHT}, [floats(7), classes()]),
    ("CrossEntropyLoss", {"weight": ZERO_WEIGHT}, [floats(7, 5, 2), classes(5, 2)]),
    ("CrossEntropyLoss", {"label_smoothing": 0.1}, [floats(7), classes()]),
    (
        "CrossEntropyLoss",
        {"label_smoothing": 0.1, "weight": ZERO_WEIGHT},
        [floats(7, 5), classes(5)],
    ),
    ("CrossEntropyLoss", {}, [floats(7), simplex(7)]),
    ("CrossEntropyLoss", {"weight": ZERO_WEIGHT}, [floats(7, 5), simplex(7, 5)]),
    ("NLLLoss", {"weight": ZERO_WEIGHT, "ignore_index": 2}, [floats(7), classes(ignored=2)]),
    ("NLLLoss", {}, [floats(7, 5), classes(5)]),
    ("CosineEmbeddingLoss", {"margin": 0.1}, [floats(4), floats(4), signs()]),
    ("GaussianNLLLoss", {"full": True}, [floats(4), floats(4), shares(4)]),
    ("GaussianNLLLoss", {}, [floats(4), floats(4), shares(1)]),
    ("HingeEmbeddingLoss", {}, [floats(4), signs(4)]),
    ("KLDivLoss", {}, [floats(4), simplex(4)]),
    ("KLDivLoss", {"reduction": "batchmean"}, [floats(4), simplex(4)]),
    ("MarginRankingLoss", {"margin": 0.1}, [floats(), floats(), signs()]),
    ("MultiLabelMarginLoss", {}, [floats(7), several]),
    ("MultiLabelSoftMarginLoss", {"weight": ZERO_WEIGHT}, [floats(7), shares(7)]),
    ("MultiMarginLoss", {"weight": ZERO_WEIGHT}, [floats(7), all_classes()]),
    ("PoissonNLLLoss", {"full": True}, [floats(3), shares(3)]),
    ("SoftMarginLoss", {}, [floats(3), signs(3)]),
    ("TripletMarginLoss", {"swap": True}, [floats(5), floats(5), floats(5)]),
    ("TripletMarginWithDistanceLoss", {}, [floats(4, 5), floats(4, 5), floats(4, 5)]),
]
NAMES = [f"{number}-{case[0]}" for number, case in enumerate(CASES)]


def losses_of(kind: str, args: dict[str, Any], count: int, **more: Any) -> Losses:
    inputs = tuple(f"x{number}" for number in range(count))
    return Losses([Loss(type=kind, args=args, inputs=inputs, **more)])


def values_of(operands: list[Tensor], rows: Any = slice(None)) -> dict[str, Tensor]:
    return {f"x{number}": item[rows] for number, item in enumerate(operands)}


def over_batches(loss_fn: Losses, operands: list[Tensor], size: int) -> float:
    """As an evaluation computes it."""
    sums = [
        loss_fn.sums(values_of(operands, rows), len(rows))
        for rows in torch.arange(len(operands[0])).split(size)
    ]
    return loss_fn.figures(sum(sums[1:], sums[0]))["loss"]


def in_micro_batches(
    loss_fn: Losses, operands: list[Tensor], size: int, num_rows: int
) -> tuple[float, Tensor]:
    """As a step with ``accumulate`` has it: the loss, and the first operand's gradient."""
    x = operands[0].clone().requires_grad_()
    splits = torch.arange(num_rows).split(size)
    values = [values_of([x, *operands[1:]], rows) for rows in splits]
    owns = [
        tuple(
            term.denominator(given, len(rows))
            for term, given in loss_fn.split(loss_fn.operands(item))
        )
        for item, rows in zip(values, splits, strict=True)
    ]
    told = 0.0
    for item, own in zip(values, owns, strict=True):
        loss = loss_of(loss_fn, item, StepPart(own, total(owns))).total
        loss.backward()
        told += loss.item()
    assert x.grad is not None
    return told, x.grad


def test_every_loss_of_torch_is_shown_here_or_refused():
    shown = {kind for kind, _, _ in CASES} | {"CTCLoss"}
    assert {*loss_classes()} - shown <= {"LinearCrossEntropyLoss"}
    for name in {*loss_classes()} - shown:
        args = {"in_features": 3, "num_classes": 2}
        with pytest.raises(SpecProblems, match="parameters of its own"):
            build_loss(Loss(type=name, args=args, inputs=("x", "y")))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_loss_of_a_data_set_is_torchs_of_all_rows_whatever_the_batches(case):
    kind, args, makers = case
    generator = torch.Generator().manual_seed(7)
    operands = [make(generator) for make in makers]
    loss_fn = losses_of(kind, args, len(operands))
    doubled = [item.double() if item.is_floating_point() else item for item in operands]
    expected = build_loss(Loss(type=kind, args=args, inputs=("x",))).double()(*doubled).item()
    for size in (1, 4, 8, 16, 32, NUM_ROWS):
        assert over_batches(loss_fn, operands, size) == pytest.approx(expected, rel=1e-6), size


@pytest.mark.parametrize("reduction", ["sum", None])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_micro_batches_have_the_loss_and_the_gradients_of_the_large_batch(case, reduction):
    kind, args, makers = case
    args = args if reduction is None else {**args, "reduction": reduction}
    generator = torch.Generator().manual_seed(8)
    operands = [make(generator) for make in makers]
    x = operands[0].clone().requires_grad_()
    loss_fn = losses_of(kind, args, len(operands))
    whole = loss_fn(x, *operands[1:]).total
    whole.backward()
    assert x.grad is not None
    for size in (8, 16, 31):
        told, gradient = in_micro_batches(loss_fn, operands, size, NUM_ROWS)
        assert told == pytest.approx(whole.item(), rel=2e-6), size
        torch.testing.assert_close(gradient, x.grad, rtol=5e-6, atol=1e-9)


def test_a_whole_batch_is_torchs_own_loss_bit_for_bit():
    for kind, args, makers in CASES:
        generator = torch.Generator().manual_seed(9)
        operands = [make(generator) for make in makers]
        expected = build_loss(Loss(type=kind, args=args, inputs=("x",)))(*operands)
        found = loss_of(losses_of(kind, args, len(operands)), values_of(operands)).total
        assert torch.equal(found, expected), kind


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ctc_divides_each_row_by_its_own_length_and_then_by_the_rows(reduction):
    """Its scores have the rows on axis 1; a row's loss is divided by its target's length."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(12, NUM_ROWS, 5, generator=generator).log_softmax(2)
    target = torch.randint(1, 5, (NUM_ROWS, 4), generator=generator)
    lengths = torch.randint(1, 5, (NUM_ROWS,), generator=generator)
    steps = torch.full((NUM_ROWS,), 12)
    loss_fn = losses_of("CTCLoss", {"reduction": reduction}, 4)
    expected = F.ctc_loss(scores, target, steps, lengths, reduction=reduction).item()
    for size in (1, 4, 8, 32):
        sums = [
            loss_fn.sums(values_of([scores[:, r], target[r], steps[r], lengths[r]]), len(r))
            for r in torch.arange(NUM_ROWS).split(size)
        ]
        found = loss_fn.figures(sum(sums[1:], sums[0]))["loss"]
        assert found == pytest.approx(expected, rel=1e-6)
        parts = [
            loss_of(
                loss_fn,
                values_of([scores[:, r], target[r], steps[r], lengths[r]]),
                StepPart((float(len(r)),), (float(NUM_ROWS),)),
            ).total
            for r in torch.arange(NUM_ROWS).split(size)
        ]
        assert sum(parts).item() == pytest.approx(expected, rel=2e-6)


# --- sequences ---------------------------------------------------------------------------------

STEPWISE: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("MSELoss", {}, [floats(9, 2), floats(9, 2)]),
    ("L1Loss", {"reduction": "sum"}, [floats(9), floats(9)]),
    ("BCEWithLogitsLoss", {"weight": [2.0, 0.5]}, [floats(9, 2), shares(9, 2)]),
    ("KLDivLoss", {}, [floats(9, 4), simplex(9, 4)]),
    ("KLDivLoss", {"reduction": "batchmean"}, [floats(9, 4), simplex(9, 4)]),
    ("GaussianNLLLoss", {}, [floats(9, 2), floats(9, 2), shares(9, 1)]),
    ("GaussianNLLLoss", {}, [floats(9), floats(9), shares(1)]),
    ("TripletMarginLoss", {}, [floats(9, 5), floats(9, 5), floats(9, 5)]),
    ("CrossEntropyLoss", {}, [floats(7, 9), all_classes(9)]),
    ("CrossEntropyLoss", {"weight": ZERO_WEIGHT}, [floats(7, 9), classes(9, ignored=-100)]),
    ("NLLLoss", {"ignore_index": 0}, [floats(7, 9), all_classes(9)]),
]
STEP_NAMES = [f"{number}-{case[0]}" for number, case in enumerate(STEPWISE)]


def one_by_one(kind: str, args: dict[str, Any], operands: list[Tensor], lengths: Tensor) -> float:
    """A second path: each row alone without padding, their sums and what torch divides by."""
    criterion = build_loss(Loss(type=kind, args={**args, "reduction": "none"}, inputs=("x",)))
    above = below = 0.0
    for row, length in enumerate(lengths.tolist()):
        if not length:
            continue
        at_end = kind in ("CrossEntropyLoss", "NLLLoss")
        few = [
            item[row : row + 1, :, :length]
            if at_end and not number
            else item[row : row + 1, : length if item.shape[1] > 1 else 1]
            for number, item in enumerate(operands)
        ]
        each = criterion(*few).double()
        above += each.sum().item()
        if at_end:
            kept = few[1] != getattr(criterion, "ignore_index", -100)
            weight = getattr(criterion, "weight", None)
            below += float(kept.sum() if weight is None else weight[few[1][kept]].sum())
        else:
            below += each.numel()
    if args.get("reduction") == "sum":
        return above
    return above / (len(lengths) if args.get("reduction") == "batchmean" else below)


def padded(operands: list[Tensor], lengths: Tensor, rows: Tensor, kind: str) -> dict[str, Tensor]:
    """A batch cut to its longest row, with NaN and wild classes behind the ends."""
    longest = max(1, int(lengths[rows].max()))
    made: dict[str, Tensor] = {"seq.lengths": lengths[rows]}
    behind = torch.arange(longest) >= lengths[rows][:, None]
    for number, item in enumerate(operands):
        is_scores = kind in ("CrossEntropyLoss", "NLLLoss") and not number
        if is_scores:
            made[f"x{number}"] = item[rows][:, :, :longest]
            continue
        few = item[rows][:, : longest if item.shape[1] > 1 else 1].clone()
        if few.shape[1] == longest > 1:
            few[behind] = torch.nan if few.is_floating_point() else 1
        made[f"x{number}"] = few
    return made


@pytest.mark.parametrize("case", STEPWISE, ids=STEP_NAMES)
def test_what_is_behind_the_end_of_a_row_is_not_compared(case):
    kind, args, makers = case
    generator = torch.Generator().manual_seed(5)
    operands = [make(generator) for make in makers]
    lengths = torch.randint(0, 10, (NUM_ROWS,), generator=generator)
    lengths[:4] = 0
    loss_fn = losses_of(kind, args, len(operands), lengths="seq.lengths")
    expected = one_by_one(kind, args, operands, lengths)
    for size in (4, 8, 32, NUM_ROWS):
        batches = [padded(operands, lengths, r, kind) for r in torch.arange(NUM_ROWS).split(size)]
        sizes = [len(item["x0"]) for item in batches]
        sums = [loss_fn.sums(item, n) for item, n in zip(batches, sizes, strict=True)]
        found = loss_fn.figures(sum(sums[1:], sums[0]))["loss"]
        assert found == pytest.approx(expected, rel=1e-6), size
        owns = [
            tuple(
                term.denominator(given, n) for term, given in loss_fn.split(loss_fn.operands(item))
            )
            for item, n in zip(batches, sizes, strict=True)
        ]
        parts = [
            loss_of(loss_fn, item, StepPart(own, total(owns))).total
            for item, own in zip(batches, owns, strict=True)
        ]
        assert sum(parts).item() == pytest.approx(expected, rel=2e-6), size
    whole = padded(operands, lengths, torch.arange(NUM_ROWS), kind)
    assert loss_of(loss_fn, whole).total.item() == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("case", STEPWISE, ids=STEP_NAMES)
def test_each_row_has_the_mean_of_its_own_steps(case):
    kind, args, makers = case
    generator = torch.Generator().manual_seed(6)
    operands = [make(generator) for make in makers]
    lengths = torch.randint(0, 10, (NUM_ROWS,), generator=generator)
    loss_fn = losses_of(kind, args, len(operands), lengths="seq.lengths")
    rows = torch.arange(NUM_ROWS)
    given = loss_fn.operands(padded(operands, lengths, rows, kind))
    found = Term(loss_fn.criteria[0], has_lengths=True).of_rows(given)
    criterion = build_loss(Loss(type=kind, args={**args, "reduction": "none"}, inputs=("x",)))
    for row in range(NUM_ROWS):
        length = int(lengths[row])
        alone = padded(operands, lengths, torch.tensor([row]), kind)
        each = criterion(*(alone[f"x{number}"] for number in range(len(operands))))
        expected = each.mean() if length else torch.zeros(())
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-6)


def test_rows_of_one_length_are_torchs_loss_bit_for_bit():
    generator = torch.Generator().manual_seed(4)
    for kind, args, makers in STEPWISE:
        operands = [make(generator) for make in makers]
        loss_fn = losses_of(kind, args, len(operands), lengths="seq.lengths")
        values = values_of(operands) | {"seq.lengths": torch.full((NUM_ROWS,), 9)}
        expected = build_loss(Loss(type=kind, args=args, inputs=("x",)))
        if args.get("reduction") != "batchmean":  # a sum, divided by us
            assert torch.equal(loss_of(loss_fn, values).total, expected(*operands)), kind


# --- several, and nothing ------------------------------------------------------------------------


def test_several_losses_have_a_denominator_each():
    """The sum of two means is not a mean: the first ignores most of the first rows."""
    generator = torch.Generator().manual_seed(2)
    scores, target = floats(7)(generator), classes()(generator)
    other = floats(3)(generator)
    specs = [
        Loss(type="CrossEntropyLoss", inputs=("x0", "x1"), weight=2.0),
        Loss(type="MSELoss", inputs=("x2", "x3")),
        Loss(type="L1Loss", args={"reduction": "sum"}, inputs=("x2", "x3"), weight=0.01),
    ]
    loss_fn = Losses(specs, ("a", "b", "c"))
    x = scores.clone().requires_grad_()
    y = other.clone().requires_grad_()
    zeros = torch.zeros_like(other)
    whole = loss_fn(x, target, y, zeros, y, zeros)
    whole.total.backward()
    operands = [scores, target, other, zeros]
    for size in (8, 20):
        assert over_batches(loss_fn, operands, size) == pytest.approx(whole.total.item(), rel=1e-6)
        again = [item.clone().requires_grad_(item.is_floating_point()) for item in operands]
        splits = torch.arange(NUM_ROWS).split(size)
        owns = [
            tuple(
                term.denominator(given, len(rows))
                for term, given in loss_fn.split(loss_fn.operands(values_of(again, rows)))
            )
            for rows in splits
        ]
        found = [
            loss_of(loss_fn, values_of(again, rows), StepPart(own, total(owns)))
            for rows, own in zip(splits, owns, strict=True)
        ]
        sum(item.total for item in found).backward()
        torch.testing.assert_close(again[0].grad, x.grad, rtol=5e-6, atol=1e-9)
        torch.testing.assert_close(again[2].grad, y.grad, rtol=5e-6, atol=1e-9)
        for name, expected in whole.terms.items():
            told = sum(item.terms[name] for item in found)
            torch.testing.assert_close(told, expected, rtol=2e-6, atol=0)


def test_where_nothing_is_compared_the_loss_is_torchs_nan_and_no_gradient_is():
    scores, target = torch.randn(6, 7), torch.full((6,), -100)
    loss_fn = losses_of("CrossEntropyLoss", {}, 2)
    assert F.cross_entropy(scores, target).isnan()
    assert over_batches(loss_fn, [scores, target], 2) != over_batches(loss_fn, [scores, target], 2)
    told, gradient = in_micro_batches(loss_fn, [scores, target], 2, 6)
    assert told != told  # noqa: PLR0124 - NaN
    assert torch.equal(gradient, torch.zeros_like(scores))


ARGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "weights": {"weight": torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0])},
    "ignored": {"ignore_index": 2},
    "smooth": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 2)])
@pytest.mark.parametrize(
    ("name", "is_of_classes"),
    [*((name, True) for name in ARGS), *((name, False) for name in ARGS if name != "ignored")],
)
def test_scores_with_the_classes_last_in_memory_are_compared_as_flat_rows(
    name: str, shape: tuple[int, ...], is_of_classes: bool
):
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(*shape, 5, generator=generator, requires_grad=True)
    scores = memory.movedim(-1, 1)
    target = torch.randint(5, shape, generator=generator)
    if not is_of_classes:
        target = torch.rand(scores.shape, generator=generator).softmax(1)
    criterion = torch.nn.CrossEntropyLoss(**ARGS[name])
    seen: list[torch.Size] = []
    criterion.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    found = Term(criterion).value([scores, target])
    assert seen == [(memory[..., 0].numel(), 5)]
    expected = F.cross_entropy(scores, target, **ARGS[name])
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    (mine,) = torch.autograd.grad(found, memory)
    (theirs,) = torch.autograd.grad(expected, memory)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("target", [torch.zeros(6, 4), torch.zeros(24), torch.zeros(4)])
def test_targets_of_another_shape_are_not_made_to_fit(target: Tensor):
    scores = torch.randn(4, 6, 5).movedim(-1, 1)
    with pytest.raises((RuntimeError, ValueError)):
        Term(torch.nn.CrossEntropyLoss()).value([scores, target.long()])
