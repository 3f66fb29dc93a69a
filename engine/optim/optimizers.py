"""Build optimizers from torch's names and arguments, checked before anything runs.

Depends on torch, not on data or jobs.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.core import arguments
from engine.core.problems import one
from engine.optim.dense_and_sparse import SPARSE_TYPES
from engine.optim.updates import as_tensor
from glasshouse.spec import Optimizer
from glasshouse.suggestions import did_you_mean

AT_SPARSE = "/optimizer/sparse"
_REFUSED = {
    "LBFGS": "it evaluates the loss several times per step through a closure, and a step here is "
    "one forward and one backward pass; choose another, for example SGD with momentum",
}


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
    if optimizer.type in _REFUSED:
        detail = f"{optimizer.type} cannot be used: {_REFUSED[optimizer.type]}"
        raise one(f"{at}/type", detail, "unsupported")
    cls = optimizer_classes().get(optimizer.type)
    if cls is None:
        known = optimizer_classes()
        detail = f"torch.optim has no optimizer {optimizer.type!r}"
        detail += did_you_mean(optimizer.type, known) or f"; it has: {', '.join(known)}"
        raise one(f"{at}/type", detail, "unknown")
    known = arguments.parameters(cls)
    pointer = f"{at}/args"
    args = arguments.check(known, dict(optimizer.args), pointer, optimizer.type)
    for name in arguments.missing(known, args):
        raise one(f"{pointer}/{name}", f"{optimizer.type} needs the argument {name!r}", "missing")
    learned = list(parameters)
    try:
        return cls(learned, **args)
    except Exception as cause:  # too short a tuple of betas raises IndexError

        def attempt(**some: Any) -> Any:
            return cls(learned, **some)

        where = arguments.blame(attempt, args, pointer) if args else at
        raise one(where, f"{optimizer.type} refuses: {cause}", "args") from cause


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
    sparse = {
        name: _decayed(optimizer.of_sparse, decays.get(name))
        for name in sparse_parameters(network)
        if name in learned
    }
    dense = [item for name, item in learned.items() if name not in sparse]
    where = _build_all(optimizer, dense, [learned[name] for name in sparse])
    if sparse or optimizer.type == "SparseAdam":
        for one_of in {item.model_dump_json(): item for item in sparse.values()}.values():
            _try_tiny(one_of, num_sparse=1, num_dense=0, at=where)
        _try_tiny(optimizer, num_sparse=0, num_dense=len(dense))
    args = json.dumps(optimizer.args, sort_keys=True)
    return {
        name: _state_like_tiny(sparse[name], item.shape, 1)
        if name in sparse
        else dict(_state_of(optimizer.type, args, item.shape, item.dtype))
        for name, item in learned.items()
    }


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


@lru_cache(maxsize=4096)
def _state_of(
    name: str, args: str, shape: torch.Size, dtype: torch.dtype
) -> dict[str, StateTensor]:
    """Return the optimizer state of one parameter, found by stepping once."""
    optimizer = Optimizer(type=name, args=json.loads(args))
    copy = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    copy.grad = torch.empty_like(copy)
    made = build_optimizer(optimizer, [copy])
    try:
        made.step()
    except MemoryError:
        raise
    except Exception as cause:  # some read a number of their state: use tiny real parameters
        return _state_like_tiny(optimizer, shape, 0, cause)
    return _kept(made)


def _state_like_tiny(
    optimizer: Optimizer, shape: torch.Size, num_sparse: int, cause: Exception | None = None
) -> dict[str, StateTensor]:
    """Return one parameter's optimizer state, derived from a tiny one with as many axes."""
    small = _PRIMES[: len(shape)] if len(shape) <= len(_PRIMES) else (2,) * len(shape)
    num_dense = 1 - num_sparse
    kept = _try_tiny(
        optimizer, num_sparse=num_sparse, num_dense=num_dense, shape=small, cause=cause
    )
    return {key: _grown(item, small, shape) for key, item in kept.items()}


def _grown(kept: StateTensor, small: Sequence[int], shape: torch.Size) -> StateTensor:
    """Scale axes as long as the tiny parameter's to the parameter's length; keep axes of 1."""
    tried, item_bytes = kept.layout or ((), 0)
    axes = [*zip(tried, small, shape, strict=False)]
    if len(axes) != len(tried) or any(length not in (1, few) for length, few, _ in axes):
        return StateTensor(kept.num_bytes, None)
    grown = tuple(many if length == few else 1 for length, few, many in axes)
    return StateTensor(math.prod(grown) * item_bytes, (grown, item_bytes))


def _try_tiny(
    optimizer: Optimizer,
    *,
    num_sparse: int,
    num_dense: int,
    shape: Sequence[int] = (8, 8),
    cause: Exception | None = None,
    at: str = "/optimizer",
) -> dict[str, StateTensor]:
    """Step once on tiny parameters; return the optimizer state of one of them."""
    tiny_ones = [nn.Parameter(torch.ones(tuple(shape))) for _ in range(min(num_sparse, 1))]
    for item in tiny_ones:
        item.grad = torch.ones(tuple(shape)).to_sparse(1)
    for _ in range(min(num_dense, 1)):
        tiny_ones.append(nn.Parameter(torch.ones(tuple(shape))))
        tiny_ones[-1].grad = torch.ones(tuple(shape))
    if not tiny_ones:
        return {}
    made = build_optimizer(optimizer, tiny_ones)
    try:
        made.step()
    except Exception as error:
        kind = "sparse" if num_sparse else "such"
        reason = str(error).splitlines()[0]
        detail = f"{optimizer.type} cannot update {kind} parameters with these arguments: {reason}"
        if num_sparse and optimizer.type not in SPARSE_TYPES:
            detail += f". {', '.join(SPARSE_TYPES)} take sparse gradients: choose one of them for"
            detail += ' all, or for these alone, "sparse": {"type": "SparseAdam"} beside it'
        elif optimizer.type == "SparseAdam" and not num_sparse:
            detail += '. Choose one for the others, with "sparse": {"type": "SparseAdam"} beside it'
        raise one(at, detail, "optimizer") from cause or error
    return _kept(made)


def _kept(made: torch.optim.Optimizer) -> dict[str, StateTensor]:
    """Return the tensors and numbers in the state of an optimizer of one parameter."""
    found: dict[str, StateTensor] = {}
    for entries in made.state.values():
        for key, item in entries.items():
            tensor = as_tensor(item)
            if tensor is not None:
                layout = tuple(tensor.shape), tensor.element_size()
                found[key] = StateTensor(tensor.numel() * tensor.element_size(), layout)
    return found
