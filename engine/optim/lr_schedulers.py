"""Build learning-rate schedulers from torch's names and arguments, and step them.

torch's own objects do the counting. A scheduler is stepped one unit at a time: after an update,
after an epoch, or once for each row trained on (about 2 µs each).
"""

import contextlib
import json
import math
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, cast

import pydantic
import torch
from pydantic import Field as Constraint
from pydantic import TypeAdapter
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from engine.core import arguments
from engine.core.problems import Findings, one
from engine.core.snapshot import State
from engine.optim.dense_and_sparse import DenseAndSparse
from engine.optim.optimizers import build_optimizer, class_of
from engine.optim.parameter_options import scales, set_arguments
from glasshouse import jsonio
from glasshouse.errors import CheckpointMismatch
from glasshouse.spec import Args, Optimizer, Scheduler, Spec
from glasshouse.spec.error_messages import said
from glasshouse.spec.strict import TorchName

_REFUSED = dict.fromkeys(
    ("LambdaLR", "MultiplicativeLR"),
    "it takes functions, which JSON has not; SequentialLR of others gives most of what they do",
)
_OF_OTHERS = ("SequentialLR", "ChainedScheduler")
PLATEAU = "ReduceLROnPlateau"
_OWN_RATE = ("OneCycleLR", "CyclicLR")
"""These compute the learning rate from their own arguments alone."""
_CYCLED = ("lr", "momentum", "betas")
"""The arguments of the optimizer that they set."""
_RATES = ("max_lr", "base_lr", "swa_lr")
"""Arguments that are learning rates. Each may be a list with one for each parameter group."""
_SMALLEST_BASE = 1e-100
"""A schedule that starts from a smaller rate cannot be scaled: dividing by it overflows."""
_LENGTH = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps"}
"""The argument that defaults to the length of the training."""


class ParameterGroup(Spec):
    """A scheduler within another one."""

    type: TorchName
    args: Args = Constraint(default={})


_MEMBERS = TypeAdapter(Annotated[list[ParameterGroup], Constraint(min_length=1, max_length=20)])


class InverseTimeLR(lr_scheduler.LRScheduler):
    """Learning rate / (1 + gamma * n)^power after n units: PaddlePaddle's ``poly``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gamma: float,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        if gamma < 0:
            raise ValueError(f"gamma must not be negative, and is {gamma}")
        self.gamma = gamma
        self.power = power
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each parameter group."""
        factor = (1 + self.gamma * self.last_epoch) ** -self.power
        return [base * factor for base in self.base_lrs]


Torch = Any  # an LRScheduler, or ReduceLROnPlateau, a subclass whose step() has other arguments


@cache
def scheduler_classes() -> dict[str, type[Any]]:
    """Return every scheduler of torch that JSON can describe, by name."""
    found = {
        name: item
        for name, item in vars(lr_scheduler).items()
        if isinstance(item, type)
        and issubclass(item, lr_scheduler.LRScheduler)
        and item is not lr_scheduler.LRScheduler
        and not item.__name__.startswith("_")
    }
    found |= {"SWALR": swa_utils.SWALR, "InverseTimeLR": InverseTimeLR}
    return {name: found[name] for name in sorted(found) if name not in _REFUSED}


def scheduler_parameters(name: str) -> dict[str, arguments.Parameter]:
    """Return the arguments of a scheduler that a spec may set. Nested schedulers are a list."""
    known = arguments.parameters(scheduler_classes()[name])
    left_out = {"optimizer", "last_epoch", "epochs", "steps_per_epoch"}
    found = {key: item for key, item in known.items() if key not in left_out}
    if "schedulers" in found:
        found["schedulers"] = replace(found["schedulers"], kinds=frozenset({"array"}))
    return found


# --- building from a spec --------------------------------------------------------------------


def resolved(spec: Scheduler, length: int | None) -> Scheduler:
    """Return the spec with unset lengths derived from the training's length (None: unknown).

    Raises:
        SpecProblems: torch has no such scheduler, or a length is neither set nor known.
    """
    args = _filled(spec.type, dict(spec.args), length, "/scheduler")
    return spec.model_copy(update={"args": args})


