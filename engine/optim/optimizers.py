"""Build optimizers from torch's names and arguments, checked before anything runs.

Depends on torch, not on data or jobs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.core import arguments
from engine.core.problems import one
from engine.core.shards import is_sharded
from engine.optim.dense_and_sparse import SPARSE_TYPES
from engine.optim.updates import as_tensor
from glasshouse.spec import Optimizer
from glasshouse.suggestions import did_you_mean

AT_SPARSE = "/optimizer/sparse"
_OPTIMIZERS = "torch.optim has no optimizer"
_REFUSED = {
    "LBFGS": "it evaluates the loss several times per step through a closure, and a step here is "
    "one forward and one backward pass; choose another, for example SGD with momentum",
}

UNSHARDED = ("Adafactor", "Muon", "Rprop")
"""Optimizers whose update is another, or fails, if each process has a part of every parameter."""
FUSED_ON_SHARDS = ("Adam", "AdamW")
"""Those whose fused kernels torch also runs on such parameters."""


@cache
def optimizer_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Return every optimizer of torch.optim that steps without a closure, by name."""
    return {
        name: cls
        for name, cls in sorted(vars(torch.optim).items())
        if isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and cls is not torch.optim.Optimizer
        and name not in _REFUSED
    }


def build_optimizer(optimizer: Optimizer, parameters: Iterable[Any], at: str = "/optimizer") -> Any:
    """Create a spec's optimizer for parameters or groups of them; ``at``: its JSON pointer.

    Raises:
        SpecProblems: torch has no such optimizer, or it refuses its arguments or the parameters.
    """
    cls = class_of(optimizer.type, optimizer_classes(), _REFUSED, f"{at}/type", _OPTIMIZERS)
    args = checked(arguments.parameters(cls), optimizer.args, f"{at}/args", optimizer.type)
    learned = list(parameters)
    if "foreach" in arguments.parameters(cls) and not _are_alike(learned):
        args = {"foreach": False, **args}  # torch's choice on accelerators is True

    def attempt(**some: Any) -> Any:
        return cls(learned, **some)

    try:
        return attempt(**args)
    except Exception as cause:  # too short a tuple of betas raises IndexError
        where = arguments.blame(attempt, args, f"{at}/args") if args else at
        raise one(where, f"{optimizer.type} refuses: {cause}", "args") from cause


def _are_alike(learned: Iterable[Any]) -> bool:
    """Whether parameters, or groups of them, are all whole or all sharded in the same way.

    torch updates only such parameters many at once.
    """
    groups = [item["params"] if isinstance(item, dict) else [item] for item in learned]
    each = [item for group in groups for item in group]
    hows = {(x.device_mesh, tuple(x.placements)) if is_sharded(x) else None for x in each}
    return len(hows) < 2


def class_of(
    name: str, known: Mapping[str, Any], refused: Mapping[Any, str], pointer: str, what: str
) -> Any:
    """Return what torch has by a name; ``what``: where torch has it, for the error message.

    Raises:
        SpecProblems: torch has none of this name, or it cannot be used.
    """
    if name in refused:
        raise one(pointer, f"{name} cannot be used: {refused[name]}", "unsupported")
    if name not in known:
        meant = did_you_mean(name, known) or f"; it has: {', '.join(known)}"
        raise one(pointer, f"{what} {name!r}{meant}", "unknown")
    return known[name]


def checked(
    known: dict[str, arguments.Parameter], given: Mapping[str, Any], pointer: str, name: str
) -> dict[str, Any]:
    """Return checked and converted arguments; none that ``name`` needs is missing.

    Raises:
        SpecProblems: an argument is missing or does not fit.
    """
    args = arguments.check(known, dict(given), pointer, name)
    for missing in arguments.missing(known, args):
        raise one(f"{pointer}/{missing}", f"{name} needs the argument {missing!r}", "missing")
    return args


def sparse_parameters(network: nn.Module) -> set[str]:
    """Return the names of parameters whose gradients are sparse."""
    return {
        f"{name}.weight"
        for name, module in network.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }


_NO_DECAYS: Mapping[str, float] = {}
_PRIMES = (3, 5, 7, 11, 13, 17)


class StateTensor(NamedTuple):
    """One entry of an optimizer's state for a parameter."""

    num_bytes: int
    layout: tuple[tuple[int, ...], int] | None
    """Its shape and the bytes per element; None: not known in advance."""


States = dict[str, dict[str, StateTensor]]
"""The optimizer state of each parameter, by name."""


