"""Normalizes the arguments of `Client.train` to the types that a job spec uses.

torch losses, optimizers, schedulers and data loaders become dicts; a single name becomes a list of
one. Unsupported arguments raise an error before anything is uploaded. The error names what to pass
instead.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import BaseModel

from glasshouse.client.modules import is_module
from glasshouse.client.training.probe_specs import as_probe
from glasshouse.client.training.specs import (
    Document,
    JobOptions,
    ServeOptions,
    TrainOptions,
    as_document,
)
from glasshouse.spec.presets import PRESETS
from glasshouse.suggestions import did_you_mean, either

_DEVICES = ("auto", "cpu", "cuda")
_OBJECTS = ("loss", "optimizer", "scheduler")


class Accepted(NamedTuple):
    """Normalized arguments of `Client.train`."""

    network: Any
    data: Any
    options: TrainOptions
    rates: Mapping[str, tuple[float | None, float | None]]
    """By parameter of the module, where they differ from the optimizer's: the learning rate divided
    by that of the optimizer, and the weight decay."""


def accept(network: Any, data: Any, options: TrainOptions) -> Accepted:
    """Normalize the arguments of `Client.train`.

    Raises:
        TypeError, ValueError: an argument is unsupported. The message says what to pass instead.
    """
    _check_names(options)
    taken: Document = dict(options)
    rates = _rates(network, taken)
    for name in _OBJECTS:
        if taken.get(name) is not None:
            taken[name] = _described(taken[name], name)
    if "probes" in taken:
        taken["probes"] = _probes(taken["probes"])
    settle_device(taken)
    data = _unloaded(data, taken)
    if "validation" in taken:
        taken["validation"] = _validation(taken["validation"])
    _check_network(network)
    _check_data(data)
    return Accepted(network, data, cast("TrainOptions", taken), rates)


def settle_device(options: Document) -> None:
    """Replace ``device="cuda:1"`` or ``devices="cuda"`` by ``devices`` as in the spec.

    Raises:
        TypeError, ValueError: both are set, or the device name is invalid.
    """
    named = options.pop("device", None)
    if named is not None and options.get("devices") is not None:
        raise TypeError("set device or devices, not both")
    if named is None and isinstance(options.get("devices"), str):
        named = options["devices"]
    if named is not None:
        options["devices"] = device_of(str(named))


def diagnose_spec(
    processes: int | None, sizes_bytes: Sequence[int] | None, options: JobOptions
) -> Document:
    """The spec of a diagnose job from the arguments of `Client.diagnose`.

    Raises:
        TypeError, ValueError: the device is set twice, or its name is invalid.
    """
    settled: Document = dict(options)
    settle_device(settled)
    asked: Any = settled.get("devices")
    asked = as_document(asked) if asked is not None else {}
    spec: Document = {"kind": "diagnose", **settled}
    if processes is not None and processes != 1:
        spec["parallel"] = {"strategy": "data", "processes": processes}
    elif processes is None and (asked.get("count") or len(asked.get("ids") or ())) > 1:
        spec["parallel"] = {"strategy": "data"}  # one process per device
    if sizes_bytes is not None:
        spec["sizes_bytes"] = list(sizes_bytes)
    return spec


def serve_spec(models: Any, options: ServeOptions) -> Document:
    """The spec of a serve job from the arguments of `Client.serve`.

    Raises:
        TypeError, ValueError: the device is set twice, or its name is invalid.
    """
    settled: Document = dict(options)
    settle_device(settled)
    several = list(cast("Sequence[Any]", models if isinstance(models, (list, tuple)) else [models]))
    entries: list[Any] = [
        one if isinstance(one, (str, Mapping, BaseModel)) else reference_of(one) for one in several
    ]
    return as_document({"kind": "serve", "models": entries, **settled})


def reference_of(model: Any) -> str:
    """The reference to a model or a version of one, which are objects of the client."""
    data: Mapping[str, Any] = getattr(model, "data", {})
    if data.get("object") == "model_version":
        return f"{data['model']}:{data['version']}"
    if data.get("object") == "model":
        return str(data["name"])
    raise TypeError(f"models: pass a model, a version or a reference instead of {_shown(model)}")


def device_of(text: str) -> Document:
    """Convert a device name to ``devices`` of a spec: ``cpu``, ``cuda``, ``cuda:1``, ``auto``.

    Raises:
        ValueError: the device name is invalid.
    """
    kind, colon, number = text.partition(":")
    if kind not in _DEVICES:
        raise ValueError(
            f"device: unknown device {text!r}{did_you_mean(kind, _DEVICES) or '.'} "
            "Use 'auto', 'cpu', 'cuda', or 'cuda:1' for a specific GPU"
        )
    if not colon:
        return {"type": kind}
    if kind == "cpu":
        raise ValueError(f"device: {text!r} has an index; use 'cpu', and set devices.threads")
    if kind != "cuda" or not number.isdecimal():
        raise ValueError(f"device: {text!r} has no valid index; use a name like 'cuda:1'")
    return {"type": "cuda", "ids": [int(number)]}


def moved(spec: Mapping[str, Any], device: str) -> Document:
    """Change the device of a spec, or of a merge patch of one; ``device`` is as in `device_of`.

    The worker is kept, and except for ``auto`` also the number of threads. The other fields are set
    to null, which removes them.

    Raises:
        ValueError: the device name is invalid.
    """
    chosen = device_of(device)
    others = ("count", "ids", "threads") if chosen["type"] == "auto" else ("count", "ids")
    held = spec.get("devices")
    kept = cast("Document", held) if isinstance(held, dict) else {}
    return {**spec, "devices": kept | dict.fromkeys(others) | chosen}


def _check_names(options: TrainOptions) -> None:
    unknown = sorted(set(options) - set(TrainOptions.__annotations__))
    if unknown:
        known = sorted(TrainOptions.__annotations__)
        more = did_you_mean(unknown[0], known) or f"; valid options are {', '.join(known)}"
        raise TypeError(f"train() got unknown options {', '.join(unknown)}{more}")


def _described(value: Any, name: str) -> Any:
    """A loss, optimizer or scheduler with torch objects replaced by dicts."""
    if isinstance(value, (str, BaseModel)):
        return value
    if isinstance(value, (list, tuple)):
        return [_described(item, name) for item in cast("Sequence[Any]", value)]
    if isinstance(value, Mapping):
        return _filled(dict(cast("Mapping[str, Any]", value)), name)
    found = _described_object(value, name)
    if name == "scheduler":
        raise TypeError(
            f"scheduler: the unit of {found['type']} is required. Pass a dict with the object as "
            "its type: {'type': …, 'unit': 'epochs'} if you would call step() after each epoch, "
            "'steps' if after each update"
        )
    return found


def _filled(document: Document, name: str) -> Document:
    """A dict whose type may be a torch object."""
    kind = document.get("type")
    if kind is None or isinstance(kind, str):
        return document
    found = _described_object(kind, name)
    if "args" in document and "args" in found:
        raise TypeError(f"{name}: the {found['type']} object has its arguments: remove args")
    return {**document, **found}


def _described_object(value: Any, name: str) -> Document:
    if "torch" not in sys.modules:
        raise TypeError(f"{name}: pass a torch class name or a dict instead of {_shown(value)}")
    from glasshouse.client.modules import torch_objects  # noqa: PLC0415 (imports torch)

    return torch_objects.describe(value, cast("torch_objects.What", name))


def _rates(network: Any, options: Document) -> Mapping[str, tuple[float | None, float | None]]:
    """Learning rates and weight decays from the parameter groups of an optimizer."""
    given = options.get("optimizer")
    given = cast("Document", given).get("type") if isinstance(given, Mapping) else given
    if not hasattr(given, "param_groups"):
        return {}
    from glasshouse.client.modules import torch_objects  # noqa: PLC0415 (imports torch)

    return torch_objects.rates_by_parameter(given, network)


def _probes(given: Any) -> Any:
    """Probes as a list; a glob alone observes outputs, as in `Job.probe`."""
    several: Any = [given] if isinstance(given, (str, Mapping, BaseModel)) else given
    return [
        as_probe(item, "output", "stats", {}) if isinstance(item, str) else item for item in several
    ]


# --- data ------------------------------------------------------------------------------------


def _is_loader(value: Any) -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(value, data.DataLoader)


def _unloaded(data: Any, options: Document) -> Any:
    """The dataset of a ``DataLoader``; its batch size and order become defaults of options."""
    if not _is_loader(data):
        return data
    from glasshouse.client.modules import torch_objects  # noqa: PLC0415 (imports torch)

    loaded = torch_objects.read_loader(data)
    for name, value in loaded.options.items():
        options.setdefault(name, value)
    return loaded.dataset


def _validation(given: Any) -> Any:
    """Validation data; each ``DataLoader`` is replaced by its dataset."""
    if _is_loader(given):
        return _dataset_of(given)
    if isinstance(given, Mapping):
        named = cast("Mapping[str, Any]", given).items()
        return {name: _dataset_of(one) if _is_loader(one) else one for name, one in named}
    return given


def _dataset_of(loader: Any) -> Any:
    from glasshouse.client.modules import torch_objects  # noqa: PLC0415 (imports torch)

    return torch_objects.read_loader(loader).dataset


def inputs_of(inputs: Any) -> Any:
    """The inputs of an inference; a ``DataLoader`` is replaced by its dataset.

    Raises:
        TypeError: the loader shuffles or drops rows, so outputs could not be matched to rows.
    """
    if not _is_loader(inputs):
        return inputs
    from glasshouse.client.modules import torch_objects  # noqa: PLC0415 (imports torch)

    loaded = torch_objects.read_loader(inputs)
    if loaded.options["shuffle"]["enabled"] or loaded.options.get("drop_last"):
        raise TypeError("inputs: the DataLoader shuffles or drops rows: pass its dataset instead")
    return loaded.dataset


def _check_data(data: Any) -> None:
    if isinstance(data, Path) or (isinstance(data, str) and _is_path(data)):
        raise ValueError(
            f"data: {str(data)!r} is a file, not a dataset id. Upload it: "
            f"data=client.datasets.upload({str(data)!r})"
        )
    shape = getattr(data, "shape", None)
    if shape is not None and not hasattr(data, "columns"):
        raise ValueError(
            f"data is one array of shape {list(shape)} without targets: pass a pair (x, y) or a "
            "dict of arrays by name. For an autoencoder, pass (x, x)"
        )


def _is_path(text: str) -> bool:
    return "/" in text or "\\" in text or Path(text).is_file()


# --- networks --------------------------------------------------------------------------------


def _check_network(network: Any) -> None:
    if isinstance(network, str) and network not in PRESETS:
        more = did_you_mean(network, PRESETS) or f"; use {either(PRESETS)}"
        raise ValueError(f"network: unknown preset {network!r}{more}")
    if isinstance(network, type):
        raise TypeError(
            f"network: {network.__name__} is a class: pass an instance of it: {network.__name__}(…)"
        )
    if isinstance(network, Mapping):
        _check_described(cast("Mapping[str, Any]", network))
    elif not (is_module(network) or isinstance(network, (str, list, tuple, BaseModel))):
        raise TypeError(
            f"network: pass a list of layers, the name of a preset or an nn.Module instead of "
            f"{_shown(network)}"
        )


def _check_described(network: Mapping[str, Any]) -> None:
    if "layers" in network or network.get("type") in ("preset", "id"):
        return
    if "type" in network:
        raise ValueError(
            f"network: this is one layer ({network['type']}): pass a list of layers: "
            f"[{{'name': …, 'type': {network['type']!r}, …}}]"
        )
    raise ValueError("network: pass {'layers': [...]} or {'type': 'preset', 'preset': …}")


def _shown(value: Any) -> str:
    text = f"{type(value).__name__} ({value!r:.60})"
    return text if len(text) < 100 else type(value).__name__
