"""Save and restore the parts of a training run that are torch's: weights, optimizer, generators."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.checkpoint.checkpoint import check_shapes
from engine.core import device
from engine.core.precision import dtype_name
from engine.core.shards import is_sharded, sharded_like
from engine.core.snapshot import State
from engine.core.tensor_names import root
from engine.optim.dense_and_sparse import type_of
from glasshouse import jsonio
from glasshouse.errors import CheckpointMismatch

_PARTS = (".places", ".values", ".shape")
"""The tensors that a sparse tensor is saved as: the momentum of sparse gradients is sparse."""


class Weights:
    """Parameters and buffers, by torch's names."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def state(self) -> State:
        """Return all tensors of the network."""
        return dict(self._network.state_dict())

    def restore(self, state: State) -> None:
        """Load the network; of a pipeline, the layers of this process.

        Raises:
            CheckpointMismatch: names, shapes or dtypes differ.
        """
        wanted = self._network.state_dict()
        state = {name: item for name, item in state.items() if not self._is_elsewhere(name)}
        check_shapes(wanted, state, partial=False)
        for name, item in wanted.items():
            if state[name].dtype != item.dtype:
                both = f"{dtype_name(state[name].dtype)} in the checkpoint and"
                detail = f"{name!r} is {both} {dtype_name(item.dtype)} in the network."
                raise CheckpointMismatch(detail)
        mine = {name: sharded_like(state[name], item) for name, item in wanted.items()}
        self._network.load_state_dict(mine)

    def _is_elsewhere(self, name: str) -> bool:
        return root(name) in getattr(self._network, "elsewhere", ())

    def fill(self, state: State, missing: Literal["init", "zero"]) -> None:
        """Load the tensors in ``state``; the others keep their initialization, or become zero.

        Raises:
            CheckpointMismatch: shapes or dtypes differ.
        """
        mine = self._network.state_dict()
        fresh = mine if missing == "init" else {k: torch.zeros_like(mine[k]) for k in mine}
        self.restore({name: state.get(name, fresh[name]) for name in mine})


class OptimizerState:
    """The optimizer state, as ``<parameter>.<key>`` by torch's names, and its arguments."""

    def __init__(self, optimizer: torch.optim.Optimizer, network: nn.Module) -> None:
        self._optimizer = optimizer
        self._trained = {
            name: item for name, item in network.named_parameters() if item.requires_grad
        }
        self._names = {id(item): name for name, item in self._trained.items()}
        elsewhere: Mapping[str, nn.Module] = getattr(network, "elsewhere", {})
        self._elsewhere = {
            f"{layer}.{name}"
            for layer, module in elsewhere.items()
            for name, item in module.named_parameters()
            if item.requires_grad
        }
        """The trained parameters of a pipeline that other processes have."""

    def state(self) -> State:
        """Return tensors by name, ``numbers`` (other values) and ``param_groups`` (arguments)."""
        numbers: dict[str, dict[str, Any]] = {}
        found: State = {"type": type_of(self._optimizer), "numbers": numbers}
        for parameter, entries in self._optimizer.state.items():
            name = self._names[id(parameter)]
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    found |= _as_strided(f"{name}.{key}", value)
                else:
                    numbers.setdefault(name, {})[key] = value
        return found | {"param_groups": self._groups()}

    def restore(self, state: State) -> None:
        """Continue as the optimizer that was saved.

        Removes the tensors from ``state``, and uses them without a copy if their layout is the
        parameter's. If ``param_groups`` has no arguments, the job's apply. Checkpoints of format 2
        number the parameters instead of naming them.

        Raises:
            CheckpointMismatch: it was another optimizer, or had other parameters.
        """
        mine = type_of(self._optimizer)
        if state["type"] != mine:
            detail = f"The checkpoint was made with the optimizer {state['type']}, the job's is"
            raise CheckpointMismatch(f"{detail} {mine}.")
        state = self._own(self._named(state))
        fresh, saved = self._groups(), state["param_groups"]
        if not _are_alike(saved, fresh):
            saved = fresh
        groups = [_group(*both) for both in zip(saved, fresh, strict=True)]
        # torch numbers the parameters in the order of the groups.
        names = [name for group in groups for name in group["params"]]
        numbers = {name: number for number, name in enumerate(names)}
        for group in groups:
            group["params"] = [numbers[name] for name in group["params"]]
        entries = {numbers[name]: kept for name, kept in self._entries(state).items()}
        self._optimizer.load_state_dict({"state": entries, "param_groups": groups})

    def _groups(self) -> list[dict[str, Any]]:
        """Return the current arguments, with the names of the parameters."""
        groups = self._optimizer.state_dict()["param_groups"]
        return [
            {**group, "params": [self._names[id(item)] for item in own["params"]]}
            for group, own in zip(groups, self._optimizer.param_groups, strict=True)
        ]

    def _own(self, state: State) -> State:
        """Return the state of the parameters that this process has: all, unless in a pipeline."""
        if not self._elsewhere:
            return state

        def is_own(key: str) -> bool:
            return not any(key.startswith(f"{name}.") for name in self._elsewhere)

        groups = [
            {**group, "params": [name for name in group["params"] if name not in self._elsewhere]}
            for group in state["param_groups"]
        ]
        numbers = {name: x for name, x in state["numbers"].items() if name not in self._elsewhere}
        own = {key: x for key, x in state.items() if not isinstance(x, Tensor) or is_own(key)}
        return {**own, "param_groups": groups, "numbers": numbers}

    def _named(self, state: State) -> State:
        """Convert a state of format 2, which numbers trained parameters in the network's order."""
        groups = state["param_groups"]
        if all(isinstance(item, str) for group in groups for item in group["params"]):
            return state
        names = [*self._trained]
        count = sum(len(group["params"]) for group in groups)
        if count != len(names):
            detail = f"The checkpoint's optimizer has {count} parameters, and the job's has"
            raise CheckpointMismatch(f"{detail} {len(names)}.")
        named: State = {"type": state["type"]}
        named["param_groups"] = [
            {**group, "params": [names[number] for number in group["params"]]} for group in groups
        ]
        named["numbers"] = {names[int(n)]: kept for n, kept in state["numbers"].items()}
        for key in [key for key, value in state.items() if isinstance(value, Tensor)]:
            number, _, rest = key.partition(".")
            named[f"{names[int(number)]}.{rest}"] = state.pop(key)
        if state["type"] == "Adagrad":
            self._reorder_sums(named)
        return named

    def _reorder_sums(self, named: State) -> None:
        """Fix Adagrad's fused sums of format 2, which were created before the memory layout."""
        for group in named["param_groups"]:
            for name in group["params"] if group.get("fused") else ():
                laid = torch.empty_like(self._trained[name], device="cpu")
                laid.as_strided((laid.numel(),), (1,)).copy_(named[f"{name}.sum"].reshape(-1))
                named[f"{name}.sum"] = laid

    def _entries(self, state: State) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        for whole in [key for key, value in state.items() if isinstance(value, Tensor)]:
            part = next((part for part in _PARTS if whole.endswith(part)), "")
            name, _, key = whole.removesuffix(part).rpartition(".")
            laid = _laid_as(self._trained[name], state.pop(whole))
            entries.setdefault(name, {})[key + part] = laid
        for kept in entries.values():
            _join_sparse(kept)
        for name, numbers in state["numbers"].items():
            found = {key: jsonio.number(value) for key, value in numbers.items()}
            entries.setdefault(name, {}).update(found)
        return entries


