"""Checkpoints: a directory with the network, the optimizer and the state, complete or not there.

``model.safetensors`` (state_dict), ``optimizer.safetensors`` (tensors of the optimizer's state as
``<parameter number>.<key>``) and ``state.json`` (everything else: position, generators, spec).
Knows torch and files; knows nothing of jobs.
"""

import base64
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from glasshouse import jsonio
from glasshouse.errors import SpecFailed, StorageFailed

FORMAT = 1


def save(
    directory: Path, network: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Write a checkpoint atomically; returns each file's ``size_bytes`` and ``sha256``.

    ``directory`` appears only when all its files are complete and on disk.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors, rest = _split_optimizer(optimizer)
    save_file(_plain(network.state_dict()), partial / "model.safetensors")
    save_file(tensors, partial / "optimizer.safetensors")
    whole = {"format": FORMAT, **state, "optimizer": rest, "rng": _rng()}
    (partial / "state.json").write_text(json.dumps(jsonio.named(whole), indent=1))
    files = {path.name: _sealed(path) for path in sorted(partial.iterdir())}
    _fsync(partial)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    _fsync(directory.parent)
    return files


def load_model(directory: Path, network: nn.Module, *, partial: bool = False) -> dict[str, Any]:
    """Fill a network from a checkpoint; returns its state. ``partial``: only what it has.

    Raises:
        StorageFailed: the files are missing or damaged.
        SpecFailed: names or shapes of the parameters differ.
    """
    try:
        tensors = load_file(directory / "model.safetensors")
        state: dict[str, Any] = jsonio.loads((directory / "state.json").read_bytes())
    except Exception as cause:
        raise StorageFailed(f"The checkpoint cannot be read: {cause}") from cause
    wanted = network.state_dict()
    check_shapes(wanted, tensors, partial=partial)
    network.load_state_dict({name: tensors[name] for name in wanted})
    return state


def check_shapes(wanted: dict[str, Tensor], found: dict[str, Tensor], *, partial: bool) -> None:
    """Compare a network with the tensors of a checkpoint.

    Raises:
        SpecFailed: naming the first parameter that differs, with both shapes.
    """
    for name, item in wanted.items():
        if name not in found:
            raise SpecFailed(f"The checkpoint has no {name!r}, which the network needs.")
        if found[name].shape != item.shape:
            both = f"{list(found[name].shape)} in the checkpoint and {list(item.shape)}"
            raise SpecFailed(f"{name!r} has shape {both} in the network.")
    spare = [name for name in found if name not in wanted]
    if spare and not partial:
        raise SpecFailed(f"The checkpoint has {spare[0]!r}, which the network has not.")


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: item.detach().cpu().contiguous() for name, item in tensors.items()}


def _split_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    whole = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in whole["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value.detach().cpu().contiguous().clone()
            else:
                numbers.setdefault(str(index), {})[key] = value
    return tensors, {"state": numbers, "param_groups": whole["param_groups"]}


def _rng() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {
        name: base64.b64encode(item.numpy().tobytes()).decode() for name, item in states.items()
    }


def _sealed(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return {"size_bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
