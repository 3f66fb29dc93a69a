"""What a training step needs in memory beside the parameters: counted on a step without data.

The whole step runs on torch's meta device, where every tensor has a size and no memory, and each
storage counts from the operation that makes it to the moment when nobody holds it any more. That is
what torch allocates; what a device's own routines take for themselves while they work is not in it.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.layer_options import make_optimizer
from engine.losses import Losses, loss_of
from engine.network import Network
from engine.stepwise import Recurrent
from glasshouse.spec import Graph, TrainJob


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are made in here, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and take in what it made."""
        for tensor in _tensors(args):
            self._see(tensor.untyped_storage(), is_new=False)  # of outside, and so are its views
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            self._see(tensor.untyped_storage(), is_new=True)
        return output

    def _see(self, storage: torch.UntypedStorage, *, is_new: bool) -> None:
        key = storage._cdata  # pyright: ignore[reportPrivateUsage]
        if key in self._sizes:
            return
        self._sizes[key] = size = storage.nbytes() if is_new else 0
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.layout is torch.strided:
            yield output
    elif isinstance(output, (tuple, list)):
        for item in output:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(item)


def step_peak(
    job: TrainJob, wanted: Sequence[str], make_batch: Callable[[], dict[str, Tensor]]
) -> int | None:
    """The most bytes that a step holds at once: its batch, activations, gradients, and what comes.

    Parameters and what the optimizer keeps are not in it. None: a layer cannot run without data.
    """
    with contextlib.suppress(Exception), torch.device("meta"):
        network = Network(_without_lengths(job.network), wanted, kept_at=job.kept_at)
        loss_fn = Losses.of(job)
        network.train()
        for module in network.modules():
            if isinstance(module, Recurrent):
                module.meta_steps = 16
        live = LiveBytes()
        with live:
            batch = make_batch()
            values = network(batch)
            loss = loss_of(loss_fn, values, job.loss_inputs)
            del batch, values
            loss.backward()
            del loss
        return max(live.peak, live.now + _update_peak(job, network))
    return None


def _update_peak(job: TrainJob, network: nn.Module) -> int:
    """What an optimizer holds for a moment while it updates; 0 where that needs real numbers."""
    with contextlib.suppress(Exception):
        optimizer = make_optimizer(job.optimizer, job.network, network)
        optimizer.step()  # makes what it keeps
        with LiveBytes() as live:
            optimizer.step()
        return live.peak
    return 0


def _without_lengths(graph: Graph) -> Graph:
    """The graph with every row as long as the longest, which needs most."""
    layers = tuple(layer.model_copy(update={"lengths": None}) for layer in graph.layers)
    return graph.model_copy(update={"layers": layers})