def without_arguments(state: State) -> State:
    """Return an optimizer's state without arguments, for one that uses its own."""
    groups = [{"params": group["params"]} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


@torch.no_grad()
def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the state of each parameter the parameter's layout, as torch's fused kernels expect.

    They read the memory of both in order and ignore strides.
    """
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.layout is torch.strided:
                entries[key] = _laid_as(parameter, value)


def _laid_as(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a tensor with the layout of its parameter, if it has the parameter's shape."""
    if value.shape != parameter.shape:
        return value
    if is_sharded(parameter):
        return sharded_like(value, parameter).clone()  # or all of the file would stay mapped
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _are_alike(saved: Sequence[Mapping[str, Any]], fresh: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the groups have the same parameters.

    Raises:
        CheckpointMismatch: parameters differ, or groups do and the saved ones have arguments.
    """
    there, mine = ({name for group in some for name in group["params"]} for some in (saved, fresh))
    detail = "The checkpoint's optimizer was of other parameters"
    if there != mine:
        odd = min(there ^ mine)
        has = "the job does not train" if odd in there else "it has no state of"
        raise CheckpointMismatch(f"{detail}: {has} {odd!r}.")
    if [group["params"] for group in saved] == [group["params"] for group in fresh]:
        return True
    if any({*group} != {"params"} for group in saved):
        raise CheckpointMismatch(f"{detail} in its groups: layers had other options.")
    return False


def _as_strided(name: str, value: Tensor) -> dict[str, Tensor]:
    """Return a tensor as files can store it: a sparse one as its indices, values and shape."""
    if value.layout is torch.strided:
        return {name: value}
    rows = value.coalesce()
    parts = (rows.indices(), rows.values(), torch.tensor(rows.shape))
    return {f"{name}{part}": item for part, item in zip(_PARTS, parts, strict=True)}


def _join_sparse(kept: dict[str, Any]) -> None:
    for key in [key for key in kept if key.endswith(_PARTS[0])]:
        name = key.removesuffix(_PARTS[0])
        places, values, shape = (kept.pop(name + part) for part in _PARTS)
        made = torch.sparse_coo_tensor(places, values, tuple(shape.tolist()), is_coalesced=True)
        kept[name] = made


def _group(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Merge saved arguments of a group into new ones; arguments new in torch keep their default.

    JSON has no tuples, so lists become tuples where the new argument is one. ``foreach`` stays the
    new one: it changes no result, and which value works depends on the strategy.

    Raises:
        CheckpointMismatch: this version of torch does not have one of the arguments.
    """
    unknown = sorted(saved.keys() - fresh.keys())
    if unknown:
        raise CheckpointMismatch(f"This torch's optimizer has no {unknown[0]!r}.")
    group = dict(fresh)
    for key, value in saved.items():
        if key == "foreach":
            continue
        if isinstance(value, list) and isinstance(fresh[key], tuple):
            group[key] = tuple(jsonio.number(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
        else:
            group[key] = jsonio.number(value)
    return group


class Generators:
    """Every random generator that training uses: torch's own, on the CPU and each device.

    The order of the rows uses none of them: it is a function of seed and epoch.
    """

    def state(self) -> State:
        """Return the state of each, as bytes."""
        found: State = {"cpu": torch.get_rng_state()}
        for one in device.in_use():
            found[f"{one.type}.{one.index}"] = device.random_state(one)
        return found

    def restore(self, state: State) -> None:
        """Continue from the saved states. A device without one continues from the seed."""
        torch.set_rng_state(state["cpu"])
        for one in device.visible():
            if (found := state.get(f"{one.type}.{one.index}")) is not None:
                device.set_random_state(one, found)
