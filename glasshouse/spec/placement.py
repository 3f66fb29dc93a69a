"""Which of a job's devices each layer runs on, and what placing layers refuses.

With ``parallel.strategy`` ``placed``, one process has several devices, and a layer names one of
them by its index: PaddlePaddle's ``parallel_nn``.
"""

from collections.abc import Iterable, Mapping, Sequence

from glasshouse.spec.network import Layer
from glasshouse.spec.strict import WrongAt


def placed(layers: Sequence[Layer]) -> dict[str, int]:
    """Return the index of the device of each layer, by its name, in order.

    A layer without ``device`` runs where its first input runs, or where the layer that it shares
    its parameters with runs. If the first input is a data field, that is device 0.
    """
    found: dict[str, int] = {}
    previous = ""
    for layer in layers:
        source = layer.shared_with or (layer.inputs[0] if layer.inputs else previous)
        inherited = found.get(source.partition(".")[0], 0)
        found[layer.name] = inherited if layer.device is None else layer.device
        previous = layer.name
    return found


def home_of(found: Mapping[str, int], reads: Iterable[str]) -> int:
    """Return the device that losses are computed on: that of the last layer that they read.

    ``found``: what `placed` has returned. ``reads``: what all losses read.
    """
    ends = {name.partition(".")[0] for name in reads}
    return next((device for name, device in reversed([*found.items()]) if name in ends), 0)


def check_placement(
    layers: Sequence[Layer], strategy: str, kind: str, num_devices: int | None
) -> None:
    """Refuse a placement of layers that cannot run.

    ``strategy``: that of the job. ``kind`` and ``num_devices``: the type and the number of the
    devices that it asks for.

    Raises:
        WrongAt: it names the field.
    """
    if strategy != "placed":
        for number, layer in enumerate(layers):
            if layer.device is not None:
                detail = f"device (layer {layer.name!r}) needs parallel.strategy placed, and it is"
                detail += f" {strategy}: remove device, or set the strategy to placed"
                raise WrongAt("network", "layers", number, "device", detail=detail)
        return
    found = placed(layers)
    num_devices = _counted(kind, num_devices, 1 + max(found.values()))
    for number, layer in enumerate(layers):
        place = ("network", "layers", number)
        device = found[layer.name]
        if device >= num_devices:
            detail = f"device {device} of layer {layer.name!r} is none of the job's {num_devices}"
            detail += f" devices, which count from 0: set it below {num_devices}, or ask for more"
            raise WrongAt(*place, "device", detail=detail)
        owner = layer.shared_with
        if owner is not None and device != found[owner]:
            detail = f"layer {layer.name!r} shares the parameters of {owner!r}, which is on device"
            detail += f" {found[owner]}: remove device, or set it to {found[owner]}"
            raise WrongAt(*place, "device", detail=detail)
        _check_in_place(layer, number, layers, found)


def _counted(kind: str, num_devices: int | None, least: int) -> int:
    """Return the number of devices; ``least``: those that layers name."""
    if kind != "cuda":
        detail = f"parallel.strategy placed needs CUDA devices, and type is {kind!r}: set devices"
        detail += f' to {{"type": "cuda", "count": {least}}}'
        if kind == "cpu":
            detail += "; all cores of a CPU are one device for torch"
        raise WrongAt("devices", "type", detail=detail)
    if num_devices is None:
        detail = f"parallel.strategy placed needs the number of devices: set count to {least}"
        raise WrongAt("devices", "count", detail=detail)
    return num_devices


def _check_in_place(
    layer: Layer, number: int, layers: Sequence[Layer], found: dict[str, int]
) -> None:
    """Refuse to overwrite an input of another device: only its copy would change."""
    if layer.args.get("inplace") is not True:
        return
    sources = layer.inputs or ((layers[number - 1].name,) if number else ())
    for source in (name.partition(".")[0] for name in sources):
        if found.get(source, 0) != found[layer.name]:
            detail = f"inplace (layer {layer.name!r}) cannot overwrite {source!r}, which is on"
            detail += f" device {found.get(source, 0)}: remove inplace, or run both on one device"
            raise WrongAt("network", "layers", number, "args", "inplace", detail=detail)
