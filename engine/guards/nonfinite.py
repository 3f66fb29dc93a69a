"""Find the layer that first had a NaN or Inf in its output, after a step has failed."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.core.tensor_names import leaves
from engine.network.layers import LayerFailed
from engine.network.network import Network
from glasshouse.errors import NonFinite, RunFailure


def blame(
    error: Exception,
    network: Network,
    batch: Mapping[str, Tensor] | None,
    rewind: Callable[[], None],
    advice: str | None = None,
) -> Exception:
    """Return a ``NonFinite`` failure if a layer or the loss failed on NaN or Inf.

    The forward pass is run once more on the same batch. ``rewind`` restores the random state of the
    step, which only a guard keeps. ``advice``: what a guard has already found out about these
    numbers. Any other error is returned unchanged.
    """
    if batch is None or not isinstance(error, LayerFailed) or isinstance(error.cause, RunFailure):
        return error
    try:
        rewind()
        found = first_bad(network, batch)
    except Exception:  # noqa: BLE001, RUF100 (it only adds to what is known)
        return error
    if found is None:
        return error
    layer, what, is_of_data = found
    first_line = (str(error.cause).strip() or type(error.cause).__name__).splitlines()[0]
    detail = f"{what} not finite, and {error.layer!r} failed by it: {first_line}"
    own = NonFinite.OF_DATA if is_of_data else _too_large(batch)
    return NonFinite(detail, layer=layer, hint=advice or own)


def _too_large(batch: Mapping[str, Tensor]) -> str | None:
    """Return advice if a field of the data has large values; None: use the default."""
    for name, tensor in batch.items():
        absmax = float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0
        if absmax >= NonFinite.LARGE:
            return NonFinite.of_field(name, absmax)
    return None


@torch.no_grad()
def first_bad(network: Network, batch: Mapping[str, Tensor]) -> tuple[str, str, bool] | None:
    """Return the first layer with a NaN or Inf in its parameters or output, and a text; or None.

    The third item is whether it is a field of the data.
    """
    for name, tensor in batch.items():
        if not _is_finite(tensor):
            return name, f"In the data, {name!r} is", True
    for name, parameter in network.named_parameters():
        if not _is_finite(parameter):
            return name.rpartition(".")[0], f"The parameter {name!r} was", False
    found: list[str] = []
    handles = [
        module.register_forward_hook(_looker(name, found))
        for name, module in network.layers.items()
    ]
    try:
        network(batch)
    except LayerFailed:
        pass  # as in the step itself
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        return None
    return found[0], f"In the forward pass the output of {found[0]!r} was", False


def _looker(name: str, found: list[str]) -> Callable[..., None]:
    def look(_module: object, _inputs: object, output: object) -> None:
        if not found and not all(_is_finite(tensor) for _, tensor in leaves(name, output)):
            found.append(name)

    return look


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
