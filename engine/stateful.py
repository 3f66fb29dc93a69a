"""The parts of a training run that are torch's own: weights, optimizer and random generators."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.checkpoint import check_shapes
from engine.paired import type_of
from engine.precision import dtype_name
from engine.snapshot import State
from glasshouse import jsonio
from glasshouse.errors import CheckpointMismatch

_PARTS = (".places", ".values", ".shape")
"""Of a sparse tensor: the momentum of sparse gradients is one."""


class Weights:
    """Parameters and buffers, by torch's names."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def state(self) -> State:
        """All tensors of the network."""
        return dict(self._network.state_dict())

    def restore(self, state: State) -> None:
        """Fill the network.

        Raises:
            CheckpointMismatch: names, shapes or types differ.
        """
        wanted = self._network.state_dict()
        check_shapes(wanted, state, partial=False)
        for name, item in wanted.items():
            if state[name].dtype != item.dtype:
                both = f"{dtype_name(state[name].dtype)} in the checkpoint and"
                detail = f"{name!r} is {both} {dtype_name(item.dtype)} in the network."
                raise CheckpointMismatch(detail)
        self._network.load_state_dict(state)

    def fill(self, state: State, missing: Literal["init", "zero"]) -> None:
        """Fill what the state has; the rest stays as it was drawn, or becomes zero.

        Raises:
            CheckpointMismatch: shapes or types differ.
        """
        mine = self._network.state_dict()
        fresh = mine if missing == "init" else {k: torch.zeros_like(mine[k]) for k in mine}
        self.restore({name: state.get(name, fresh[name]) for name in mine})


class OptimizerState:
    """What the optimizer keeps, as ``<number of the parameter>.<key>``, and its arguments.

    Parameters have their numbers among the network's that are trained, whatever their groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, network: nn.Module) -> None:
        self._optimizer = optimizer
        trained = [item for item in network.parameters() if item.requires_grad]
        self._numbers = {id(item): number for number, item in enumerate(trained)}

    def state(self) -> State:
        """Tensors by name; ``numbers``: what is none; ``param_groups``: the arguments in force."""
        whole = self._whole()
        numbers: dict[str, dict[str, Any]] = {}
        found: State = {"type": type_of(self._optimizer), "numbers": numbers}
        for index, entries in whole["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    found |= _as_strided(f"{index}.{key}", value)
                else:
                    numbers.setdefault(str(index), {})[key] = value
        return found | {"param_groups": whole["param_groups"]}

    def restore(self, state: State) -> None:
        """Go on as the optimizer that was saved; without ``param_groups`` with other arguments.

        Raises:
            CheckpointMismatch: it was another optimizer, or of other parameters.
        """
        mine = type_of(self._optimizer)
        if state["type"] != mine:
            detail = f"The checkpoint was made with the optimizer {state['type']}, the job's is"
            raise CheckpointMismatch(f"{detail} {mine}.")
        fresh: list[dict[str, Any]] = self._whole()["param_groups"]
        saved: list[dict[str, Any]] = state.get("param_groups", fresh)
        if [group["params"] for group in saved] != [group["params"] for group in fresh]:
            detail = "The checkpoint's optimizer was of other parameters"
            counts = [sum(len(group["params"]) for group in groups) for groups in (saved, fresh)]
            if counts[0] == counts[1]:
                raise CheckpointMismatch(f"{detail} in its groups: layers had other options.")
            raise CheckpointMismatch(f"{detail}: {counts[0]}, and the job has {counts[1]}.")
        groups = [_group(*both) for both in zip(saved, fresh, strict=True)]
        self._optimizer.load_state_dict({"state": _entries(state), "param_groups": groups})

    def _whole(self) -> dict[str, Any]:
        """What torch keeps, with our numbers of the parameters."""
        whole = self._optimizer.state_dict()
        ours = [
            [self._numbers[id(item)] for item in group["params"]]
            for group in self._optimizer.param_groups
        ]
        theirs = [number for group in whole["param_groups"] for number in group["params"]]
        known = dict(zip(theirs, [number for group in ours for number in group], strict=True))
        return {
            "state": {known[number]: kept for number, kept in whole["state"].items()},
            "param_groups": [
                {**group, "params": numbers}
                for group, numbers in zip(whole["param_groups"], ours, strict=True)
            ],
        }


def _entries(state: State) -> dict[int, dict[str, Any]]:
    entries: dict[int, dict[str, Any]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            index, _, key = name.partition(".")
            entries.setdefault(int(index), {})[key] = value.clone()  # of no file any more
    for kept in entries.values():
        _join_sparse(kept)
    for index, numbers in state["numbers"].items():
        found = {key: jsonio.number(value) for key, value in numbers.items()}
        entries.setdefault(int(index), {}).update(found)
    return entries


def _as_strided(name: str, value: Tensor) -> dict[str, Tensor]:
    """A tensor as files can have it: a sparse one as the rows that it has, its places and shape."""
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
    """The arguments that were in force; JSON has no tuples. New ones of torch keep their default.

    Raises:
        CheckpointMismatch: there are arguments that this torch does not know.
    """
    unknown = sorted(saved.keys() - fresh.keys())
    if unknown:
        raise CheckpointMismatch(f"This torch's optimizer has no {unknown[0]!r}.")
    group = dict(fresh)
    for key, value in saved.items():
        if isinstance(value, list) and isinstance(fresh[key], tuple):
            group[key] = tuple(jsonio.number(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
        else:
            group[key] = jsonio.number(value)
    return group


class Generators:
    """Every random generator that training draws from: torch's own, of the CPU and each device.

    The order of the rows is none of them: it is a function of seed and epoch.
    """

    def state(self) -> State:
        """The state of each, as bytes."""
        found: State = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            for number in range(torch.cuda.device_count()):
                found[f"cuda.{number}"] = torch.cuda.get_rng_state(number)
        return found

    def restore(self, state: State) -> None:
        """Draw on from where they were; of a device that was not there, as the seed says."""
        torch.set_rng_state(state["cpu"])
        if torch.cuda.is_available():
            for number in range(torch.cuda.device_count()):
                if (found := state.get(f"cuda.{number}")) is not None:
                    torch.cuda.set_rng_state(found, number)
