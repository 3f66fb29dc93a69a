"""Converts torch losses, optimizers, schedulers and data loaders to dicts for a job spec.

Types and arguments are read from the objects. Classes defined by the user are refused, because the
service does not run client code.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor, nn, optim
from torch.optim import lr_scheduler, swa_utils
from torch.utils import data as torch_data

What = Literal["loss", "optimizer", "scheduler"]
Document = dict[str, Any]

_HOMES: dict[What, tuple[Any, ...]] = {
    "loss": (nn,),
    "optimizer": (optim,),
    "scheduler": (lr_scheduler, swa_utils),
}
_PLACES = {"loss": "torch.nn", "optimizer": "torch.optim", "scheduler": "torch.optim.lr_scheduler"}
_LEFT_OUT = ("size_average", "reduce", "params", "optimizer", "last_epoch", "device", "dtype")
_READABLE = (
    lr_scheduler.StepLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
)
"""Schedulers that store each argument as an attribute of the same name."""
_PER_PARAMETER = ("lr", "weight_decay")
"""Optimizer options that can be set per layer of a graph."""
_BASES = (nn.Module, optim.Optimizer, lr_scheduler.LRScheduler)
_MISSING: Any = inspect.Parameter.empty


class Rates(NamedTuple):
    """The options of a parameter that differ from the first parameter group."""

    lr_scale: float | None
    """The learning rate divided by that of the first group."""
    weight_decay: float | None


def describe(value: Any, what: What) -> Document:
    """Convert a loss, optimizer or scheduler to ``{"type", "args"}``.

    Args:
        value: a torch class, a ``functools.partial`` of one, or an instance.
        what: which of the three it is.

    Raises:
        TypeError: a spec cannot express it. The message names the class or the argument.
    """
    if isinstance(value, type):
        return {"type": _name_of(value, what)}
    if isinstance(value, functools.partial):
        return _of_partial(cast("functools.partial[Any]", value), what)
    if inspect.isroutine(value):
        name = getattr(value, "__name__", repr(value))
        raise TypeError(
            f"{what}: {name} is a function; pass a class of {_PLACES[what]} or an instance"
            f"{_class_like(name, what)}"
        )
    name = _name_of(type(value), what)
    read = {"loss": _of_loss, "optimizer": _of_optimizer, "scheduler": _of_scheduler}[what]
    args = _arguments(type(value), read(value), f"{what}: {name}")
    return {"type": name, "args": args} if args else {"type": name}


def rates_by_parameter(optimizer: Any, module: Any) -> dict[str, Rates]:
    """By module parameter: how its parameter group differs from the first one.

    Empty if there is only one group or all groups are equal.

    Raises:
        TypeError: the optimizer does not update exactly the trainable parameters of the module, or
            its groups differ in more than ``lr`` and ``weight_decay``.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    if not isinstance(module, nn.Module):
        if len(groups) > 1:
            raise TypeError(
                "optimizer: parameter groups require the network to be their module; in a graph, "
                "set lr_scale and weight_decay of the layers instead"
            )
        return {}
    _check_covers(groups, module)
    _check_alike(groups)
    names = {id(item): name for name, item in module.named_parameters()}
    first = groups[0]
    found: dict[str, Rates] = {}
    for group in groups[1:]:
        rates = Rates(_scale(first, group), _other(first, group, "weight_decay"))
        if rates != (None, None):
            found |= {names[id(item)]: rates for item in group["params"]}
    return found


def _check_covers(groups: Sequence[Mapping[str, Any]], module: nn.Module) -> None:
    learned = {id(item): name for name, item in module.named_parameters() if item.requires_grad}
    frozen = {id(item) for item in module.parameters()} - learned.keys()
    updated = {id(item) for group in groups for item in group["params"]}
    if updated - learned.keys() - frozen:
        raise TypeError(
            "optimizer: it has parameters that the network does not have; create it with the "
            f"parameters of this {type(module).__name__}, or pass the class: optimizer=torch.optim."
            "Adam"
        )
    missing = [name for one, name in learned.items() if one not in updated]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise TypeError(
            f"optimizer: it does not have {', '.join(missing[:3])}{more}. Pass all parameters, or "
            "call requires_grad_(False) on those that should not be trained"
        )