def try_optimizer(
    optimizer: Optimizer, network: nn.Module, decays: Mapping[str, float] = _NO_DECAYS
) -> States:
    """Step once with parameters like the network's; return the optimizer state of each.

    ``decays``: the weight decay of parameters whose layers set their own.

    Raises:
        SpecProblems: the optimizer cannot step with these parameters and arguments.
    """
    learned = {name: item for name, item in network.named_parameters() if item.requires_grad}
    sparse = [name for name in sparse_parameters(network) if name in learned]
    dense = [name for name in learned if name not in sparse]
    where = _build_all(optimizer, [learned[name] for name in dense], [learned[n] for n in sparse])
    state_of = cache(partial(_tiny_state, optimizer))
    states: States = {}
    for name in [*sparse, *dense]:
        shape = learned[name].shape
        if name in sparse:
            own = _decayed(optimizer.of_sparse, decays.get(name))
            small, kept = _tiny_state(own, len(shape), is_sparse=True, at=where)
        else:
            small, kept = state_of(len(shape))
        states[name] = {key: _grown(item, small, shape) for key, item in kept.items()}
    return {name: states[name] for name in learned}


def _build_all(optimizer: Optimizer, dense: Sequence[Any], sparse: Sequence[Any]) -> str:
    """Create the optimizers of a spec; return the JSON pointer of the one for sparse gradients.

    Raises:
        SpecProblems: one cannot be created, or one of two would have nothing to update.
    """
    if optimizer.sparse is None:
        build_optimizer(optimizer, [*dense, *sparse])
        return "/optimizer"
    if not sparse:
        detail = "no layer that is trained has sparse gradients (Embedding or EmbeddingBag with"
        raise one(AT_SPARSE, f"{detail} sparse: true): leave it out", "nothing")
    if not dense:
        detail = "all that is trained has sparse gradients: make this the optimizer itself"
        raise one(AT_SPARSE, detail, "nothing")
    build_optimizer(optimizer, dense)
    build_optimizer(optimizer.of_sparse, sparse, AT_SPARSE)
    return AT_SPARSE


def _decayed(optimizer: Optimizer, weight_decay: float | None) -> Optimizer:
    if weight_decay is None:
        return optimizer
    return optimizer.model_copy(update={"args": {**optimizer.args, "weight_decay": weight_decay}})


def num_state_bytes(states: States) -> int:
    """Return the size of the whole optimizer state in bytes."""
    return sum(item.num_bytes for kept in states.values() for item in kept.values())


def _grown(kept: StateTensor, small: Sequence[int], shape: torch.Size) -> StateTensor:
    """Scale axes as long as the tiny parameter's to the parameter's length; keep axes of 1."""
    tried, item_bytes = kept.layout or ((), 0)
    axes = [*zip(tried, small, shape, strict=False)]
    if len(axes) != len(tried) or any(length not in (1, few) for length, few, _ in axes):
        return StateTensor(kept.num_bytes, None)
    grown = tuple(many if length == few else 1 for length, few, many in axes)
    return StateTensor(math.prod(grown) * item_bytes, (grown, item_bytes))


def _tiny_state(
    optimizer: Optimizer, num_axes: int, *, is_sparse: bool = False, at: str = "/optimizer"
) -> tuple[tuple[int, ...], dict[str, StateTensor]]:
    """Step once on a tiny parameter; return its shape, and the tensors and numbers of its state."""
    shape = _PRIMES[:num_axes] if num_axes <= len(_PRIMES) else (2,) * num_axes
    tiny = nn.Parameter(torch.ones(shape))
    tiny.grad = torch.ones(shape).to_sparse(1) if is_sparse else torch.ones(shape)
    made = build_optimizer(optimizer, [tiny])
    try:
        made.step()
    except Exception as error:
        kind = "sparse" if is_sparse else "such"
        reason = str(error).splitlines()[0]
        detail = f"{optimizer.type} cannot update {kind} parameters with these arguments: {reason}"
        if is_sparse and optimizer.type not in SPARSE_TYPES:
            detail += f". {', '.join(SPARSE_TYPES)} take sparse gradients: choose one of them for"
            detail += ' all, or for these alone, "sparse": {"type": "SparseAdam"} beside it'
        elif optimizer.type == "SparseAdam" and not is_sparse:
            detail += '. Choose one for the others, with "sparse": {"type": "SparseAdam"} beside it'
        raise one(at, detail, "optimizer") from error
    found: dict[str, StateTensor] = {}
    for key, item in made.state[tiny].items():
        if (tensor := as_tensor(item)) is not None:
            item_bytes = tensor.element_size()  # a momentum may be sparse, and grows dense
            found[key] = StateTensor(tensor.numel() * item_bytes, (tuple(tensor.shape), item_bytes))
    return shape, found