def _filled(name: str, args: dict[str, Any], length: int | None, pointer: str) -> dict[str, Any]:
    _class_of(name, f"{pointer}/type")
    wanted = _LENGTH.get(name)
    if wanted is not None and args.get(wanted) is None:
        if length is None:
            detail = f"{name} needs {wanted}: the length of this training is not known beforehand"
            raise one(f"{pointer}/args/{wanted}", detail, "missing")
        if length < 1:
            detail = f"{name} needs {wanted}: by the milestones it begins when the training has"
            detail += f" ended: lower the milestones, train longer, or set {wanted}"
            raise one(f"{pointer}/args/{wanted}", detail, "missing")
        return args | {wanted: length}
    if name in _OF_OTHERS:
        members = _members(args, pointer)
        lengths = _lengths(name, args, len(members), length)
        filled = [
            _filled(member.type, member.args, part, f"{pointer}/args/schedulers/{number}")
            for number, (member, part) in enumerate(zip(members, lengths, strict=True))
        ]
        specs = [
            {"type": member.type, "args": inner}
            for member, inner in zip(members, filled, strict=True)
        ]
        return args | {"schedulers": specs}
    return args


def _lengths(name: str, args: Args, count: int, length: int | None) -> list[int | None]:
    """Return for how many units each of several schedulers is active; None: unknown."""
    milestones: Any = args.get("milestones") or ()
    inner = [item for item in milestones if isinstance(item, int)]
    if name != "SequentialLR" or len(inner) != count - 1:  # torch itself refuses the latter
        return [length] * count
    parts = zip([0, *inner], [*inner, length], strict=True)
    return [None if end is None else end - start for start, end in parts]


def _members(args: Mapping[str, Any], pointer: str) -> list[ParameterGroup]:
    """Return the schedulers nested in one.

    Raises:
        SpecProblems: they are not a valid list, or one of them cannot be combined with others.
    """
    where = f"{pointer}/args/schedulers"
    try:
        members = _MEMBERS.validate_json(json.dumps(args.get("schedulers")))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"/{part}" for part in first["loc"])
        detail = f'a list of 1 to 20 {{"type", "args"}}: {said(first, ParameterGroup)}'
        raise one(where + place, detail, first["type"]) from None
    for number, member in enumerate(members):
        if member.type in (PLATEAU, *_OWN_RATE):
            detail = f"{member.type} cannot be one of several"
            raise one(f"{where}/{number}/type", detail, "unsupported")
    return members


def _class_of(name: str, pointer: str) -> type[Any]:
    return class_of(name, scheduler_classes(), _REFUSED, pointer, "torch has no scheduler")


def build_scheduler(
    name: str,
    args: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    pointer: str = "/scheduler",
) -> Torch:
    """Create a scheduler from resolved arguments. It sets the optimizer's initial learning rate.

    Raises:
        SpecProblems: torch has no such scheduler, or it refuses its arguments or the optimizer.
    """
    cls = _class_of(name, f"{pointer}/type")
    known = scheduler_parameters(name)
    given = {key: value for key, value in args.items() if key != "schedulers"}
    checked = arguments.check(known, given, f"{pointer}/args", name)
    for missing in arguments.missing(known, dict(args)):
        raise one(f"{pointer}/args/{missing}", f"{name} needs the argument {missing!r}", "missing")
    converted = {
        key: [*value] if isinstance(value, tuple) else value  # torch's schedulers want lists
        for key, value in checked.items()
    }
    converted |= _of_groups(converted, scales(optimizer))

    def make(**some: Any) -> Torch:
        if name not in _OF_OTHERS:
            return cls(optimizer, **some)
        inner = [
            build_scheduler(
                member.type, member.args, optimizer, f"{pointer}/args/schedulers/{number}"
            )
            for number, member in enumerate(_members(args, pointer))
        ]
        return cls(optimizer, inner, **some) if name == "SequentialLR" else cls(inner, **some)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about how its own classes call each other
        try:
            return make(**converted)
        except (TypeError, ValueError, ZeroDivisionError, IndexError, KeyError) as cause:
            where = arguments.blame(make, converted, f"{pointer}/args") if converted else pointer
            raise one(where, f"{name} refuses: {cause}"[:500], "args") from cause


def _of_groups(args: Mapping[str, Any], scales: Sequence[float]) -> dict[str, list[float]]:
    """Return a scheduler's learning-rate arguments for each group, if groups differ in scale."""
    if len(scales) == 1:
        return {}
    found = {name: args[name] for name in _RATES if isinstance(args.get(name), (int, float))}
    return {name: [rate * scale for scale in scales] for name, rate in found.items()}