def _check_alike(groups: Sequence[Mapping[str, Any]]) -> None:
    for group in groups[1:]:
        for name, value in group.items():
            is_own = name in (*_PER_PARAMETER, "params", "initial_lr", "param_names")
            if not is_own and value != groups[0].get(name):
                raise TypeError(
                    f"optimizer: its parameter groups differ in {name} ({groups[0].get(name)!r} "
                    f"and {value!r}); in a spec, only lr and weight_decay can differ"
                )


def _rate(group: Mapping[str, Any]) -> float:
    """The initial learning rate of a group: a scheduler may have changed ``lr`` since."""
    return float(group.get("initial_lr", group["lr"]))


def _scale(first: Mapping[str, Any], group: Mapping[str, Any]) -> float | None:
    base, own = _rate(first), _rate(group)
    if own == base:
        return None
    if base <= 0 or own <= 0:
        raise TypeError(
            f"optimizer: the learning rates of its groups are {base} and {own}; all must be "
            "positive. To freeze parameters, call requires_grad_(False) on them"
        )
    return own / base


def _other(first: Mapping[str, Any], group: Mapping[str, Any], name: str) -> float | None:
    return None if group.get(name) == first.get(name) else float(group[name])


# --- by kind ---------------------------------------------------------------------------------


def _of_loss(loss: Any) -> Callable[[str], Any]:
    return lambda name: getattr(loss, name, _MISSING)


def _of_optimizer(optimizer: Any) -> Callable[[str], Any]:
    if any(map(_has_stepped, optimizer.state.values())):
        raise TypeError(
            f"optimizer: this {type(optimizer).__name__} has already made steps, and its state "
            "would be lost; pass a new one, or the class"
        )
    group: dict[str, Any] = optimizer.param_groups[0]
    return lambda name: _rate(group) if name == "lr" else group.get(name, _MISSING)


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer has updated a parameter; some have state before their first step."""
    if "step" in state:
        return float(state["step"]) > 0
    return any(value is not None for value in state.values())


def _of_scheduler(scheduler: Any) -> Callable[[str], Any]:
    name = type(scheduler).__name__
    if type(scheduler) not in _READABLE:
        raise TypeError(
            f"scheduler: the arguments of a {name} cannot be read from the object; use "
            f'{{"type": "{name}", "args": {{…}}, "unit": "steps" or "epochs"}}'
        )
    if scheduler.last_epoch > 0:
        raise TypeError(f"scheduler: this {name} has already made steps; pass a new one")

    def read(argument: str) -> Any:
        found = getattr(scheduler, argument, _MISSING)
        return sorted(found.elements()) if argument == "milestones" else found

    return read


def _of_partial(value: "functools.partial[Any]", what: What) -> Document:
    name = _name_of(value.func, what)
    if value.args:
        raise TypeError(f"{what}: pass the arguments of partial({name}) as keywords")
    owner = f"{what}: {name}"
    args = {key: plain(item, f"{owner} has {key}") for key, item in value.keywords.items()}
    return {"type": name, "args": args} if args else {"type": name}


def _name_of(cls: Any, what: What) -> str:
    """The name of a torch class."""
    name = getattr(cls, "__name__", repr(cls))
    if any(getattr(home, name, None) is cls for home in _HOMES[what]):
        return name
    raise TypeError(
        f"{what}: {getattr(cls, '__module__', '')}.{name} is not a class of {_PLACES[what]}, and "
        f"the service does not run client code{_parent_in(cls, what)}"
    )


def _parent_in(cls: Any, what: What) -> str:
    """A hint that names the torch class that a user's class extends."""
    for parent in getattr(cls, "__mro__", ())[1:]:
        is_public = not parent.__name__.startswith("_")
        is_torchs = any(vars(home).get(parent.__name__) is parent for home in _HOMES[what])
        if is_public and is_torchs and parent not in _BASES:
            return f"; you can use {parent.__name__}, which it extends"
    return ""


