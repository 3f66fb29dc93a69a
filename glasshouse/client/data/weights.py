"""Weights as safetensors files for upload, and as state dicts under a module's parameter names."""

import hashlib
import json
from collections.abc import Generator, Mapping
from typing import Any, cast

import numpy as np

from glasshouse import jsonio
from glasshouse.client.data.tensors import Array
from glasshouse.client.modules.weight_names import names_in_module

_NAMES = {"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_KINDS = {"f": "F", "i": "I", "u": "U", "c": "C"}
_BLOCK_BYTES = 1 << 18


class WeightsFile:
    """A safetensors file. Equal tensors and metadata give identical bytes."""

    def __init__(self, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
        self._arrays = {name: _array(item) for name, item in sorted(tensors.items())}
        header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
        end = 0
        for name, array in self._arrays.items():
            begins, end = end, end + array.nbytes
            header[name] = {
                "dtype": _dtype(name, array),
                "shape": list(array.shape),
                "data_offsets": [begins, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the tensors are aligned
        self._head = len(text).to_bytes(8, "little") + text

    def chunks(self) -> Generator[bytes]:
        """Yield the file in chunks."""
        yield self._head
        for array in self._arrays.values():
            flat = array.reshape(-1).view(np.uint8)
            for first in range(0, len(flat), _BLOCK_BYTES):
                yield flat[first : first + _BLOCK_BYTES].tobytes()

    def sha256(self) -> str:
        """The hexadecimal digest of the file."""
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()


def _array(item: Any) -> Array:
    if hasattr(item, "detach"):
        item = item.detach().cpu().numpy()
    array = np.asarray(item)
    return np.ascontiguousarray(array).reshape(array.shape)


def _dtype(name: str, array: Array) -> str:
    dtype = _NAMES.get(array.dtype.name)
    if dtype is None and array.dtype.kind in _KINDS:
        dtype = f"{_KINDS[array.dtype.kind]}{array.dtype.itemsize * 8}"
    if dtype is None:
        raise ValueError(f"{name!r} has dtype {array.dtype}, which safetensors does not support")
    return dtype


def weights_file(
    tensors: Mapping[str, Any], network: Mapping[str, Any], fields: Mapping[str, Any] | None
) -> WeightsFile:
    """The file that `Checkpoints.create` uploads."""
    metadata = {"network": jsonio.dumps(network)}
    if fields:
        metadata["fields"] = jsonio.dumps(fields)
    return WeightsFile(tensors, metadata)


def in_module(graph: Mapping[str, Any], weights: Mapping[str, Array]) -> dict[str, Array]:
    """Rename weights to the parameter names of the traced module, if the graph has them."""
    names = names_in_module(graph, weights)
    if not any(names.values()):
        return dict(weights)
    return {name: array for key, array in weights.items() for name in names[key]}


def as_state_dict(named: Mapping[str, Array]) -> dict[str, Any]:
    """Convert arrays to torch tensors.

    Raises:
        ImportError: torch is not installed.
    """
    from glasshouse.client.modules.loading import as_tensors  # noqa: PLC0415 (imports torch)

    return as_tensors(named)


def load_into(module: Any, named: Mapping[str, Array]) -> None:
    """Load weights into a module; its other parameters are left unchanged.

    Raises:
        ValueError: the module lacks a parameter or has another shape.
    """
    own = cast("dict[str, Any]", module.state_dict())
    for name, array in sorted(named.items()):  # a file keeps them in any order
        if name not in own:
            raise ValueError(f"the module has no {name!r}: the job trained a different module")
        if tuple(own[name].shape) != array.shape:
            both = f"{list(array.shape)} in the job but {list(own[name].shape)}"
            raise ValueError(f"{name!r} has shape {both} in the module")
    module.load_state_dict(as_state_dict(named), strict=False)