def check_scheduler(
    spec: Scheduler, optimizer: Optimizer, length: int | None, findings: Findings
) -> Scheduler:
    """Resolve a scheduler for a training of ``length`` units, and try it on a tiny optimizer.

    Raises:
        SpecProblems: it cannot be created.
    """
    whole = resolved(spec, length)
    tiny = build_optimizer(optimizer, [nn.Parameter(torch.ones(2, 2))])
    if optimizer.sparse is not None:
        of_sparse = build_optimizer(optimizer.of_sparse, [nn.Parameter(torch.ones(2, 2))])
        tiny = DenseAndSparse(tiny, of_sparse)
    if "lr" not in tiny.param_groups[0]:  # pragma: no cover - all of torch's have one
        raise one("/scheduler", f"{optimizer.type} has no learning rate", "unsupported")
    made = build_scheduler(whole.type, whole.args, tiny)
    _try_steps(made, whole)
    total = whole.args.get("total_steps")
    if isinstance(total, int) and length is not None and length > total:
        detail = f"the scheduler ends after {total} {spec.unit}, and training takes {length}: leave"
        findings.problem("/scheduler/args/total_steps", f"{detail} it out", "too_small")
    return whole


def _try_steps(made: Torch, spec: Scheduler) -> None:
    """Step twice: some arguments are checked only then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _ in range(2):
                made.step(*([1.0] if spec.metric is not None else []))
        except Exception as cause:
            detail = f"{spec.type} cannot continue with these arguments: {cause}"
            raise one("/scheduler/args", detail[:500], "args") from cause


# --- running ---------------------------------------------------------------------------------


class LearningRate:
    """The learning rate of an optimizer under a scheduler.

    torch's scheduler always computes the rates of the spec. A rate set while the job runs scales
    all of them, and only after the scheduler has stepped, so setting 0 loses nothing.
    """

    def __init__(self, spec: Scheduler, optimizer: torch.optim.Optimizer) -> None:
        self._spec = spec
        self._optimizer = optimizer
        self._scheduler = build_scheduler(spec.type, spec.args, optimizer)
        self._counts: dict[str, int] = dict.fromkeys(("steps", "epochs", "samples"), 0)
        self._scaled: dict[int, tuple[float, float]] = {}
        """By index of the parameter group: the schedule's base rate, and the rate set instead."""
        self._rates: list[float] = []
        """The schedule's own rate of each group, if any group is scaled."""
        total = spec.args.get("total_steps") if spec.type == "OneCycleLR" else None
        self._last = total - 1 if isinstance(total, int) else None
        # torch warns about how its own classes call each other, and about schedulers that step
        # before the optimizer does, as after a restore
        warnings.filterwarnings("ignore", category=UserWarning, module=lr_scheduler.__name__)
        vars(optimizer)["_opt_called"] = True

    def count(self, num_rows: int, *, ends_epoch: bool, num_updates: int = 1) -> None:
        """Count a step of ``num_rows`` rows; ``num_updates`` is 0 if its update was skipped."""
        samples = num_rows * num_updates
        past = {"steps": num_updates, "epochs": int(ends_epoch), "samples": samples}
        for unit, units in past.items():
            self._counts[unit] += units
        if self._spec.metric is None:
            with self._unscaled():
                self._go_on(past[self._spec.unit])

    def judge(self, figures: Mapping[str, float]) -> None:
        """Pass an evaluation's metrics to a scheduler that reacts to one."""
        if self._spec.metric is not None:
            with self._unscaled():
                self._scheduler.step(figures[self._spec.metric])

    def base(self, half: torch.optim.Optimizer) -> float:
        """Return the base rate of the schedule; the current rate if it reacts to a metric.

        ``half``: the optimizer, or the dense or sparse one of a pair.
        """
        scaled = self._scaled.get(self._places(half)[0])
        if scaled is None or self._spec.metric is not None:
            return base_of(half)
        return scaled[1]

    def rebase(self, lr: float, half: torch.optim.Optimizer) -> None:
        """Continue as if the schedule had started from another rate: all its rates are scaled.

        ``half``: the optimizer, or the dense or sparse one of a pair.
        """
        with self._unscaled():
            base = base_of(half)
            places = self._places(half)
            kept = {number: both for number, both in self._scaled.items() if number not in places}
            if _SMALLEST_BASE <= base < math.inf:
                self._scaled = kept | dict.fromkeys(places, (base, lr))
            else:
                self._scaled = kept
                self._start_from(lr, half)

    def _places(self, half: torch.optim.Optimizer) -> list[int]:
        """Return the indices of an optimizer's parameter groups."""
        meant = {id(group) for group in half.param_groups}
        groups = enumerate(self._optimizer.param_groups)
        return [number for number, group in groups if id(group) in meant]

    def _start_from(self, lr: float, half: torch.optim.Optimizer) -> None:
        """Rerun the schedule from another rate; for base rates that cannot be scaled."""
        set_arguments(half, {"lr": lr})
        if self._spec.metric is not None:  # the scheduler has never reduced a rate of 0
            return
        meant = self._places(half)
        for number, group in enumerate(self._optimizer.param_groups):
            initial = group.pop("initial_lr")
            group["lr"] = group["lr"] if number in meant else initial
        self._scheduler = build_scheduler(self._spec.type, self._spec.args, self._optimizer)
        self._go_on(self._counts[self._spec.unit])

    @contextlib.contextmanager
    def _unscaled(self) -> Generator[None]:
        """Give the groups the schedule's own rates in this context; scale them again on exit."""
        groups = self._optimizer.param_groups
        for group, rate in zip(groups, self._rates, strict=False):
            group["lr"] = rate
        yield
        self._rates = [group["lr"] for group in groups] if self._scaled else []
        for number, (base, lr) in self._scaled.items():
            groups[number]["lr"] = groups[number]["lr"] / base * lr

    def _go_on(self, units: int) -> None:
        done = self._counts[self._spec.unit]
        if self._last is not None:  # when a running job is extended, the last rate stays
            units = min(units, max(0, self._last - (done - units)))
        for _ in range(units):
            self._scheduler.step()

    @contextlib.contextmanager
    def undone_on_error(self) -> Generator[None]:
        """Restore the schedule if this context raises; the parameter groups are not restored."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise

    def state(self) -> State:
        """Return the counters of the schedule, without what follows from the spec alone."""
        inner = [_numbers(vars(item)) for item in _all_of(self._scheduler)]
        found = {"type": self._spec.type, "counts": dict(self._counts), "schedulers": inner}
        scaled = {str(number): list(both) for number, both in self._scaled.items()}
        return found | {"scaled": scaled, "rates": list(self._rates)}

    def restore(self, state: State) -> None:
        """Continue from a saved state; ``counts`` alone: as if this schedule had run so far.

        Raises:
            CheckpointMismatch: the state belongs to another type of scheduler.
        """
        counts = {unit: int(state["counts"][unit]) for unit in self._counts}
        self._counts = counts
        if "schedulers" not in state:
            if self._spec.metric is None:
                self._go_on(counts[self._spec.unit])
            return
        if state["type"] != self._spec.type:
            detail = f"The checkpoint was made with the scheduler {state['type']}, the job's is"
            raise CheckpointMismatch(f"{detail} {self._spec.type}.")
        for scheduler, saved in zip(_all_of(self._scheduler), state["schedulers"], strict=True):
            vars(scheduler).update({name: _read(value) for name, value in saved.items()})
        scaled = state.get("scaled", {})  # absent from checkpoints of older versions
        self._scaled = {int(number): (_read(a), _read(b)) for number, (a, b) in scaled.items()}
        self._rates = _read(state.get("rates", []))


def base_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate that an optimizer's schedule started from."""
    group = optimizer.param_groups[0]
    return float(group.get("initial_lr", group["lr"]))


def cycled(spec: Scheduler | None) -> tuple[str, ...]:
    """Return the arguments of the optimizer that a schedule overwrites."""
    return _CYCLED if spec is not None and spec.type in _OWN_RATE else ()


def learning_rate(spec: Scheduler | None, optimizer: torch.optim.Optimizer) -> LearningRate | None:
    """Create the learning-rate schedule of an optimizer; None if there is no scheduler."""
    return None if spec is None else LearningRate(spec, optimizer)


def _all_of(scheduler: Torch) -> list[Torch]:
    """Return a scheduler and those nested in it, in a fixed order."""
    inner: Sequence[Torch] = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(found for item in inner for found in _all_of(item))]


def _numbers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's counters: its numbers, and its lists of numbers."""
    found = {name: value for name, value in attributes.items() if _is_counted_in(value)}
    return {name: [*item] if isinstance(item, list) else item for name, item in found.items()}


def _is_counted_in(value: Any) -> bool:
    parts = cast("list[Any]", value) if isinstance(value, list) else [value]
    return all(isinstance(part, (int, float)) for part in parts)


def _read(saved: Any) -> Any:
    if isinstance(saved, list):
        return [jsonio.number(item) for item in cast("list[Any]", saved)]
    return jsonio.number(saved)