def _class_like(function: str, what: What) -> str:
    """A hint that names the class for a function of torch.nn.functional: cross_entropy."""
    forms = {function.replace("_", ""), f"{function.replace('_', '')}loss"}
    for home in _HOMES[what]:
        for name in vars(home):
            if name.lower() in forms:
                return f", such as {name}"
    return ""


def _arguments(cls: type, read: Callable[[str], Any], owner: str) -> Document:
    """The arguments that differ from their defaults."""
    found: Document = {}
    for item in inspect.signature(cls.__init__).parameters.values():  # type: ignore[misc]
        if item.name == "self" or item.name in _LEFT_OUT:
            continue
        value = read(item.name)
        if value is _MISSING:
            raise TypeError(f"{owner}: its argument {item.name} cannot be read; pass a dict")
        if _is_default(value, item.default):
            continue
        found[item.name] = plain(value, f"{owner} has {item.name}")
    return found


def _is_default(value: Any, default: Any) -> bool:
    if isinstance(value, nn.PairwiseDistance) and default is None:
        usual = nn.PairwiseDistance()  # the default of TripletMarginWithDistanceLoss
        return all(getattr(value, key) == getattr(usual, key) for key in usual.__constants__)
    if isinstance(value, Tensor) or isinstance(default, Tensor):
        return value is default
    return value is default or (type(value) is type(default) and value == default)


def plain(value: Any, owner: str) -> Any:
    """A value as JSON: numbers, strings, lists; tensors become lists."""
    if isinstance(value, Tensor):
        return cast("Any", value.detach().cpu().tolist())
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # numpy scalars
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, owner) for item in cast("Iterable[Any]", value)]
    raise TypeError(f"{owner}={value!r:.60}, which a job spec cannot express")


# --- data loaders ----------------------------------------------------------------------------


class Loaded(NamedTuple):
    """The dataset and batch options of a data loader."""

    dataset: Any
    options: Document
    """``batch_size``, ``shuffle`` and ``drop_last``, as in a spec."""


def read_loader(loader: Any) -> Loaded:
    """Read the dataset and batch options of a ``DataLoader``.

    Workers, pinning and prefetching are ignored: they do not change results.

    Raises:
        TypeError: it builds batches in a way that jobs do not support.
    """
    sampler, batches = loader.sampler, loader.batch_sampler
    if loader.batch_size is None or type(batches) is not torch_data.BatchSampler:
        raise TypeError(_no_loader("a custom batch_sampler, or batch_size None", "batch_size"))
    if loader.collate_fn is not torch_data.default_collate:
        name = getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__)
        raise TypeError(_no_loader(f"the collate_fn {name}", "batch_size"))
    if type(sampler) is torch_data.SequentialSampler:
        is_shuffled = False
    elif type(sampler) is torch_data.RandomSampler and _is_whole(sampler):
        is_shuffled = True
    else:
        raise TypeError(_no_loader(f"the sampler {type(sampler).__name__}", "shuffle"))
    options = {"batch_size": loader.batch_size, "shuffle": {"enabled": is_shuffled}}
    return Loaded(loader.dataset, options | ({"drop_last": True} if loader.drop_last else {}))


def _is_whole(sampler: Any) -> bool:
    """Whether each row is drawn exactly once per epoch."""
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _no_loader(what: str, option: str) -> str:
    return (
        f"the DataLoader has {what}, which is not supported: the service builds the batches. Pass "
        f"its dataset (loader.dataset) and set {option}= instead"
    )
